//! A limit: a quota and the algorithm that holds it, validated once, then only stepped.
//!
//! `step` is pure: the state, the time and the cost go in, an outcome and the new state come out. A denial changes
//! nothing (but for a state that a clock set back has left in the future, which is mended). Memory runs it as it stands
//! here; other stores translate it and are held to bit-equal outcomes.

use crate::bucket::{Bucket, Shaping};
use crate::cost::Cost;
use crate::log::AdmissionLog;
use crate::outcome::{Outcome, Verdict};
use crate::permits::{PermitId, Permits};
use crate::quota::{Period, Quota};
use crate::sliding::window_start;
use crate::state::State;
use crate::strict::Slots;
use crate::time::{Span, Timestamp};
use crate::window::{Counting, WindowCount};
use std::fmt;

/// The eight algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// Burst plus a steady rate, one word of state. The default.
    Gcra,
    /// The same arithmetic in the words of buckets and tokens.
    TokenBucket,
    /// The same arithmetic as a queue that drains at the steady rate: answers carry a delay where asked to.
    LeakyBucket,
    /// A count a window.
    FixedWindow,
    /// Two counts, weighted.
    SlidingWindow,
    /// k slots, the oldest counted whole.
    StrictWindow,
    /// Every admitted unit.
    SlidingLog,
    /// Permits held at once.
    Concurrency,
}

impl Algorithm {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::Gcra,
        Self::TokenBucket,
        Self::LeakyBucket,
        Self::FixedWindow,
        Self::SlidingWindow,
        Self::StrictWindow,
        Self::SlidingLog,
        Self::Concurrency,
    ];

    /// The name in rules, metrics and documents.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gcra => "gcra",
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindow => "sliding_window",
            Self::StrictWindow => "strict_window",
            Self::SlidingLog => "sliding_log",
            Self::Concurrency => "concurrency",
        }
    }

    /// Whether `burst` means something to it.
    #[must_use]
    pub const fn has_burst(self) -> bool {
        matches!(self, Self::Gcra | Self::TokenBucket | Self::LeakyBucket)
    }

    /// Whether its windows start together for all keys unless they are jittered.
    #[must_use]
    pub const fn has_windows(self) -> bool {
        matches!(self, Self::FixedWindow | Self::SlidingWindow | Self::StrictWindow)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a limit is made from. [`LimitSpec::build`] checks it.
///
/// ```
/// use tollgate_core::{Algorithm, LimitSpec, Quota};
/// let limit = LimitSpec::new(Algorithm::Gcra, Quota::per_minute(100)).burst(20).build()?;
/// assert_eq!(limit.capacity(), 20);
/// # Ok::<(), tollgate_core::LimitError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    /// How it is held.
    pub algorithm: Algorithm,
    /// What is held.
    pub quota: Quota,
    /// Units that may pass at once, for the buckets; the quota's count if absent.
    pub burst: Option<u64>,
    /// A leaky bucket that answers with delays rather than passing its burst at once.
    pub delays: bool,
    /// Slots of a strict window; 10 if absent.
    pub slots: Option<u64>,
    /// Windows start at an instant of their own for each key.
    pub jitter: bool,
    /// A fixed window that also counts what it denies, as the Envoy service does.
    pub counts_attempts: bool,
}

impl LimitSpec {
    /// The plainest limit with this algorithm and quota. For concurrency the count is the number of permits and the
    /// period is the longest time that one may be held.
    #[must_use]
    pub const fn new(algorithm: Algorithm, quota: Quota) -> Self {
        Self {
            algorithm,
            quota,
            burst: None,
            delays: false,
            slots: None,
            jitter: false,
            counts_attempts: false,
        }
    }

    /// Sets the burst.
    #[must_use]
    pub fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Makes a leaky bucket answer with delays.
    #[must_use]
    pub fn delays(mut self) -> Self {
        self.delays = true;
        self
    }

    /// Sets the number of slots of a strict window.
    #[must_use]
    pub fn slots(mut self, slots: u64) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Gives each key's windows a start of their own.
    #[must_use]
    pub fn jitter(mut self) -> Self {
        self.jitter = true;
        self
    }

