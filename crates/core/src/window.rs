//! Fixed windows: a count that starts again at each window's start.
//!
//! Cheap and easily explained; lets up to twice the limit through around a boundary. Windows are aligned to the Unix
//! epoch, or to the calendar. `Counting::Attempts` also counts what it denies, as the Envoy service does.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{Span, Timestamp};

/// What a window's counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counting {
    /// Only what passed: a denial changes nothing.
    Admitted,
    /// Everything asked for.
    Attempts,
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
    /// The state as the window from `start` sees it. A window from the future means that the clock went back: its
    /// count stands, in the window that is now.
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
            return self.outcome(limit, reset, Verdict::PASS);
        }
        let after = self.count.saturating_add(cost.units());
        let looks = cost.is_look() && counting == Counting::Admitted;
        if after <= limit || looks {
            self.count = after;
            return self.outcome(limit, reset, Verdict::PASS);
        }
        if counting == Counting::Attempts {
            self.count = after;
        }
        let retry_after = (cost.units() <= limit).then_some(reset);
        self.outcome(limit, reset, Verdict::Denied { retry_after })
    }

    pub(crate) fn debit(&mut self, start: Timestamp, units: u64) {
        self.roll(start);
        self.count = self.count.saturating_add(units);
    }

    fn outcome(&self, limit: u64, reset: Span, verdict: Verdict) -> Outcome {
        Outcome { verdict, remaining: limit.saturating_sub(self.count), reset_after: reset }
    }
}
