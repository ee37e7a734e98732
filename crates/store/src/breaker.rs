//! Circuit breaker: stops calling a failing shard and probes it once after a cooldown.
//!
//! Closed, every request passes. After `failures` failures within `within` it opens: requests are refused at once, without
//! waiting for the dead part. After `cooldown` one request is let through as a probe; if it succeeds the breaker closes, if
//! it fails it stays open for another `cooldown`. A probe whose caller goes away proves nothing: the next request probes.
//!
//! Pure: `now` is an argument, so its whole life runs in a test in no time. A failure ratio was rejected: on a part that
//! serves thousands of requests a second it opens too late, on one that serves few it opens on noise.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// When to open and when to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// So many failures …
    pub failures: usize,
    /// … within this time open it.
    pub window: TimeDelta,
    /// How long it stays open before one request may try.
    pub cooldown: TimeDelta,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, window: TimeDelta::from_secs(10), cooldown: TimeDelta::from_secs(30) }
    }
}

/// What a breaker does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Lets them pass.
    Closed,
    /// Refuses them.
    Open,
    /// Is letting one pass, or will let the next one pass, to see how it fares.
    HalfOpen,
}

impl BreakerState {
    /// The word in answers, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// What a breaker has made of how an asking went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// Nothing new.
    Unchanged,
    /// It refuses requests from now on.
    Open,
    /// It lets them pass again.
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
    /// Whether there is anything to look up: false on the usual path, which then takes no lock.
    has_failures: AtomicBool,
    window: Mutex<FailureWindow>,
}

#[derive(Debug, Default)]
struct FailureWindow {
    /// The latest failures, oldest first; at most `failures` of them.
    failures: VecDeque<Timestamp>,
    opened: Option<Timestamp>,
    probing: bool,
}

/// Leave to ask. Tell it how the asking went.
#[derive(Debug)]
#[must_use = "a breaker learns from what its tickets are told"]
pub struct CallGuard<'a> {
    breaker: &'a Breaker,
    probe: bool,
}

impl Breaker {
    /// A closed breaker.
    #[must_use]
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, has_failures: AtomicBool::new(false), window: Mutex::default() }
    }

    fn window(&self) -> MutexGuard<'_, FailureWindow> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leave to ask now; `None` if the part is not to be asked.
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

    /// The part has given a sign of life: an open breaker lets the next request try at once.
    pub fn allow_probe(&self, now: Timestamp) {
        if self.has_failures.load(Ordering::Acquire) {
            let mut trouble = self.window();
            let due = now - self.config.cooldown;
            trouble.opened = trouble.opened.map(|opened| opened.min(due));
        }
    }

    /// What it does with requests now.
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
    /// It answered. What it answered is another matter: only silence and refusal are failures.
    pub fn record_success(self) -> Transition {
        if !self.probe {
            return Transition::Unchanged;
        }
        // The failures that opened it belong to the past.
        *self.breaker.window() = FailureWindow::default();
        self.breaker.has_failures.store(false, Ordering::Release);
        Transition::Closed
    }

    /// It did not answer, or could not.
    pub fn record_failure(mut self, now: Timestamp) -> Transition {
        let config = self.breaker.config;
        let mut trouble = self.breaker.window();
        if std::mem::take(&mut self.probe) {
            trouble.probing = false;
            trouble.opened = Some(now);
            return Transition::Unchanged;
        }
        if trouble.opened.is_some() {
            // Sent before it opened: nothing new.
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
    /// The caller went away before it knew.
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

    /// Whoever is told of every change must be told of each once, or a log fills while a shard is away.
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

    /// A dead shard must stop being asked after five failures in ten seconds, or every request waits for it.
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

    /// A shard that is still dead must not be asked by everybody every half minute.
    #[test]
    fn a_failed_probe_opens_it_again() {
        let breaker = Breaker::new(BreakerConfig::default());
        (0..5).for_each(|_| _ = fail(&breaker, 0));
        fail(&breaker, 30);
        assert!(breaker.try_acquire(at(59)).is_none());
        assert!(breaker.try_acquire(at(60)).is_some());
    }

    /// A caller that hangs up during the probe must not leave the breaker open for ever.
    #[test]
    fn a_lost_probe_is_tried_again() {
        let breaker = Breaker::new(BreakerConfig::default());
        (0..5).for_each(|_| _ = fail(&breaker, 0));
        drop(breaker.try_acquire(at(30)).expect("the probe"));
        assert!(breaker.try_acquire(at(30)).is_some());
    }

    /// Requests that were under way when it opened must not prolong the outage when they fail, or end it when they succeed.
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
