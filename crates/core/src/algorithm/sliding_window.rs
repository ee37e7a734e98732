//! Two-counter sliding window: the previous window's count, weighted by its overlap with the period that ends now, plus
//! the current count.
//!
//! Constant memory and no jump at the boundary, on the assumption that the previous window's requests were spread
//! evenly; an adversary that packs them can reach twice the limit in one window (`strict_window` and `sliding_log`
//! prevent that). The comparison `prev * (P - e) + (cur + cost) * P <= limit * P` uses whole numbers: nothing is
//! rounded.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};

/// The counts of the current window and the previous one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlidingCounts {
    /// First instant of the current window.
    pub start: Timestamp,
    /// Units counted in the previous window.
    pub previous: u64,
    /// Units counted in the current window.
    pub current: u64,
}

impl SlidingCounts {
    /// Advances to the window of `now`. Returns the elapsed part of that window and how far its position is ahead of
    /// `now`.
    ///
    /// A window in the future (the clock moved backward, or this `now` was read before another thread's) keeps its
    /// counts, and `now` counts as its first instant, so that a clock that moved backward lowers no weight. It is never
    /// further ahead than the next window, so that no clock error locks a key for long.
    fn roll(&mut self, now: Timestamp, period: TimeDelta) -> (TimeDelta, TimeDelta) {
        let present = window_start(now, period);
        if self.start > present {
            self.start = self.start.min(present + period);
            return (TimeDelta::ZERO, self.start.since(now));
        }
        if self.start < present {
            self.previous = if self.start + period == present { self.current } else { 0 };
            self.current = 0;
            self.start = present;
        }
        (now.since(present), TimeDelta::ZERO)
    }

    #[inline]
    pub(crate) fn step(&mut self, now: Timestamp, period: TimeDelta, limit: u64, cost: Cost) -> Outcome {
        let (elapsed, ahead) = self.roll(now, period);
        let mut outcome = self.step_at(elapsed, period, limit, cost);
        outcome.next_after = later(outcome.next_after, ahead);
        outcome.reset_after = later(outcome.reset_after, ahead);
        if let Verdict::Denied { retry_after: Some(wait) } = &mut outcome.verdict {
            *wait = later(*wait, ahead);
        }
        outcome
    }

    fn step_at(&mut self, elapsed: TimeDelta, period: TimeDelta, limit: u64, cost: Cost) -> Outcome {
        if cost.is_refund() {
            // The units taken last are refunded first.
            let from_current = cost.units().min(self.current);
            self.current -= from_current;
            self.previous = self.previous.saturating_sub(cost.units() - from_current);
            return self.outcome(elapsed, period, limit, Verdict::ALLOWED);
        }
        if cost.is_peek() {
            return self.outcome(elapsed, period, limit, Verdict::ALLOWED);
        }
        if self.weight(elapsed, period).saturating_add(wide(cost.units()) * length(period))
            <= wide(limit) * length(period)
        {
            self.current += cost.units();
            return self.outcome(elapsed, period, limit, Verdict::ALLOWED);
        }
        let retry_after = self.wait(elapsed, period, limit, cost.units());
        self.outcome(elapsed, period, limit, Verdict::Denied { retry_after })
    }

    pub(crate) fn debit(&mut self, now: Timestamp, period: TimeDelta, limit: u64, units: u64) {
        let _ = self.roll(now, period);
        // A higher count, left by a larger limit, stays unchanged.
        self.current = self.current.max(self.current.saturating_add(units).min(2 * limit));
    }

    /// Returns the weighted units in the period that ends now, times the period.
    fn weight(&self, elapsed: TimeDelta, period: TimeDelta) -> u128 {
        wide(self.previous) * (length(period) - length(elapsed)) + wide(self.current) * length(period)
    }

    /// Returns the exact wait until `units` fit if no other charge is applied.
    fn wait(&self, elapsed: TimeDelta, period: TimeDelta, limit: u64, units: u64) -> Option<TimeDelta> {
        let spare = limit.checked_sub(units)?;
        // In this window `previous` shrinks; in the next one, `current` becomes `previous`.
        let (shrinking, room, waited) = match spare.checked_sub(self.current) {
            Some(room) => (self.previous, room, length(elapsed)),
            None => (self.current, spare, 0),
        };
        let in_view = (wide(room) * length(period)).checked_div(wide(shrinking)).unwrap_or(length(period));
        let turn = length(period).saturating_sub(in_view);
        let until = if self.current > spare { length(period) - length(elapsed) } else { 0 };
        Some(TimeDelta::from_micros(u64::try_from(until + turn.saturating_sub(waited)).unwrap_or(u64::MAX)))
    }

    fn outcome(&self, elapsed: TimeDelta, period: TimeDelta, limit: u64, verdict: Verdict) -> Outcome {
        let free = (wide(limit) * length(period)).saturating_sub(self.weight(elapsed, period));
        let remaining = u64::try_from(free / length(period)).unwrap_or(u64::MAX);
        let left = period.as_micros() - elapsed.as_micros();
        let reset = match (self.current, self.previous) {
            (0, 0) => 0,
            (0, _) => left,
            _ => left + period.as_micros(),
        };
        let next_after = match remaining {
            0 => self.wait(elapsed, period, limit, 1).unwrap_or_default(),
            _ => TimeDelta::ZERO,
        };
        Outcome { verdict, remaining, next_after, reset_after: TimeDelta::from_micros(reset) }
    }
}

/// Adds `ahead` to a wait; `None` stays `None`.
fn later(wait: TimeDelta, ahead: TimeDelta) -> TimeDelta {
    if wait == TimeDelta::ZERO { wait } else { TimeDelta::from_micros(wait.as_micros() + ahead.as_micros()) }
}

pub(crate) fn window_start(now: Timestamp, period: TimeDelta) -> Timestamp {
    Timestamp::from_micros(now.as_micros() - now.as_micros() % period.as_micros())
}

fn wide(units: u64) -> u128 {
    u128::from(units)
}

fn length(span: TimeDelta) -> u128 {
    u128::from(span.as_micros())
}
