//! A limit: a rate and the algorithm that enforces it, validated once, then only stepped.
//!
//! `step` is pure: the state, the time and the cost go in, an outcome and the new state come out. A denial changes
//! nothing (except a state that a clock error left in the future, which is corrected). The memory store runs it
//! directly; other stores translate it and must return bit-equal outcomes.

use crate::algorithm::Algorithm;
use crate::algorithm::bucket::Bucket;
use crate::algorithm::concurrency::PermitId;
use crate::algorithm::fixed_window::{Counting, WindowCount};
use crate::algorithm::refill_steps::RefillSteps;
use crate::algorithm::sliding_window::window_start;
use crate::algorithm::strict_window::Slots;
use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::packed::Packed;
use crate::rate::{Period, Rate};
use crate::state::State;
use crate::time::{TimeDelta, Timestamp};
use std::fmt;

/// The precomputed form of a limit for stepping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A bucket with zero capacity.
    Blocked,
    Bucket(Bucket),
    /// A bucket that is refilled at intervals.
    Stepped(Bucket, RefillSteps),
    Fixed(Counting),
    Sliding,
    Strict(Slots),
    /// A log; a refund by it takes from what was logged up to this instant, now if absent.
    Log(Option<Timestamp>),
    Permits,
}

/// A validated limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub(crate) algorithm: Algorithm,
    pub(crate) rate: Rate,
    pub(crate) capacity: u64,
    pub(crate) jitter: bool,
    pub(crate) refill_interval: Option<TimeDelta>,
    pub(crate) shape: Shape,
    /// Packing of the state into a word, computed once because every charge needs it.
    pub(crate) packed: Option<Packed>,
}

impl Limit {
    /// Returns the algorithm.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the rate.
    #[must_use]
    pub const fn rate(&self) -> &Rate {
        &self.rate
    }

    /// Returns the units that an unused limit admits at one instant: the burst of a bucket, the count of a window.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns whether each key's windows have their own start.
    #[must_use]
    pub const fn is_jittered(&self) -> bool {
        self.jitter
    }

    /// Returns the interval at which a token bucket is refilled; `None` if it is refilled continuously.
    #[must_use]
    pub const fn refill_interval(&self) -> Option<TimeDelta> {
        self.refill_interval
    }

    /// Returns the instant at which a bucket's arithmetic takes place for a charge at `now` (shifted by the key's phase):
    /// the end of the refill interval, or `now` for every other limit.
    pub(crate) fn bucket_time(&self, now: Timestamp) -> Timestamp {
        match self.shape {
            Shape::Stepped(_, steps) => steps.end(now),
            _ => now,
        }
    }

    /// Returns whether denied requests count too, as in the Envoy service.
    #[must_use]
    pub fn counts_denied(&self) -> bool {
        self.shape == Shape::Fixed(Counting::Attempts)
    }

    /// Returns the shift of the windows of a key with this stable hash. The caller steps at `now + phase`: all times in
    /// an outcome are relative to now, so nothing else changes.
    #[must_use]
    pub fn phase(&self, stable_hash: u64) -> TimeDelta {
        if !self.jitter {
            return TimeDelta::ZERO;
        }
        let length = self.refill_interval.unwrap_or_else(|| self.rate.period.length());
        TimeDelta::from_micros(stable_hash % length.as_micros())
    }

    /// Returns the window that contains `now`, for a key with this stable hash: its first instant, and the first after
    /// it. `None` if the limit has no windows with a fixed start.
    #[must_use]
    pub fn window(&self, now: Timestamp, stable_hash: u64) -> Option<(Timestamp, Timestamp)> {
        match (&self.rate.period, self.algorithm) {
            (Period::Calendar(calendar), _) => Some(calendar.window(now)),
            (Period::Rolling(period), Algorithm::FixedWindow | Algorithm::SlidingWindow) => {
                let phase = self.phase(stable_hash);
                let start = window_start(now + phase, *period).as_micros().saturating_sub(phase.as_micros());
                let start = Timestamp::from_micros(start);
                Some((start, start + *period))
            }
            _ => None,
        }
    }

