//! Health of one server: its breaker, its counts of errors, and what is logged about it.

use crate::breaker::{Breaker, BreakerConfig, BreakerState, ShardFailure, Transition};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tollgate_core::{Clock, TimeDelta, Timestamp};

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// No reply within the deadline.
    Timeout,
    /// No connection, or a broken one.
    Connection,
    /// The server returned an error.
    Rejected,
    /// The breaker is open: nothing was sent.
    Open,
    /// Too many calls are queued.
    Busy,
    /// The reply could not be computed, because a key of the request holds something else than counters.
    Damaged,
}

impl ErrorKind {
    /// Names in logs and metrics, in the order above.
    const NAMES: [&'static str; 6] =
        ["timeout", "connection", "refused", "breaker_open", "busy", "damaged_key"];
}

/// Health of one server, shared by its pipelines.
pub(super) struct Health {
    address: String,
    clock: Arc<dyn Clock>,
    breaker: Breaker,
    silence: TimeDelta,
    /// Failures closer together than this are one failure of the server.
    distinct: TimeDelta,
    refused_at: AtomicU64,
    errors: [AtomicU64; ErrorKind::NAMES.len()],
    is_open: watch::Sender<bool>,
}

/// A probe in flight.
pub(super) struct Probing<'a>(&'a Breaker);

impl Drop for Probing<'_> {
    fn drop(&mut self) {
        self.0.set_probing(false);
    }
}

impl Health {
    pub(super) fn new(
        address: String,
        config: BreakerConfig,
        deadline: Duration,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let deadline = TimeDelta::from_micros(u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX));
        Self {
            address,
            clock,
            breaker: Breaker::new(config),
            silence: config.silence,
            distinct: deadline,
            refused_at: AtomicU64::new(0),
            errors: Default::default(),
            is_open: watch::Sender::new(false),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.breaker.is_open()
    }

    pub(super) fn state(&self) -> BreakerState {
        self.breaker.state()
    }

    /// Returns how long one connection may say nothing before it is replaced. Longer than it takes the breaker to open:
    /// this is for a connection that is dead while its server is not.
    pub(super) fn connection_silence(&self) -> Duration {
        let most = self.silence.max(self.distinct).as_micros().saturating_mul(4);
        Duration::from_micros(most).max(Duration::from_secs(2))
    }

    /// Returns a receiver of the breaker's changes: true while it is open.
    pub(super) fn changes(&self) -> watch::Receiver<bool> {
        self.is_open.subscribe()
    }

    /// Marks a probe as in flight until the result is dropped.
    pub(super) fn probing(&self) -> Probing<'_> {
        self.breaker.set_probing(true);
        Probing(&self.breaker)
    }

    pub(super) fn probe_pause(&self, probes: u32) -> Duration {
        self.breaker.probe_pause(probes, self.clock.now()).into()
    }

    /// Counts an error of one request.
    pub(super) fn count(&self, kind: ErrorKind) {
        self.errors[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn error_counts(&self) -> Vec<(&'static str, u64)> {
        let counts = ErrorKind::NAMES.into_iter().zip(&self.errors);
        counts.map(|(name, count)| (name, count.load(Ordering::Relaxed))).collect()
    }

    /// Records that the server answered, however late.
    pub(super) fn record_answer(&self) {
        if self.breaker.record_answer() == Transition::Closed {
            tracing::info!(shard = self.address, "circuit breaker closed");
            self.is_open.send_replace(false);
        }
    }

    /// Records that a batch was not answered in time. `late_by` is how late this process noticed: if that is long, the
    /// process did not run, and its server may well have answered.
    pub(super) fn record_no_answer(&self, late_by: Duration) {
        if late_by > Duration::from(self.silence).max(Duration::from_millis(100)) / 2 {
            self.breaker.record_pause();
        } else {
            self.record_failure(ShardFailure::NoAnswer, ErrorKind::Timeout);
        }
    }

    /// Records a connection that was refused or lost.
    pub(super) fn record_connection_failure(&self) {
        self.record_failure(ShardFailure::Refused, ErrorKind::Connection);
    }

    /// Records that the server refuses to work. Requests are tried again within their deadline, so refusals closer
    /// together than that are one failure.
    pub(super) fn record_refusal(&self) {
        let now = self.clock.now();
        let last = Timestamp::from_micros(self.refused_at.load(Ordering::Relaxed));
        if last == Timestamp::ZERO || now.since(last) >= self.distinct {
            self.refused_at.store(now.as_micros(), Ordering::Relaxed);
            self.record_failure(ShardFailure::Refused, ErrorKind::Rejected);
        }
    }

    fn record_failure(&self, failure: ShardFailure, kind: ErrorKind) {
        if self.breaker.record_failure(failure, self.clock.now()) == Transition::Open {
            tracing::warn!(
                shard = self.address,
                error = ErrorKind::NAMES[kind as usize],
                "circuit breaker open; rules decide by their on_error"
            );
            self.is_open.send_replace(true);
        }
    }
}
