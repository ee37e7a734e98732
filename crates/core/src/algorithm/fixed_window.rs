//! Fixed window: a count that restarts at the start of each window.
//!
//! Cheap and easy to explain; admits up to twice the limit around a boundary. Windows are aligned to the Unix epoch or
//! to the calendar. `Counting::Attempts` also counts denied requests, as the Envoy service does.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};

/// What a window's counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counting {
    /// Admitted units only; a denial changes nothing.
    Admitted,
    /// All requested units, admitted or denied.
    Attempts,
}

impl Counting {
    /// Returns the maximum count: twice the limit, or for attempts 2^30 - 1 where that is more. Every store stops
    /// there, whatever width it stores, so that all stores return the same outcomes.
    pub(crate) const fn max_count(self, limit: u64) -> u64 {
        const MAX_ATTEMPTS: u64 = (1 << 30) - 1;
        match self {
            Self::Attempts if 2 * limit < MAX_ATTEMPTS => MAX_ATTEMPTS,
            _ => 2 * limit,
        }
    }
}

/// The count of one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowCount {
    /// First instant of the window.
    pub start: Timestamp,
    /// Units counted in the window.
    pub count: u64,
}

impl WindowCount {
    /// Restarts the count if the window from `start` is later than the stored one.
    fn roll(&mut self, start: Timestamp) {
        if self.start < start {
            self.count = 0;
        }
        self.start = start;
    }

    #[inline]
    pub(crate) fn step(
        &mut self,
        (start, end): (Timestamp, Timestamp),
        now: Timestamp,
        limit: u64,
        counting: Counting,
        cost: Cost,
    ) -> Outcome {
        self.roll(start);
        let reset = end.since(now);
        if cost.is_refund() {
            self.count = self.count.saturating_sub(cost.units());
            return self.outcome(limit, reset, Verdict::ALLOWED);
        }
        let after = self.count.saturating_add(cost.units());
        let looks = cost.is_peek() && counting == Counting::Admitted;
        if after <= limit || looks {
            self.count = after;
            return self.outcome(limit, reset, Verdict::ALLOWED);
        }
        if counting == Counting::Attempts {
            self.add(cost.units(), counting.max_count(limit));
        }
        let retry_after = (cost.units() <= limit).then_some(reset);
        self.outcome(limit, reset, Verdict::Denied { retry_after })
    }

    pub(crate) fn debit(&mut self, start: Timestamp, limit: u64, counting: Counting, units: u64) {
        self.roll(start);
        self.add(units, counting.max_count(limit));
    }

    /// Adds `units`, up to `most`. A higher count, left by a larger limit, stays unchanged.
    fn add(&mut self, units: u64, most: u64) {
        self.count = self.count.max(self.count.saturating_add(units).min(most));
    }

    fn outcome(&self, limit: u64, reset: TimeDelta, verdict: Verdict) -> Outcome {
        let remaining = limit.saturating_sub(self.count);
        let next_after = if remaining == 0 && limit > 0 { reset } else { TimeDelta::ZERO };
        Outcome { verdict, remaining, next_after, reset_after: reset }
    }
}