    /// Charges `cost` at `now`.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, TimeDelta, State, Timestamp, Verdict, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(2))).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// assert!(limit.step(&mut state, now, Cost::new(2)).verdict.is_allowed());
    /// let denied = limit.step(&mut state, now, Cost::ONE);
    /// assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_millis(500)) });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    pub fn step(&self, state: &mut State, now: Timestamp, cost: Cost) -> Outcome {
        self.step_with_permit(PermitId::ANONYMOUS, state, now, cost)
    }

    /// Charges `cost` at `now` for the holder of a permit.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, PermitId, Rate, State, Timestamp, nonzero};
    /// // One permit, held for a minute at most.
    /// let limit = LimitSpec::new(Algorithm::Concurrency, Rate::per_minute(nonzero!(1))).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// assert!(limit.step_with_permit(PermitId(1), &mut state, now, Cost::ONE).verdict.is_allowed());
    /// assert!(limit.step_with_permit(PermitId(2), &mut state, now, Cost::ONE).verdict.is_denied());
    /// limit.release(PermitId(1), &mut state);
    /// assert!(limit.step_with_permit(PermitId(2), &mut state, now, Cost::ONE).verdict.is_allowed());
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    pub fn step_with_permit(&self, id: PermitId, state: &mut State, now: Timestamp, cost: Cost) -> Outcome {
        let period = self.rate.period.length();
        match self.shape {
            Shape::Blocked => self.blocked(cost),
            Shape::Bucket(bucket) => bucket.step_tat(state.bucket(), now, cost),
            Shape::Stepped(bucket, steps) => {
                steps.seen_at(now, bucket.step_tat(state.bucket(), steps.end(now), cost))
            }
            Shape::Fixed(counting) => {
                let window = state.window();
                let bounds = self.window_of(window, self.window_at(now));
                window.step(bounds, now, self.capacity, counting, cost)
            }
            Shape::Sliding => state.sliding().step(now, period, self.capacity, cost),
            Shape::Strict(slots) => state.strict().step(slots, now, self.capacity, cost),
            Shape::Log(taken) => state.log().step(now, period, self.capacity, cost, taken),
            Shape::Permits => state.permits().step(now, period, self.capacity, cost, id),
        }
    }

    /// Charges `units` that have already been spent, beyond the limit if necessary. The debt is at most the capacity,
    /// so a key recovers in bounded time.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, PermitId, Rate, TimeDelta, State, Timestamp, Verdict, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(2))).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// limit.debit(PermitId::ANONYMOUS, &mut state, now, 1_000_000);
    /// let denied = limit.step(&mut state, now, Cost::new(2));
    /// assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_secs(2)) });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    pub fn debit(&self, id: PermitId, state: &mut State, now: Timestamp, units: u64) {
        let period = self.rate.period.length();
        match self.shape {
            Shape::Blocked => {}
            Shape::Bucket(bucket) => bucket.debit_tat(state.bucket(), now, units),
            Shape::Stepped(bucket, steps) => bucket.debit_tat(state.bucket(), steps.end(now), units),
            Shape::Fixed(counting) => {
                let window = state.window();
                let bounds = self.window_of(window, self.window_at(now));
                window.debit(bounds.0, self.capacity, counting, units);
            }
            Shape::Sliding => state.sliding().debit(now, period, self.capacity, units),
            Shape::Strict(slots) => state.strict().debit(slots, now, self.capacity, units),
            Shape::Log(_) => state.log().debit(now, period, self.capacity, units),
            // Every held permit has a holder, so there is nothing to charge after the fact.
            Shape::Permits => {
                let _ = state.permits().step(now, period, self.capacity, Cost::new(units), id);
            }
        }
    }

    /// Releases the permits of `id`. Idempotent.
    pub fn release(&self, id: PermitId, state: &mut State) {
        if self.shape == Shape::Permits {
            state.permits().release(id);
        }
    }

    /// Returns whether a release of the holder undoes what a charge with this permit takes. A refund undoes it otherwise: permits
    /// without a holder have nothing to be released by.
    #[must_use]
    pub fn is_released(&self, permit: PermitId) -> bool {
        self.shape == Shape::Permits && permit != PermitId::ANONYMOUS
    }

    /// Returns whether the state is unused or of this limit's kind; a state that another kind left counts as unused.
    #[must_use]
    pub const fn reads(&self, state: &State) -> bool {
        matches!(
            (state, self.shape),
            (State::Unused, _)
                | (State::Bucket(_), Shape::Bucket(_) | Shape::Stepped(..))
                | (State::Window(_), Shape::Fixed(_))
                | (State::Sliding(_), Shape::Sliding)
                | (State::Strict(_), Shape::Strict(_))
                | (State::Log(_), Shape::Log(_))
                | (State::Permits(_), Shape::Permits)
        )
    }

    /// Returns the instant from which the state is equivalent to an unused one and may be dropped.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, TimeDelta, State, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(2))).build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// let _ = limit.step(&mut state, now, Cost::ONE);
    /// assert_eq!(limit.expires(&state), now + TimeDelta::from_millis(500));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn expires(&self, state: &State) -> Timestamp {
        let period = self.rate.period.length();
        match (state, self.shape) {
            (State::Bucket(tat), Shape::Stepped(_, steps)) => steps.expires(Bucket::full_at(*tat)),
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

    /// Returns the window that contains `now`.
    #[inline]
    pub(crate) fn window_at(&self, now: Timestamp) -> (Timestamp, Timestamp) {
        match &self.rate.period {
            Period::Rolling(span) => {
                let start = window_start(now, *span);
                (start, start + *span)
            }
            Period::Calendar(calendar) => calendar.window(now),
        }
    }

    /// Returns the window that a charge counts in, where `bounds` is the window that contains now. It is the state's
    /// own window if that lies in the future (the clock moved backward, or this `now` was read before another
    /// thread's); otherwise the count would be lost when time reaches that window again. It is never further ahead than
    /// the next window, so that no clock error locks a key for long.
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
        let verdict = if cost.is_refund() || cost.is_peek() {
            Verdict::ALLOWED
        } else {
            Verdict::Denied { retry_after: None }
        };
        Outcome { verdict, ..Outcome::UNKNOWN }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.display_of(None).fmt(f)
    }
}

impl Limit {
    /// Displays the limit, with the name of what it counts if that is not requests.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(9_000))).build()?;
    /// assert_eq!(limit.display_of(Some("tokens")).to_string(), "gcra 9000 tokens/1m");
    /// assert_eq!(limit.display_of(None).to_string(), limit.to_string());
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn display_of<'d>(&'d self, unit: Option<&'d str>) -> impl fmt::Display + 'd {
        fmt::from_fn(move |f| {
            let Rate { count, period } = &self.rate;
            match unit {
                Some(unit) => write!(f, "{} {count} {unit}/{period}", self.algorithm)?,
                None => write!(f, "{} {}", self.algorithm, self.rate)?,
            }
            if self.algorithm.has_burst() && self.capacity != self.rate.count {
                write!(f, " burst {}", self.capacity)?;
            }
            if let Some(interval) = self.refill_interval {
                write!(f, " refilled every {interval}")?;
            }
            Ok(())
        })
    }
}