    /// Makes a fixed window count what it denies.
    #[must_use]
    pub fn counts_attempts(mut self) -> Self {
        self.counts_attempts = true;
        self
    }

    /// Checks it and works out what stepping needs.
    ///
    /// # Errors
    /// A [`LimitError`] that says what cannot be.
    pub fn build(self) -> Result<Limit, LimitError> {
        let LimitSpec { algorithm, quota, burst, delays, slots, jitter, counts_attempts } = self;
        let length = quota.period.length();
        if quota.count > Quota::LARGEST || burst.is_some_and(|burst| burst > Quota::LARGEST) {
            return Err(LimitError::TooMany);
        }
        if length < Period::SHORTEST || length > Period::LONGEST {
            return Err(LimitError::Period(length));
        }
        let calendar = matches!(quota.period, Period::Calendar(_));
        if calendar && algorithm != Algorithm::FixedWindow {
            return Err(LimitError::CalendarNeedsFixedWindow(algorithm));
        }
        if burst.is_some() && !algorithm.has_burst() {
            return Err(LimitError::NoBurst(algorithm));
        }
        if jitter && (calendar || !algorithm.has_windows()) {
            return Err(LimitError::NoJitter(algorithm));
        }
        if delays && algorithm != Algorithm::LeakyBucket {
            return Err(LimitError::OnlyLeakyDelays(algorithm));
        }
        if slots.is_some() && algorithm != Algorithm::StrictWindow {
            return Err(LimitError::NoSlots(algorithm));
        }
        if counts_attempts && algorithm != Algorithm::FixedWindow {
            return Err(LimitError::OnlyFixedCountsAttempts(algorithm));
        }
        let capacity = burst.unwrap_or(quota.count);
        let shape = match algorithm {
            Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                if quota.count == 0 || capacity == 0 {
                    Shape::Blocked
                } else {
                    let shaping = if delays { Shaping::Delay } else { Shaping::Police };
                    let bucket = Bucket::new(quota.count, length, capacity, shaping);
                    Shape::Bucket(bucket.ok_or(LimitError::TooSlow)?)
                }
            }
            Algorithm::FixedWindow if counts_attempts => Shape::Fixed(Counting::Attempts),
            Algorithm::FixedWindow => Shape::Fixed(Counting::Admitted),
            Algorithm::SlidingWindow => Shape::Sliding,
            Algorithm::StrictWindow => {
                let k = slots.unwrap_or(Slots::DEFAULT);
                if k == 0 || k > Slots::MOST {
                    return Err(LimitError::Slots(k));
                }
                Shape::Strict(Slots::new(k, length))
            }
            Algorithm::SlidingLog if quota.count > AdmissionLog::LARGEST => {
                return Err(LimitError::LogTooLarge);
            }
            Algorithm::SlidingLog => Shape::Log,
            Algorithm::Concurrency if quota.count > Permits::LARGEST => {
                return Err(LimitError::TooManyPermits);
            }
            Algorithm::Concurrency => Shape::Permits,
        };
        Ok(Limit { algorithm, quota, capacity, jitter, shape })
    }
}

