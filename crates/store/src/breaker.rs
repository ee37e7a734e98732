//! Circuit breaker: stops calling a failing shard and probes it once after a cooldown.
//!
//! While closed, every request passes. After `failures` failures within `window` it opens: requests are rejected
//! immediately, without waiting for the failing shard. After `cooldown` one request is let through as a probe; if it
//! succeeds the breaker closes, if it fails the breaker stays open for another `cooldown`. A probe whose caller
//! disconnects proves nothing: the next request probes.
//!
//! Pure: `now` is an argument, so a test runs its whole life cycle in no time. A failure ratio was rejected: on a shard
//! that serves thousands of requests a second it opens too late, on one that serves few it opens on noise.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// Thresholds for opening and probing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Number of failures within `window` that open the breaker.
    pub failures: usize,
    /// Time over which failures are counted.
    pub window: TimeDelta,
    /// Time that the breaker stays open before it allows a probe.
    pub cooldown: TimeDelta,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, window: TimeDelta::from_secs(10), cooldown: TimeDelta::from_secs(30) }
    }
}

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests pass.
    Closed,
    /// Requests are rejected.
    Open,
    /// One probe is in flight, or the next request will be the probe.
    HalfOpen,
}

impl BreakerState {
    /// Returns the name used in responses, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// Change of state caused by the result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// No change.
    Unchanged,
    /// The breaker opened: requests are rejected from now on.
    Open,
    /// The breaker closed: requests pass again.
    Closed,
}

/// A circuit breaker.
///
/// ```
/// use tollgate_core::{TimeDelta, Timestamp};
/// use tollgate_store::{Breaker, BreakerConfig, BreakerState};
/// let breaker = Breaker::new(BreakerConfig { failures: 1, ..BreakerConfig::default() });
/// let now = Timestamp::from_secs(1_000);
/// breaker.try_acquire(now).expect("closed").record_failure(now);
/// assert!(breaker.try_acquire(now).is_none());
/// assert_eq!(breaker.state(now + TimeDelta::from_secs(30)), BreakerState::HalfOpen);
/// ```
#[derive(Debug)]
pub struct Breaker {
    config: BreakerConfig,
    /// Whether there are failures to check: false on the fast path, which then takes no lock.
    has_failures: AtomicBool,
    window: Mutex<FailureWindow>,
}

#[derive(Debug, Default)]
struct FailureWindow {
    /// Latest failures, oldest first; at most `failures` of them.
    failures: VecDeque<Timestamp>,
    opened: Option<Timestamp>,
    probing: bool,
}

/// Permission for one call; it must be completed with `record_success` or `record_failure`.
#[derive(Debug)]
#[must_use = "a breaker learns from what its tickets are told"]
pub struct CallGuard<'a> {
    breaker: &'a Breaker,
    probe: bool,
}

impl Breaker {
    /// Creates a closed breaker.
    #[must_use]
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, has_failures: AtomicBool::new(false), window: Mutex::default() }
    }

    fn window(&self) -> MutexGuard<'_, FailureWindow> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns permission for a call, or `None` if the shard must not be called.
    pub fn try_acquire(&self, now: Timestamp) -> Option<CallGuard<'_>> {
        if !self.has_failures.load(Ordering::Acquire) {
            return Some(CallGuard { breaker: self, probe: false });
        }
        let mut trouble = self.window();
        let probe = match trouble.state(&self.config, now) {
            BreakerState::Closed => false,
            BreakerState::HalfOpen if !trouble.probing => {
                trouble.probing = true;
                true
            }
            BreakerState::Open | BreakerState::HalfOpen => return None,
        };
        Some(CallGuard { breaker: self, probe })
    }

    /// Lets the next request probe immediately, because the shard has shown that it responds.
    pub fn allow_probe(&self, now: Timestamp) {
        if self.has_failures.load(Ordering::Acquire) {
            let mut trouble = self.window();
            let due = now - self.config.cooldown;
            trouble.opened = trouble.opened.map(|opened| opened.min(due));
        }
    }

    /// Returns the state at `now`.
    #[must_use]
    pub fn state(&self, now: Timestamp) -> BreakerState {
        self.window().state(&self.config, now)
    }
}

impl FailureWindow {
    fn state(&self, config: &BreakerConfig, now: Timestamp) -> BreakerState {
        match self.opened {
            None => BreakerState::Closed,
            Some(opened) if now >= opened + config.cooldown => BreakerState::HalfOpen,
            Some(_) => BreakerState::Open,
        }
    }
}

