//! What handlers work with.

use crate::{AuthMode, FailedAuthThrottle, LogLevels, NodeCache, Sessions, UsageReader};
use http::StatusCode;
use std::collections::BTreeMap;
use std::sync::Arc;
use tollgate_control::{ControlPlane, Role, RuleManager};
use tollgate_http::problem::Problem;
use tollgate_observe::{ProcessStatus, Telemetry};
use tollgate_rules::Ruleset;

/// What every handler needs.
pub struct AdminState {
    /// The control plane, if there is a database; handlers use [`AdminState::control`].
    pub control: Option<Arc<ControlPlane>>,
    /// The active rules, and how to publish others; handlers use [`AdminState::rule_manager`].
    pub rule_manager: Option<Arc<RuleManager>>,
    /// The active rules, against which requests are checked.
    pub rules: Box<dyn Fn() -> Arc<Ruleset> + Send + Sync>,
    /// Reads the counters.
    pub usage: Arc<dyn UsageReader>,
    /// The state of the process.
    pub status: Arc<dyn ProcessStatus>,
    /// The log levels of the process.
    pub log: Arc<dyn LogLevels>,
    /// Whether a token is always needed.
    pub auth_mode: AuthMode,
    /// Browsers that have logged in.
    pub sessions: Sessions,
    /// The roles of names that client certificates prove.
    pub roles: BTreeMap<String, Role>,
    /// Sources of wrong tokens.
    pub throttle: FailedAuthThrottle,
    /// The other nodes, as the database listed them last.
    pub nodes: NodeCache,
}

impl AdminState {
    /// The active rules, and how to publish others; else what to do to have that.
    pub(crate) fn rule_manager(&self) -> Result<&Arc<RuleManager>, Problem> {
        self.control()?;
        self.rule_manager.as_ref().ok_or_else(|| Problem::bad("no rules can be published here"))
    }

    /// The control plane; else what to do to have one.
    pub(crate) fn control(&self) -> Result<&Arc<ControlPlane>, Problem> {
        self.control.as_ref().ok_or_else(|| {
            let detail = "this server keeps nothing that operators decide; start it with --db sqlite:tollgate.db, or \
                          with --db postgres://… for several nodes";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "No database", detail)
        })
    }

    /// What observes decisions.
    pub(crate) fn telemetry(&self) -> Result<&Arc<Telemetry>, Problem> {
        self.status.telemetry().ok_or_else(|| {
            let detail = "this process does not watch its decisions";
            Problem::new(StatusCode::NOT_FOUND, "Decision log disabled", detail)
        })
    }
}
