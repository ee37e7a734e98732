//! Fixed windows: a count that starts again at each window's start.
//!
//! Cheap and easily explained; lets up to twice the limit through around a boundary. Windows are aligned to the Unix
//! epoch, or to the calendar. `Counting::Attempts` also counts what it denies, as the Envoy service does.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};

/// What a window's counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counting {
    /// Only what passed: a denial changes nothing.
    Admitted,
    /// Everything asked for.
    Attempts,
}

impl Counting {
    /// How far a counter counts: a debt of one limit, and of attempts a thousand million. Every store stops there,
    /// whatever width it keeps, so that all of them answer alike.
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
    /// The window's first instant.
    pub start: Timestamp,
    /// Units counted in it.
    pub count: u64,
}

impl WindowCount {
    /// Starts the count again if the window from `start` is a later one.
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

    /// A count that a larger limit left behind stays as it is.
    fn add(&mut self, units: u64, most: u64) {
        self.count = self.count.max(self.count.saturating_add(units).min(most));
    }

    fn outcome(&self, limit: u64, reset: TimeDelta, verdict: Verdict) -> Outcome {
        Outcome { verdict, remaining: limit.saturating_sub(self.count), reset_after: reset }
    }
}
