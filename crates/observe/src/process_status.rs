//! What servers report of the process that they run in: on the HTTP address and on the admin address alike.

use crate::{ExpositionFormat, MetricsWriter, Telemetry};
use serde_json::Value;
use std::sync::Arc;

/// How much [`ProcessStatus::readiness`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    /// Ready or not.
    Brief,
    /// The details too.
    Verbose,
}

impl Verbosity {
    /// As the query of `/readyz` asks for it: `?verbose`, whatever its value.
    #[must_use]
    pub fn from_query(query: &str) -> Self {
        let verbose = query.split('&').any(|word| word == "verbose" || word.starts_with("verbose="));
        if verbose { Self::Verbose } else { Self::Brief }
    }
}

/// The state of the process, as far as callers may see it.
pub trait ProcessStatus: Send + Sync {
    /// Whether new requests should still be sent here.
    fn is_ready(&self) -> bool;

    /// Everything an operator wants to know about readiness: rule files, revision, the last error.
    fn details(&self) -> Value;

    /// Writes the figures of the process.
    fn metrics(&self, page: &mut MetricsWriter);

    /// All figures in a format; slow where there are many rules, so not for the threads that decide.
    fn metrics_text(&self, format: ExpositionFormat) -> String {
        let mut page = MetricsWriter::new(format);
        self.metrics(&mut page);
        page.finish()
    }

    /// Whether new requests should still be sent here, and the JSON that says so, and more if it is wanted.
    fn readiness(&self, verbosity: Verbosity) -> (bool, String) {
        let ready = self.is_ready();
        let mut body = match verbosity {
            Verbosity::Verbose => self.details(),
            Verbosity::Brief => serde_json::json!({}),
        };
        body["ready"] = ready.into();
        (ready, format!("{body:#}\n"))
    }

    /// Who watches decisions, if anybody does.
    fn telemetry(&self) -> Option<&Arc<Telemetry>> {
        None
    }

    /// What is known of this node beyond what its watcher knows: rules, store, breakers, leases.
    fn node(&self) -> Value {
        serde_json::json!({})
    }

    /// What nodes that share a database tell each other of themselves.
    fn presence(&self) -> Value {
        serde_json::json!({})
    }

    /// The keys with the most traffic at this node.
    fn hot(&self) -> Value {
        serde_json::json!({"hot": []})
    }
}
