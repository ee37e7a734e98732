//! State shared by the admin API handlers.

use crate::{
    AuthMode, DumpSlots, Explainer, FailedAuthThrottle, LogLevels, NodeCache, OverloadReport,
    RuleFilesControl, Sessions, UsageReader,
};
use http::StatusCode;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_control::{ControlPlane, Role, RuleManager};
use tollgate_http::problem::Problem;
use tollgate_observe::{ProcessStatus, Telemetry};
use tollgate_rules::Ruleset;

/// State shared by the admin API handlers.
pub struct AdminState {
    /// The control plane, if there is a database; handlers use [`AdminState::control`].
    pub control: Option<Arc<ControlPlane>>,
    /// The rule manager, if rules can be published; handlers use [`AdminState::rule_manager`].
    pub rule_manager: Option<Arc<RuleManager>>,
    /// The active rules, used to validate requests.
    pub rules: Box<dyn Fn() -> Arc<Ruleset> + Send + Sync>,
    /// The rule files of the process.
    pub rule_files: Arc<dyn RuleFilesControl>,
    /// Access to usage counters.
    pub usage: Arc<dyn UsageReader>,
    /// Formats a client's address as the attribute `remote_address` contains it.
    pub address_attribute: Box<dyn Fn(IpAddr) -> String + Send + Sync>,
    /// Explanations of requests.
    pub explainer: Arc<dyn Explainer>,
    /// Reports what the process sheds.
    pub overload: Box<dyn Fn() -> OverloadReport + Send + Sync>,
    /// The state of the process.
    pub status: Arc<dyn ProcessStatus>,
    /// The log levels of the process.
    pub log: Arc<dyn LogLevels>,
    /// When a token is required.
    pub auth_mode: AuthMode,
    /// Open browser sessions.
    pub sessions: Sessions,
    /// Roles by certificate name.
    pub roles: BTreeMap<String, Role>,
    /// Throttle for wrong tokens.
    pub throttle: FailedAuthThrottle,
    /// The other nodes, as last read from the database.
    pub nodes: NodeCache,
    /// The dumps of quotas that are being sent.
    pub dumps: DumpSlots,
    /// Days that the database keeps the history; 0 for none.
    pub history_days: u32,
}

impl AdminState {
    /// Returns the rule manager; otherwise a problem that explains how to enable it.
    pub(crate) fn rule_manager(&self) -> Result<&Arc<RuleManager>, Problem> {
        self.control()?;
        self.rule_manager.as_ref().ok_or_else(|| Problem::bad("rules cannot be published on this node"))
    }

    /// Returns the control plane; otherwise a problem that explains how to enable it.
    pub(crate) fn control(&self) -> Result<&Arc<ControlPlane>, Problem> {
        self.control.as_ref().ok_or_else(|| {
            let detail = "this server has no control-plane database; start it with --db sqlite:tollgate.db, or \
                          with --db postgres://… for several nodes";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "No database", detail)
        })
    }

    /// Returns the telemetry.
    pub(crate) fn telemetry(&self) -> Result<&Arc<Telemetry>, Problem> {
        self.status.telemetry().ok_or_else(|| {
            let detail = "this process does not record its decisions";
            Problem::new(StatusCode::NOT_FOUND, "Decision log disabled", detail)
        })
    }
}
