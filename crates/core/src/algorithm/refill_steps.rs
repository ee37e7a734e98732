//! Steps of a token bucket that is refilled at intervals, not continuously.
//!
//! All units of an interval arrive together at its start. That is the continuous bucket at a clock that stands still
//! within an interval, so nothing but the time changes: a charge is stepped at the *end* of the interval that contains
//! it, and waits are extended to the start of an interval. The same units pass, at the same exact rate, and the state has
//! the same form.
//!
//! The end and not the start, so that a state expires no earlier than the bucket is full: stores drop a state once its TAT
//! has passed, without its limit. Rejected: a count of tokens and the time of the last refill, because it is two words
//! and a second arithmetic for the same sums.

use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};

/// The grid of intervals: multiples of this length, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RefillSteps(u64);

impl RefillSteps {
    pub(crate) fn new(interval: TimeDelta) -> Self {
        Self(interval.as_micros().max(1))
    }

    /// Returns the end of the interval that contains `now`.
    pub(crate) fn end(self, now: Timestamp) -> Timestamp {
        Timestamp::from_micros((now.as_micros() / self.0 + 1) * self.0)
    }

    /// Returns the start of the first interval in which a state with this TAT, in microseconds, is equivalent to an
    /// unused one.
    pub(crate) fn expires(self, full_at: u64) -> Timestamp {
        Timestamp::from_micros(full_at.div_ceil(self.0).saturating_sub(1) * self.0)
    }

    /// Returns an outcome whose times count from the end of the interval as one whose times count from `now`.
    pub(crate) fn seen_at(self, now: Timestamp, outcome: Outcome) -> Outcome {
        let wait = |time: TimeDelta| {
            let steps = time.as_micros().div_ceil(self.0);
            TimeDelta::from_micros((steps * self.0).saturating_sub(now.as_micros() % self.0))
        };
        let verdict = match outcome.verdict {
            Verdict::Denied { retry_after } => Verdict::Denied { retry_after: retry_after.map(wait) },
            other => other,
        };
        // A full bucket has nothing to wait for.
        let next_after = wait(outcome.next_after);
        Outcome { verdict, next_after, reset_after: wait(outcome.reset_after), ..outcome }
    }
}
