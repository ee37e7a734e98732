//! Circuit breaker: stops calling a shard that is dead, judged by what its server does.
//!
//! A server that answers is alive, however late the answer is: it closes the breaker and makes earlier failures
//! irrelevant. Only an answer that refuses to work is a failure; its user tells the two apart. The breaker opens after `failures` distinct failures within `window` without an
//! answer between them. A failure is an event of the server, not of a request: a connection that is refused or lost, or
//! one batch without an answer in time, however many requests waited for it. Silence alone is weak evidence, because a
//! server that pauses for a moment is silent too: unanswered batches open the breaker only once nothing at all has been
//! heard for `silence` since the first of them.
//!
//! While it is open, requests are rejected immediately and a background task probes the server: first after 100 ms, then
//! with growing pauses ([`Breaker::probe_pause`]). No request is spent on a probe.
//!
//! Pure: `now` is an argument, so a test runs its whole life cycle in no time. Rejected: counting failed requests, which
//! took one late batch of a busy shard for five failures; a failure ratio, which opens too late on a shard that serves
//! thousands of requests a second and on noise on one that serves few; half-open requests, which pay for the probe.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// Thresholds for opening, and the pauses of probing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Number of distinct failures within `window`, without an answer between them, that open the breaker.
    pub failures: usize,
    /// Time over which failures are counted.
    pub window: TimeDelta,
    /// How long nothing must have been heard, since the first failure, before unanswered batches open the breaker.
    pub silence: TimeDelta,
    /// Longest pause between two probes.
    pub cooldown: TimeDelta,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failures: 5,
            window: TimeDelta::from_secs(10),
            silence: TimeDelta::from_millis(500),
            cooldown: TimeDelta::from_secs(30),
        }
    }
}

/// Pause before the first probe.
const FIRST_PAUSE: TimeDelta = TimeDelta::from_millis(100);
/// Longest pause while an outage is recent: an operator who repairs a server waits for it.
const RECENT_PAUSE: TimeDelta = TimeDelta::from_millis(1_600);
/// How long an outage is recent.
const RECENT: TimeDelta = TimeDelta::from_secs(600);

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests pass.
    Closed,
    /// Requests are rejected.
    Open,
    /// Requests are rejected, and a probe is in flight.
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

/// One failure of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShardFailure {
    /// A batch was not answered in time.
    NoAnswer,
    /// No connection, a lost one, or a server that refuses to work.
    Refused,
}

/// Change of state caused by an answer or a failure.
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
/// use tollgate_store::{Breaker, BreakerConfig, BreakerState, ShardFailure};
/// let now = Timestamp::from_secs(1_000);
/// let breaker = Breaker::new(BreakerConfig { failures: 1, ..BreakerConfig::default() });
/// breaker.record_failure(ShardFailure::NoAnswer, now);
/// assert_eq!(breaker.state(), BreakerState::Closed, "it has been silent for a moment only");
/// breaker.record_failure(ShardFailure::NoAnswer, now + TimeDelta::from_secs(1));
/// assert_eq!(breaker.state(), BreakerState::Open);
/// breaker.record_answer();
/// assert_eq!(breaker.state(), BreakerState::Closed);
/// ```
#[derive(Debug)]
pub struct Breaker {
    config: BreakerConfig,
    /// Whether there are failures to forget: false on the fast path, which then takes no lock.
    has_failures: AtomicBool,
    is_open: AtomicBool,
    is_probing: AtomicBool,
    window: Mutex<FailureWindow>,
}

#[derive(Debug, Default)]
struct FailureWindow {
    /// Latest failures since the last answer, oldest first; at most `failures` of them.
    failures: VecDeque<Timestamp>,
    /// First failure since the last answer.
    first: Option<Timestamp>,
    opened_at: Option<Timestamp>,
}

impl Breaker {
    /// Creates a closed breaker.
    #[must_use]
    pub fn new(config: BreakerConfig) -> Self {
        Self {
            config,
            has_failures: AtomicBool::new(false),
            is_open: AtomicBool::new(false),
            is_probing: AtomicBool::new(false),
            window: Mutex::default(),
        }
    }