/// Why a limit cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// A count beyond [`Quota::LARGEST`].
    #[error("a count or burst can be at most {max}", max = Quota::LARGEST)]
    TooMany,
    /// A period out of range.
    #[error("a period of {0} is out of range; write one from 1ms to 10 years")]
    Period(Span),
    /// A bucket that would take decades to fill.
    #[error(
        "this burst would take more than 35 years to come back at this rate; lower `burst` or raise the rate"
    )]
    TooSlow,
    /// A burst where there is none.
    #[error("`burst` has no meaning for {0}; use gcra, token_bucket or leaky_bucket, or leave it out")]
    NoBurst(Algorithm),
    /// Jitter where there are no windows.
    #[error(
        "`jitter` has no meaning for {0} here; it shifts the windows of fixed, sliding and strict windows"
    )]
    NoJitter(Algorithm),
    /// Delays from something that has no queue.
    #[error("only leaky_bucket can delay, not {0}; leave `algorithm` out or write leaky_bucket")]
    OnlyLeakyDelays(Algorithm),
    /// A calendar period with an algorithm that needs a fixed length.
    #[error("calendar periods need fixed_window, not {0}")]
    CalendarNeedsFixedWindow(Algorithm),
    /// Slots where there are none.
    #[error("`slots` has no meaning for {0}; use strict_window, or leave it out")]
    NoSlots(Algorithm),
    /// Counted attempts where there is no plain count.
    #[error("only fixed_window can count what it denies, not {0}")]
    OnlyFixedCountsAttempts(Algorithm),
    /// A number of slots out of range.
    #[error("{0} slots are out of range; write 1 to {most}", most = Slots::MOST)]
    Slots(u64),
    /// A log beyond reason.
    #[error("sliding_log keeps an entry a unit: at most {max}; use strict_window for larger limits", max = AdmissionLog::LARGEST)]
    LogTooLarge,
    /// Too many permits.
    #[error("at most {max} permits can be held at once", max = Permits::LARGEST)]
    TooManyPermits,
}

/// What stepping needs, worked out once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A bucket that holds nothing.
    Blocked,
    Bucket(Bucket),
    Fixed(Counting),
    Sliding,
    Strict(Slots),
    Log,
    Permits,
}

/// A validated limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    algorithm: Algorithm,
    quota: Quota,
    capacity: u64,
    jitter: bool,
    pub(crate) shape: Shape,
}

impl Limit {
    /// How it is held.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// What is held.
    #[must_use]
    pub const fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Units that an unused limit lets through at one instant: the burst of a bucket, the count of a window.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Whether each key's windows have a start of their own.
    #[must_use]
    pub const fn is_jittered(&self) -> bool {
        self.jitter
    }

    /// The shift of the windows of a key with this stable hash. The caller steps at `now + phase`: all that an
    /// outcome tells is relative to now, so nothing else changes.
    #[must_use]
    pub fn phase(&self, stable_hash: u64) -> Span {
        if !self.jitter {
            return Span::ZERO;
        }
        Span::from_micros(stable_hash % self.quota.period.length().as_micros())
    }

