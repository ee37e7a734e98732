//! How loading rules is reported: in Tollgate's words, or in those of envoyproxy/ratelimit, for which logs and alerts are
//! searched.

use std::fmt::Write;
use tollgate_rules::{Diagnostic, Diagnostics};

/// The words of log messages about rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wording {
    #[default]
    Own,
    /// Those of envoyproxy/ratelimit.
    RatelimitService,
}

impl Wording {
    /// Renders the errors of a reload.
    pub(crate) fn errors(self, errors: &Diagnostics) -> String {
        match self {
            Self::Own => errors.to_string(),
            Self::RatelimitService => service_errors(errors),
        }
    }

    /// Returns what is wrong, in one line without its place.
    pub(crate) fn reason(self, error: &Diagnostic) -> String {
        let help = error.help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
        match (self, &error.envoy_reason) {
            (Self::RatelimitService, Some(reason)) => reason.clone(),
            _ => format!("{}{help}", error.message),
        }
    }

    /// Renders the errors of a start.
    pub(crate) fn start_errors(self, errors: &Diagnostics) -> String {
        match self {
            Self::Own => format!("the rules cannot be used\n{errors}"),
            Self::RatelimitService => service_errors(errors),
        }
    }

    /// Logs that rules cannot be used.
    pub(crate) fn log_failed(self, error: &str) {
        match self {
            Self::Own => tracing::error!("rule reload failed; keeping previous rules\n{error}"),
            Self::RatelimitService => tracing::error!("Error loading new configuration: {error}"),
        }
    }

    /// Logs that rules took effect.
    pub(crate) fn log_loaded(self) {
        if self == Self::RatelimitService {
            tracing::info!("Successfully loaded new configuration");
        }
    }
}

/// Renders `name: why (line, column)` for each error, the first in the words that are searched for.
fn service_errors(errors: &Diagnostics) -> String {
    let mut text = String::new();
    for diagnostic in errors.all() {
        let Diagnostic { file, line, column, message, envoy_reason, .. } = diagnostic;
        let reason = envoy_reason.as_ref().unwrap_or(message);
        let separator = if text.is_empty() { "" } else { "; " };
        let _ = write!(text, "{separator}{file}: {reason} (line {line}, column {column})");
    }
    text
}