    fn window(&self) -> MutexGuard<'_, FailureWindow> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether requests are rejected.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> BreakerState {
        match (self.is_open(), self.is_probing.load(Ordering::Relaxed)) {
            (false, _) => BreakerState::Closed,
            (true, false) => BreakerState::Open,
            (true, true) => BreakerState::HalfOpen,
        }
    }

    /// Records whether a probe is in flight.
    pub fn set_probing(&self, is_probing: bool) {
        self.is_probing.store(is_probing, Ordering::Relaxed);
    }

    /// Records an answer that is no refusal. Its delay does not matter: the server is alive.
    pub fn record_answer(&self) -> Transition {
        if !self.has_failures.load(Ordering::Acquire) {
            return Transition::Unchanged;
        }
        let mut window = self.window();
        let was_open = window.opened_at.is_some();
        *window = FailureWindow::default();
        self.has_failures.store(false, Ordering::Release);
        self.is_open.store(false, Ordering::Release);
        if was_open { Transition::Closed } else { Transition::Unchanged }
    }

    /// Restarts the silence, because this process did not run and so could not hear.
    pub fn record_pause(&self) {
        let mut window = self.window();
        window.first = None;
        window.failures.clear();
    }

    /// Records a failure of the server.
    pub fn record_failure(&self, failure: ShardFailure, now: Timestamp) -> Transition {
        let config = self.config;
        let mut window = self.window();
        self.has_failures.store(true, Ordering::Release);
        if window.opened_at.is_some() {
            return Transition::Unchanged;
        }
        while window.failures.front().is_some_and(|at| *at + config.window <= now) {
            window.failures.pop_front();
        }
        window.failures.push_back(now);
        if window.failures.len() > config.failures {
            window.failures.pop_front();
        }
        let silent_for = now.since(*window.first.get_or_insert(now));
        let is_dead = failure == ShardFailure::Refused || silent_for >= config.silence;
        if window.failures.len() < config.failures || !is_dead {
            return Transition::Unchanged;
        }
        window.opened_at = Some(now);
        self.is_open.store(true, Ordering::Release);
        Transition::Open
    }

    /// Returns the pause before the next probe, after `probes` in vain. It doubles from 100 ms to 1.6 s, so that a server
    /// that returns is used within two seconds; after ten minutes it grows to the configured longest pause.
    #[must_use]
    pub fn probe_pause(&self, probes: u32, now: Timestamp) -> TimeDelta {
        let open_for = self.window().opened_at.map_or(TimeDelta::ZERO, |at| now.since(at));
        let doubled = FIRST_PAUSE.as_micros() << probes.min(20);
        let old = open_for.as_micros().saturating_sub(RECENT.as_micros()) / 20;
        let longest = (RECENT_PAUSE.as_micros() + old).min(self.config.cooldown.as_micros());
        TimeDelta::from_micros(doubled.min(longest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_secs(1_000);

    fn at(millis: u64) -> Timestamp {
        START + TimeDelta::from_millis(millis)
    }

    fn breaker() -> Breaker {
        Breaker::new(BreakerConfig::default())
    }

    fn fail(breaker: &Breaker, failure: ShardFailure, millis: u64) -> Transition {
        breaker.record_failure(failure, at(millis))
    }

    /// Each transition must be reported exactly once, or a log fills while a shard is unavailable.
    #[test]
    fn each_transition_is_reported_once() {
        let breaker = Breaker::new(BreakerConfig { failures: 2, ..BreakerConfig::default() });
        let transitions = [0, 1, 2, 3].map(|millis| fail(&breaker, ShardFailure::Refused, millis));
        use Transition::{Closed, Open, Unchanged};
        assert_eq!(transitions, [Unchanged, Open, Unchanged, Unchanged]);
        assert_eq!([(); 2].map(|()| breaker.record_answer()), [Closed, Unchanged]);
    }

    /// Calls to a dead shard must stop after five failures in ten seconds, or every request waits for it.
    #[test]
    fn five_failures_in_ten_seconds_open_it() {
        let breaker = breaker();
        for millis in [0, 1_000, 2_000, 9_000] {
            fail(&breaker, ShardFailure::Refused, millis);
        }
        assert!(!breaker.is_open());
        fail(&breaker, ShardFailure::Refused, 10_000); // the one at 0 is ten seconds old: out of view
        assert!(!breaker.is_open());
        fail(&breaker, ShardFailure::Refused, 10_000);
        assert!(breaker.is_open());
    }

    /// A server that pauses for a moment must not be taken for dead, however many batches waited for it.
    #[test]
    fn a_pause_is_not_a_death() {
        let breaker = breaker();
        breaker.record_answer();
        // However long the shard was idle before.
        for millis in 60_000..60_500 {
            assert_eq!(fail(&breaker, ShardFailure::NoAnswer, millis), Transition::Unchanged, "{millis}");
        }
        assert_eq!(fail(&breaker, ShardFailure::NoAnswer, 60_500), Transition::Open);
    }

    /// A slow server is slow: as long as answers come, however late, its breaker stays closed.
    #[test]
    fn answers_between_failures_keep_it_closed() {
        let breaker = breaker();
        for turn in 0..1_000 {
            for _ in 0..4 {
                fail(&breaker, ShardFailure::Refused, 700 * turn);
            }
            breaker.record_answer();
        }
        assert!(!breaker.is_open());
    }

    /// A process that was stopped has heard nothing because it did not listen.
    #[test]
    fn silence_while_this_process_did_not_run_does_not_count() {
        let breaker = breaker();
        (0..100).for_each(|_| _ = fail(&breaker, ShardFailure::NoAnswer, 10));
        breaker.record_pause();
        (0..100).for_each(|_| _ = fail(&breaker, ShardFailure::NoAnswer, 60_000));
        assert!(!breaker.is_open());
    }

    /// A shard that answers again must be used again at once, also when the answer comes after its caller stopped waiting.
    #[test]
    fn any_answer_closes_it() {
        let breaker = breaker();
        (0..5).for_each(|turn| _ = fail(&breaker, ShardFailure::NoAnswer, 200 * turn));
        assert_eq!(breaker.state(), BreakerState::Open);
        breaker.set_probing(true);
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        assert_eq!(breaker.record_answer(), Transition::Closed);
        fail(&breaker, ShardFailure::Refused, 900);
        assert_eq!(breaker.state(), BreakerState::Closed, "old failures are forgotten");
    }

    /// A server that returns must be used within two seconds, and one that is gone for a day must not be called
    /// every second.
    #[test]
    fn probes_begin_at_100_ms_and_become_rare() {
        let breaker = breaker();
        (0..5).for_each(|_| _ = fail(&breaker, ShardFailure::Refused, 0));
        let millis = |probes, millis| breaker.probe_pause(probes, at(millis)).as_micros() / 1_000;
        assert_eq!([0, 1, 2, 3, 4, 5].map(|probes| millis(probes, 0)), [100, 200, 400, 800, 1_600, 1_600]);
        assert_eq!(millis(400, 600_000), 1_600);
        assert!((1_600..30_000).contains(&millis(500, 900_000)));
        assert_eq!(millis(u32::MAX, 86_400_000), 30_000);
    }
}