    /// Charges `cost` at `now`.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Quota, Span, State, Timestamp, Verdict};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Quota::per_second(2)).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// assert!(limit.step(&mut state, now, Cost::take(2)).verdict.is_allowed());
    /// let denied = limit.step(&mut state, now, Cost::ONE);
    /// assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(Span::from_millis(500)) });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    pub fn step(&self, state: &mut State, now: Timestamp, cost: Cost) -> Outcome {
        self.step_as(PermitId::ANONYMOUS, state, now, cost)
    }

    /// The same, on behalf of the holder of a permit.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, PermitId, Quota, State, Timestamp};
    /// // One permit, held for a minute at most.
    /// let limit = LimitSpec::new(Algorithm::Concurrency, Quota::per_minute(1)).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// assert!(limit.step_as(PermitId(1), &mut state, now, Cost::ONE).verdict.is_allowed());
    /// assert!(limit.step_as(PermitId(2), &mut state, now, Cost::ONE).verdict.is_denied());
    /// limit.release(PermitId(1), &mut state);
    /// assert!(limit.step_as(PermitId(2), &mut state, now, Cost::ONE).verdict.is_allowed());
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    pub fn step_as(&self, id: PermitId, state: &mut State, now: Timestamp, cost: Cost) -> Outcome {
        let period = self.quota.period.length();
        match self.shape {
            Shape::Blocked => self.blocked(cost),
            Shape::Bucket(bucket) => bucket.step_kept(state.bucket(), now, cost),
            Shape::Fixed(counting) => {
                let window = state.window();
                let bounds = self.window_of(window, self.window_at(now));
                window.step(bounds, now, self.capacity, counting, cost)
            }
            Shape::Sliding => state.sliding().step(now, period, self.capacity, cost),
            Shape::Strict(slots) => state.strict().step(slots, now, self.capacity, cost),
            Shape::Log => state.log().step(now, period, self.capacity, cost),
            Shape::Permits => state.permits().step(now, period, self.capacity, cost, id),
        }
    }

    /// Takes `units` that have already been spent, beyond the limit if need be. The debt is at most the capacity once
    /// more, so a key recovers in bounded time.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, PermitId, Quota, Span, State, Timestamp, Verdict};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Quota::per_second(2)).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// limit.debit(PermitId::ANONYMOUS, &mut state, now, 1_000_000);
    /// let denied = limit.step(&mut state, now, Cost::take(2));
    /// assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(Span::from_secs(2)) });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    pub fn debit(&self, id: PermitId, state: &mut State, now: Timestamp, units: u64) {
        let period = self.quota.period.length();
        match self.shape {
            Shape::Blocked => {}
            Shape::Bucket(bucket) => bucket.debit_kept(state.bucket(), now, units),
            Shape::Fixed(counting) => {
                let window = state.window();
                let bounds = self.window_of(window, self.window_at(now));
                window.debit(bounds.0, self.capacity, counting, units);
            }
            Shape::Sliding => state.sliding().debit(now, period, self.capacity, units),
            Shape::Strict(slots) => state.strict().debit(slots, now, self.capacity, units),
            Shape::Log => state.log().debit(now, period, self.capacity, units),
            // Permits that are held are held by somebody: there is nothing to take after the fact.
            Shape::Permits => {
                let _ = state.permits().step(now, period, self.capacity, Cost::take(units), id);
            }
        }
    }

    /// Gives back the permits of `id`. Doing it twice is doing it once.
    pub fn release(&self, id: PermitId, state: &mut State) {
        if self.shape == Shape::Permits {
            state.permits().release(id);
        }
    }

    /// The instant from which the state is as good as none and may be forgotten.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Quota, Span, State, Timestamp};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Quota::per_second(2)).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// let _ = limit.step(&mut state, now, Cost::ONE);
    /// assert_eq!(limit.expires(&state), now + Span::from_millis(500));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn expires(&self, state: &State) -> Timestamp {
        let period = self.quota.period.length();
        match (state, self.shape) {
            (State::Bucket(tat), _) => Timestamp::from_micros(Bucket::full_at(*tat)),
            (State::Window(window), Shape::Fixed(_)) => self.window_at(window.start).1,
            (State::Sliding(counts), _) => counts.start + period + period,
            (State::Strict(counts), Shape::Strict(slots)) => counts.expires(slots),
            (State::Log(log), _) => log.entries.back().map_or(Timestamp::ZERO, |(at, _)| *at + period),
            (State::Permits(permits), _) => {
                permits.held.iter().map(|(.., deadline)| *deadline).max().unwrap_or(Timestamp::ZERO)
            }
            _ => Timestamp::ZERO,
        }
    }

    /// The window that `now` lies in.
    #[inline]
    pub(crate) fn window_at(&self, now: Timestamp) -> (Timestamp, Timestamp) {
        match &self.quota.period {
            Period::Rolling(span) => {
                let start = window_start(now, *span);
                (start, start + *span)
            }
            Period::Calendar(calendar) => calendar.window(now),
        }
    }

    /// The window that a charge counts in, where `bounds` is the one that now lies in. It is the state's own where
    /// that lies ahead (the clock went back, or this `now` was read before another's): else the count would be lost
    /// when time reaches that window again. It is never further off than the next window, so that no clock locks a key for long.
    #[inline]
    pub(crate) fn window_of(
        &self,
        window: &mut WindowCount,
        bounds: (Timestamp, Timestamp),
    ) -> (Timestamp, Timestamp) {
        if window.start <= bounds.0 {
            return bounds;
        }
        window.start = window.start.min(bounds.1);
        self.window_at(window.start)
    }

    pub(crate) fn blocked(&self, cost: Cost) -> Outcome {
        let verdict = if cost.is_refund() || cost.is_look() {
            Verdict::PASS
        } else {
            Verdict::Denied { retry_after: None }
        };
        Outcome { verdict, remaining: 0, reset_after: Span::ZERO }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.algorithm, self.quota)?;
        if self.algorithm.has_burst() && self.capacity != self.quota.count {
            write!(f, " burst {}", self.capacity)?;
        }
        Ok(())
    }
}
