//! Process status: readiness, metrics and node details, served by the HTTP listener and the admin listener.

use crate::{ExpositionFormat, MetricsWriter, Telemetry};
use serde_json::Value;
use std::sync::Arc;

/// Detail level of [`ProcessStatus::readiness`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    /// Ready or not, nothing else.
    Brief,
    /// With all details.
    Verbose,
}

impl Verbosity {
    /// Parses the query of `/readyz`: `?verbose`, with any value.
    #[must_use]
    pub fn from_query(query: &str) -> Self {
        let verbose = query.split('&').any(|word| word == "verbose" || word.starts_with("verbose="));
        if verbose { Self::Verbose } else { Self::Brief }
    }
}

/// State of the process that servers may expose.
pub trait ProcessStatus: Send + Sync {
    /// Returns whether the node should receive new requests.
    fn is_ready(&self) -> bool;

    /// Returns details on readiness for operators: rule files, rules hash, the last error.
    fn details(&self) -> Value;

    /// Writes all metrics of the process.
    fn metrics(&self, page: &mut MetricsWriter);

    /// Renders all metrics in a format. Slow with many rules; must not run on a thread that serves checks.
    fn metrics_text(&self, format: ExpositionFormat) -> String {
        let mut page = MetricsWriter::new(format);
        self.metrics(&mut page);
        page.finish()
    }

    /// Returns whether the node should receive new requests, and the JSON body of `/readyz`.
    fn readiness(&self, verbosity: Verbosity) -> (bool, String) {
        let ready = self.is_ready();
        let mut body = match verbosity {
            Verbosity::Verbose => self.details(),
            Verbosity::Brief => serde_json::json!({}),
        };
        body["ready"] = ready.into();
        (ready, format!("{body:#}\n"))
    }

    /// Returns the telemetry, if enabled.
    fn telemetry(&self) -> Option<&Arc<Telemetry>> {
        None
    }

    /// Returns the state of this node that telemetry does not have: rules, store, breakers, leases.
    fn node(&self) -> Value {
        serde_json::json!({})
    }

    /// Returns what this node publishes in its heartbeat for nodes that share its database.
    fn presence(&self) -> Value {
        serde_json::json!({})
    }

    /// Returns the keys with the most traffic on this node.
    fn hot(&self) -> Value {
        serde_json::json!({"hot": []})
    }
}