impl CallGuard<'_> {
    /// Records that the shard responded. The content of the response does not matter: only timeouts and rejections are
    /// failures.
    pub fn record_success(self) -> Transition {
        if !self.probe {
            return Transition::Unchanged;
        }
        // The failures that opened the breaker no longer count.
        *self.breaker.window() = FailureWindow::default();
        self.breaker.has_failures.store(false, Ordering::Release);
        Transition::Closed
    }

    /// Records that the shard did not respond, or could not.
    pub fn record_failure(mut self, now: Timestamp) -> Transition {
        let config = self.breaker.config;
        let mut trouble = self.breaker.window();
        if std::mem::take(&mut self.probe) {
            trouble.probing = false;
            trouble.opened = Some(now);
            return Transition::Unchanged;
        }
        if trouble.opened.is_some() {
            // Sent before the breaker opened: no change.
            return Transition::Unchanged;
        }
        while trouble.failures.front().is_some_and(|at| *at + config.window <= now) {
            trouble.failures.pop_front();
        }
        trouble.failures.push_back(now);
        if trouble.failures.len() >= config.failures {
            trouble.opened = Some(now);
            trouble.failures.clear();
            self.breaker.has_failures.store(true, Ordering::Release);
            return Transition::Open;
        }
        Transition::Unchanged
    }
}

impl Drop for CallGuard<'_> {
    /// Ends a probe whose caller disconnected before the result.
    fn drop(&mut self) {
        if self.probe {
            self.breaker.window().probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_secs(1_000);

    fn at(secs: u64) -> Timestamp {
        START + TimeDelta::from_secs(secs)
    }

    fn fail(breaker: &Breaker, secs: u64) -> Transition {
        breaker.try_acquire(at(secs)).expect("it should be asked").record_failure(at(secs))
    }

    /// Each transition must be reported exactly once, or a log fills while a shard is unavailable.
    #[test]
    fn each_transition_is_reported_once() {
        let breaker = Breaker::new(BreakerConfig { failures: 2, ..BreakerConfig::default() });
        let (late, luck) =
            (breaker.try_acquire(at(0)).expect("closed"), breaker.try_acquire(at(0)).expect("closed"));
        let told = [
            fail(&breaker, 0),
            fail(&breaker, 0),
            late.record_failure(at(1)),
            luck.record_success(),
            fail(&breaker, 30),
        ];
        assert_eq!(
            told,
            [
                Transition::Unchanged,
                Transition::Open,
                Transition::Unchanged,
                Transition::Unchanged,
                Transition::Unchanged
            ]
        );
        assert_eq!(breaker.try_acquire(at(60)).expect("the probe").record_success(), Transition::Closed);
        assert_eq!(breaker.try_acquire(at(60)).expect("closed").record_success(), Transition::Unchanged);
    }

    /// Calls to a dead shard must stop after five failures in ten seconds, or every request waits for it.
    #[test]
    fn five_failures_in_ten_seconds_open_it() {
        let breaker = Breaker::new(BreakerConfig::default());
        for secs in [0, 1, 2, 9] {
            fail(&breaker, secs);
        }
        assert_eq!(breaker.state(at(9)), BreakerState::Closed);
        fail(&breaker, 10); // the one at 0 is ten seconds old: out of view
        assert_eq!(breaker.state(at(10)), BreakerState::Closed);
        fail(&breaker, 10);
        assert_eq!(breaker.state(at(10)), BreakerState::Open);
        assert!(breaker.try_acquire(at(39)).is_none());
    }

    /// A shard that recovers must be used again, by one request first.
    #[test]
    fn one_probe_closes_it() {
        let breaker = Breaker::new(BreakerConfig::default());
        (0..5).for_each(|_| _ = fail(&breaker, 0));
        assert!(breaker.try_acquire(at(29)).is_none());
        let probe = breaker.try_acquire(at(30)).expect("the probe");
        assert!(breaker.try_acquire(at(30)).is_none(), "only one");
        probe.record_success();
        assert_eq!(breaker.state(at(30)), BreakerState::Closed);
        fail(&breaker, 31);
        assert_eq!(breaker.state(at(31)), BreakerState::Closed, "old failures are forgotten");
    }

    /// A shard that is still dead must not be called by every request each half minute.
    #[test]
    fn a_failed_probe_opens_it_again() {
        let breaker = Breaker::new(BreakerConfig::default());
        (0..5).for_each(|_| _ = fail(&breaker, 0));
        fail(&breaker, 30);
        assert!(breaker.try_acquire(at(59)).is_none());
        assert!(breaker.try_acquire(at(60)).is_some());
    }

    /// A caller that disconnects during the probe must not leave the breaker open forever.
    #[test]
    fn a_lost_probe_is_tried_again() {
        let breaker = Breaker::new(BreakerConfig::default());
        (0..5).for_each(|_| _ = fail(&breaker, 0));
        drop(breaker.try_acquire(at(30)).expect("the probe"));
        assert!(breaker.try_acquire(at(30)).is_some());
    }

    /// Requests in flight when the breaker opened must neither prolong the outage when they fail nor end it when they
    /// succeed.
    #[test]
    fn stragglers_change_nothing() {
        let breaker = Breaker::new(BreakerConfig::default());
        let (late, luck) =
            (breaker.try_acquire(at(0)).expect("closed"), breaker.try_acquire(at(0)).expect("closed"));
        (0..5).for_each(|_| _ = fail(&breaker, 0));
        late.record_failure(at(20));
        luck.record_success();
        assert_eq!(breaker.state(at(29)), BreakerState::Open);
        assert_eq!(breaker.state(at(30)), BreakerState::HalfOpen);
    }
}
