//! State of the xDS stream, for metrics, `/readyz?verbose` and a start that waits for the first response.

use super::settings::XdsSettings;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_observe::{MetricsWriter, rfc3339};

/// State of the stream and of what it has delivered.
pub(crate) struct XdsStatus {
    server: String,
    node_id: String,
    clock: SystemClock,
    state: Mutex<State>,
    accepted: AtomicU64,
    refused: AtomicU64,
    failures: AtomicU64,
    /// Whether any response was accepted or refused.
    answered: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    /// Since when the connection is open.
    connected: Option<Timestamp>,
    /// Why the last stream ended; none while one is open.
    error: Option<String>,
    /// The response in effect.
    accepted: Option<Accepted>,
    /// Why the last response was refused; none if it was accepted.
    refused: Option<String>,
}

struct Accepted {
    version: String,
    resources: usize,
    at: Timestamp,
}

impl XdsStatus {
    pub(crate) fn new(settings: &XdsSettings) -> Arc<Self> {
        Arc::new(Self {
            server: settings.server.to_string(),
            node_id: settings.node_id.clone(),
            clock: SystemClock::new(),
            state: Mutex::default(),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            answered: watch::Sender::new(false),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn record_connected(&self) {
        let mut state = self.state();
        (state.connected, state.error) = (Some(self.clock.now()), None);
    }

    pub(super) fn record_ended(&self, error: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        (state.connected, state.error) = (None, Some(error.to_owned()));
    }

    pub(super) fn record_accepted(&self, version: &str, resources: usize) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        state.accepted = Some(Accepted { version: version.to_owned(), resources, at: self.clock.now() });
        state.refused = None;
        drop(state);
        self.answered.send_replace(true);
    }

    pub(super) fn record_refused(&self, reason: &str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.state().refused = Some(reason.to_owned());
        self.answered.send_replace(true);
    }

    /// Returns whether a response was accepted since the start.
    pub(crate) fn has_config(&self) -> bool {
        self.state().accepted.is_some()
    }

    /// Waits for the first response, good or bad.
    pub(crate) async fn first_response(&self) {
        let _ = self.answered.subscribe().wait_for(|answered| *answered).await;
    }

    /// Returns the part of `/readyz?verbose`.
    pub(crate) fn details(&self) -> Value {
        let state = self.state();
        let accepted = state.accepted.as_ref();
        json!({
            "server": self.server,
            "node_id": self.node_id,
            "connected": state.connected.is_some(),
            "connected_since": state.connected.map(rfc3339),
            "error": state.error,
            "version": accepted.map(|accepted| &accepted.version),
            "resources": accepted.map(|accepted| accepted.resources),
            "accepted_at": accepted.map(|accepted| rfc3339(accepted.at)),
            "refused": state.refused,
        })
    }

    pub(crate) fn metrics(&self, page: &mut MetricsWriter) {
        let (is_connected, has_config, is_refused) = {
            let state = self.state();
            (state.connected.is_some(), state.accepted.is_some(), state.refused.is_some())
        };
        let help = "Whether the connection to the xDS management server is open.";
        page.gauge("ratelimit_xds_connected", help, u64::from(is_connected));
        let help = "Whether any configuration was accepted from xDS since the start.";
        page.gauge("ratelimit_xds_has_config", help, u64::from(has_config));
        let help = "Whether the last xDS configuration was refused, so that an earlier one is in effect.";
        page.gauge("ratelimit_xds_refused", help, u64::from(is_refused));
        let mut family = page.counters(
            "ratelimit_xds_responses_total",
            "Number of configurations received over xDS, by result: accepted or refused.",
        );
        for (result, count) in [("accepted", &self.accepted), ("refused", &self.refused)] {
            family.add(&[("result", result)], count.load(Ordering::Relaxed));
        }
        let help = "Number of xDS streams that ended or could not be opened.";
        page.counter("ratelimit_xds_stream_failures_total", help, self.failures.load(Ordering::Relaxed));
    }
}
