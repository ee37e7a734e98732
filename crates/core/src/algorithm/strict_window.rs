//! Strict window: never more than the limit in any window, in constant memory.
//!
//! The period is divided into k slots. Any window of that length touches at most k + 1 of them, so the sum over the
//! last k + 1 slots, with the oldest counted in full, bounds it from above. The cost is that a unit blocks for up to
//! one slot longer than necessary (a k-th of the period). Rejected as a default: the exact log, because its memory
//! grows with the limit.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};

/// The counts of the current slot and the k before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StrictCounts {
    /// Number of the current slot since the epoch.
    pub slot: u64,
    /// Counts by age: `counts[i]` belongs to slot `slot - i`.
    pub counts: Vec<u64>,
}

/// The parameters of a strict window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slots {
    /// Slots per period.
    pub(crate) k: u64,
    /// Microseconds per slot, rounded up so that k slots cover the period.
    pub(crate) width: u64,
}

impl Slots {
    pub(crate) const DEFAULT: u64 = 10;
    pub(crate) const MAX: u64 = 120;

    pub(crate) fn new(k: u64, period: TimeDelta) -> Self {
        Self { k, width: period.as_micros().div_ceil(k) }
    }
}

impl StrictCounts {
    fn roll(&mut self, slots: Slots, now: Timestamp) {
        let present = now.as_micros() / slots.width;
        let kept = usize::try_from(slots.k + 1).unwrap_or(usize::MAX);
        self.counts.resize(kept, 0);
        if present > self.slot {
            let moved = usize::try_from(present - self.slot).unwrap_or(usize::MAX).min(kept);
            self.counts.rotate_right(moved);
            self.counts[..moved].fill(0);
            self.slot = present;
        }
        // A slot in the future (the clock moved backward, or this `now` was read before another thread's) stays;
        // otherwise its counts would age by a slot each time the clock crosses the boundary. It is never further ahead
        // than the next slot, so that no clock error locks a key for long.
        self.slot = self.slot.min(present + 1);
    }

    pub(crate) fn step(&mut self, slots: Slots, now: Timestamp, limit: u64, cost: Cost) -> Outcome {
        self.roll(slots, now);
        if cost.is_refund() {
            let mut left = cost.units();
            for count in &mut self.counts {
                let back = left.min(*count);
                *count -= back;
                left -= back;
            }
            return self.outcome(slots, now, limit, Verdict::ALLOWED);
        }
        if cost.is_peek() {
            return self.outcome(slots, now, limit, Verdict::ALLOWED);
        }
        let used: u64 = self.counts.iter().sum();
        if used.saturating_add(cost.units()) <= limit {
            self.counts[0] += cost.units();
            return self.outcome(slots, now, limit, Verdict::ALLOWED);
        }
        let retry_after = self.wait(slots, now, limit, cost.units(), used);
        self.outcome(slots, now, limit, Verdict::Denied { retry_after })
    }

    pub(crate) fn debit(&mut self, slots: Slots, now: Timestamp, limit: u64, units: u64) {
        self.roll(slots, now);
        let used: u64 = self.counts.iter().sum();
        self.counts[0] += units.min((2 * limit).saturating_sub(used));
    }

    fn wait(&self, slots: Slots, now: Timestamp, limit: u64, units: u64, used: u64) -> Option<TimeDelta> {
        let mut excess = used.saturating_add(units.min(limit)) - limit;
        if units > limit {
            return None;
        }
        for (age, count) in self.counts.iter().enumerate().rev() {
            excess = excess.saturating_sub(*count);
            if excess == 0 {
                return Some(self.slot_expiry(slots, age as u64).since(now));
            }
        }
        None
    }

    /// Returns the instant from which the slot of this age lies outside every window that ends then.
    fn slot_expiry(&self, slots: Slots, age: u64) -> Timestamp {
        Timestamp::from_micros((self.slot + slots.k + 1 - age) * slots.width)
    }

    fn outcome(&self, slots: Slots, now: Timestamp, limit: u64, verdict: Verdict) -> Outcome {
        let used: u64 = self.counts.iter().sum();
        let youngest = self.counts.iter().position(|count| *count > 0);
        let reset_after =
            youngest.map_or(TimeDelta::ZERO, |age| self.slot_expiry(slots, age as u64).since(now));
        let remaining = limit.saturating_sub(used);
        let next_after = match remaining {
            0 => self.wait(slots, now, limit, 1, used).unwrap_or_default(),
            _ => TimeDelta::ZERO,
        };
        Outcome { verdict, remaining, next_after, reset_after }
    }

    /// Returns the instant from which the state is equivalent to an unused one.
    pub(crate) fn expires(&self, slots: Slots) -> Timestamp {
        self.slot_expiry(slots, 0)
    }
}
