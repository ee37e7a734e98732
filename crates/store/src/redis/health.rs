//! Health of one server: its breaker, its counts of errors, and what is logged about it.
//!
//! A server that refuses to work answers all the same, also to what it does not refuse: a replica returns the time, a full
//! server denies. So a refusal is ended by a call that the server accepted, or by a probe that charges as checks do; a
//! mere sign of life does not count, or the breaker would open and close in turn.

use super::server_error::{ServerError, SettingNames};
use crate::breaker::{Breaker, BreakerConfig, BreakerState, ShardFailure, Transition};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// What was last wrong with a server.
struct LastError {
    /// Code of the refusal, or the kind of failure.
    code: &'static str,
    text: String,
    at: Timestamp,
}

/// How long an error is reported after it was last seen; it is logged again only after it was gone for longer.
const RECENT: TimeDelta = TimeDelta::from_secs(10);
const LOG_AGAIN: TimeDelta = TimeDelta::from_secs(60);

/// How long checks are counted before it is decided whether most were too late, and how many that takes at least.
const LATENESS_WINDOW: TimeDelta = TimeDelta::from_secs(5);
const MIN_LATENESS_CHECKS: u64 = 20;

/// When the counts of checks in time and too late began, and when it was last logged that most are too late.
#[derive(Default)]
struct Lateness {
    since: Timestamp,
    late: u64,
    logged_at: Option<Timestamp>,
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
    /// Refused requests, by code.
    refusals: [AtomicU64; ServerError::KINDS],
    /// Whether the server has refused to work, and has not worked since.
    is_refusing: AtomicBool,
    last_error: Mutex<Option<LastError>>,
    /// Checks that got their reply in time since `lateness` began to count.
    in_time: AtomicU64,
    lateness: Mutex<Lateness>,
    names: SettingNames,
    /// Slot of a recent request: a probe of a cluster's server must charge in a slot that it has.
    slot: AtomicU64,
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
        names: SettingNames,
    ) -> Self {
        let deadline = TimeDelta::from_micros(u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX));
        let clock_now = clock.now();
        Self {
            address,
            clock,
            breaker: Breaker::new(config),
            silence: config.silence,
            distinct: deadline,
            refused_at: AtomicU64::new(0),
            errors: Default::default(),
            refusals: Default::default(),
            is_refusing: AtomicBool::new(false),
            last_error: Mutex::default(),
            in_time: AtomicU64::new(0),
            lateness: Mutex::new(Lateness { since: clock_now, ..Lateness::default() }),
            names,
            slot: AtomicU64::new(0),
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

    /// Returns whether the server has refused to work, and has not worked since.
    pub(super) fn is_refusing(&self) -> bool {
        self.is_refusing.load(Ordering::Acquire)
    }

    /// Remembers a slot that the server has.
    pub(super) fn set_slot(&self, slot: u16) {
        self.slot.store(u64::from(slot), Ordering::Relaxed);
    }

    /// Returns a slot that the server has, as far as is known.
    pub(super) fn slot(&self) -> u16 {
        u16::try_from(self.slot.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// Counts an error of one request.
    pub(super) fn count(&self, kind: ErrorKind) {
        self.errors[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that the server refused.
    pub(super) fn count_refusal(&self, error: &ServerError) {
        self.count(ErrorKind::Rejected);
        self.refusals[error.kind()].fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a check got its reply in time.
    pub(super) fn record_in_time(&self) {
        self.in_time.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a check did not get its reply in time, and logs if that is so for most. A server that is slower than
    /// the deadline answers all the same, so that its breaker stays closed.
    pub(super) fn record_late(&self) {
        self.count(ErrorKind::Timeout);
        if self.is_mostly_late() {
            tracing::warn!(
                shard = self.address,
                deadline = %format!("{} ms", self.distinct.ceil_millis()),
                "most checks pass the deadline and are decided without Redis; raise {} if it is this far away, or see why \
                 it is slow",
                self.names.deadline
            );
        }
    }

    /// Counts a late check. Returns whether to log that most are late: at most once a minute.
    fn is_mostly_late(&self) -> bool {
        let now = self.clock.now();
        let mut lateness = self.lateness.lock().unwrap_or_else(PoisonError::into_inner);
        lateness.late += 1;
        if now.since(lateness.since) < LATENESS_WINDOW {
            return false;
        }
        let (late, in_time) = (lateness.late, self.in_time.swap(0, Ordering::Relaxed));
        (lateness.since, lateness.late) = (now, 0);
        let is_due = lateness.logged_at.is_none_or(|logged| now.since(logged) >= LOG_AGAIN);
        let is_logged = is_due && late > in_time && late + in_time >= MIN_LATENESS_CHECKS;
        if is_logged {
            lateness.logged_at = Some(now);
        }
        is_logged
    }

    pub(super) fn error_counts(&self) -> Vec<(&'static str, u64)> {
        let counts = ErrorKind::NAMES.into_iter().zip(&self.errors);
        counts.map(|(name, count)| (name, count.load(Ordering::Relaxed))).collect()
    }

    /// Returns the number of refused requests by code.
    pub(super) fn refusal_counts(&self) -> Vec<(&'static str, u64)> {
        let counts = ServerError::codes().zip(&self.refusals);
        counts.map(|(code, count)| (code, count.load(Ordering::Relaxed))).collect()
    }

    fn last_error(&self) -> MutexGuard<'_, Option<LastError>> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what is wrong with the server: while its breaker is open, and for a moment after.
    pub(super) fn error(&self) -> Option<String> {
        let now = self.clock.now();
        let last_error = self.last_error();
        let current = last_error.as_ref().filter(|known| self.is_open() || now.since(known.at) < RECENT)?;
        Some(current.text.clone())
    }

    /// Records that the server answered a call, however late.
    pub(super) fn record_answer(&self) {
        if self.is_refusing() {
            if self.is_open() {
                // Only a probe shows that it works again.
                return;
            }
            self.is_refusing.store(false, Ordering::Release);
        }
        self.close();
    }

    /// Records a sign of life that says nothing about whether the server works.
    pub(super) fn record_life(&self) {
        if !self.is_refusing() {
            self.close();
        }
    }

    /// Records that a probe was charged.
    pub(super) fn record_recovery(&self) {
        self.is_refusing.store(false, Ordering::Release);
        self.close();
    }

    fn close(&self) {
        if self.breaker.record_answer() == Transition::Closed {
            tracing::info!(shard = self.address, "circuit breaker closed");
            *self.last_error() = None;
            self.is_open.send_replace(false);
        }
    }

    /// Records that a batch was not answered in time. `late_by` is how late this process noticed: if that is long, the
    /// process did not run, and its server may well have answered.
    pub(super) fn record_no_answer(&self, late_by: Duration) {
        if late_by > Duration::from(self.silence).max(Duration::from_millis(100)) / 2 {
            self.breaker.record_pause();
        } else {
            self.record_trouble("timeout", "no answer in time");
            self.record_failure(ShardFailure::NoAnswer);
        }
    }

    /// Records a connection that was refused or lost.
    pub(super) fn record_connection_failure(&self, why: &str) {
        self.record_trouble("connection", why);
        self.record_failure(ShardFailure::Refused);
    }

    /// Records that the server refuses to work. Requests are tried again within their deadline, so refusals closer
    /// together than that are one failure.
    pub(super) fn record_refusal(&self, error: &ServerError) {
        self.is_refusing.store(true, Ordering::Release);
        if self.record_trouble(error.code(), &error.to_string()) {
            tracing::warn!(
                shard = self.address,
                code = error.code(),
                error = %error,
                "Redis refuses to work; {}",
                error.advice(&self.names)
            );
        }
        let now = self.clock.now();
        let last = Timestamp::from_micros(self.refused_at.load(Ordering::Relaxed));
        if last == Timestamp::ZERO || now.since(last) >= self.distinct {
            self.refused_at.store(now.as_micros(), Ordering::Relaxed);
            self.record_failure(ShardFailure::Refused);
        }
    }

    /// Remembers what is wrong. Returns whether it is new.
    fn record_trouble(&self, code: &'static str, text: &str) -> bool {
        let now = self.clock.now();
        let mut last_error = self.last_error();
        match &mut *last_error {
            Some(known) if known.code == code => {
                let before = std::mem::replace(&mut known.at, now);
                now.since(before) >= LOG_AGAIN
            }
            // Requests that wait for a server that refuses to work say nothing new.
            Some(_) if code == "timeout" && self.is_refusing() => false,
            _ => {
                *last_error = Some(LastError { code, text: text.to_owned(), at: now });
                true
            }
        }
    }

    fn record_failure(&self, failure: ShardFailure) {
        if self.breaker.record_failure(failure, self.clock.now()) == Transition::Open {
            let error = self.error().unwrap_or_default();
            tracing::warn!(
                shard = self.address,
                error,
                "circuit breaker open; rules decide by their on_error"
            );
            self.is_open.send_replace(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::ManualClock;

    fn health() -> (Health, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
        let manual: Arc<dyn Clock> = Arc::<ManualClock>::clone(&clock);
        let names = SettingNames::default();
        let health =
            Health::new("a:1".to_owned(), BreakerConfig::default(), Duration::from_millis(10), manual, names);
        (health, clock)
    }

    /// Who runs at a distance from Redis that exceeds the deadline has only local limits, and must learn it.
    #[test]
    fn it_is_logged_once_a_minute_that_most_checks_are_late() {
        let (health, clock) = health();
        let count = |late: u64, in_time: u64| {
            (0..in_time).for_each(|_| health.record_in_time());
            let logged = (0..late).filter(|_| health.is_mostly_late()).count();
            clock.advance(LATENESS_WINDOW);
            logged + usize::from(health.is_mostly_late())
        };
        assert_eq!(count(30, 10), 1);
        assert_eq!((0..11).map(|_| count(30, 10)).sum::<usize>(), 0, "within a minute");
        assert_eq!(count(30, 10), 1);
        clock.advance(LOG_AGAIN);
        assert!(!health.is_mostly_late());
        assert_eq!(count(10, 30), 0, "a few");
        assert_eq!(count(3, 0), 0, "too few to tell");
    }

    /// A full server returns the time and rejects commands: neither may close the breaker, or it opens and closes in turn.
    #[test]
    fn a_server_that_refuses_to_work_is_used_again_after_a_probe_only() {
        let (health, clock) = health();
        let full = ServerError::new("OOM", "command not allowed");
        for _ in 0..5 {
            clock.advance(TimeDelta::from_millis(10));
            health.record_refusal(&full);
            health.record_life();
        }
        assert!(health.is_open() && health.is_refusing());
        health.record_life();
        health.record_answer();
        clock.advance(TimeDelta::from_secs(60));
        assert!(health.is_open());
        assert_eq!(health.error().as_deref(), Some("OOM command not allowed"));
        health.record_recovery();
        assert_eq!((health.is_open(), health.is_refusing(), health.error()), (false, false, None));
    }

    /// Accepted calls between refusals keep the breaker closed: a full server still denies what is used up.
    #[test]
    fn a_server_that_works_between_refusals_stays_in_use() {
        let (health, clock) = health();
        for _ in 0..50 {
            clock.advance(TimeDelta::from_millis(20));
            health.record_refusal(&ServerError::new("OOM", "command not allowed"));
            health.record_answer();
        }
        assert!(!health.is_open() && !health.is_refusing());
        assert!(health.error().is_some(), "and operators see it");
        clock.advance(RECENT);
        assert_eq!(health.error(), None);
    }

    /// An error is reported once, not at every request, and again when it is something else.
    #[test]
    fn a_trouble_is_new_once() {
        let (health, clock) = health();
        let reported = ["OOM", "OOM", "READONLY", "READONLY", "OOM"].map(|code| {
            clock.advance(TimeDelta::from_secs(1));
            health.record_trouble(code, code)
        });
        assert_eq!(reported, [true, false, true, false, true]);
        clock.advance(LOG_AGAIN);
        assert!(health.record_trouble("OOM", "OOM"), "it was gone for a while");
    }
}
