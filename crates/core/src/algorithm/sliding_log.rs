//! Sliding log: every admitted unit with its instant. Exact; its size grows with the limit.
//!
//! Units admitted at one instant share an entry, so a log holds at most `limit` entries. An entry at t counts until t +
//! period, exclusive. A refund removes the units that it gives back where they were taken, so that they are counted no
//! longer than they were used; removing the newest ones instead would forget later requests too early.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};
use std::collections::VecDeque;

/// Admitted units by instant, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmissionLog {
    /// Entries of (instant, units).
    pub entries: VecDeque<(Timestamp, u64)>,
    /// Sum of the entries' units, so that a step does not iterate over all of them.
    used: u64,
}

impl AdmissionLog {
    /// The largest limit that a log may have; above it, use `strict_window`.
    pub(crate) const MAX_LIMIT: u64 = 100_000;

    /// Creates a log with these entries, oldest first.
    #[must_use]
    pub fn from_entries(entries: VecDeque<(Timestamp, u64)>) -> Self {
        let used = entries.iter().map(|(_, units)| units).sum();
        Self { entries, used }
    }

    fn roll(&mut self, now: Timestamp, period: TimeDelta) {
        while let Some((_, units)) = self.entries.pop_front_if(|(at, _)| *at + period <= now) {
            self.used -= units;
        }
        // Entries in the future (the clock moved backward) count as taken now; otherwise they would block for too long.
        let mut future = 0;
        while let Some((_, units)) = self.entries.pop_back_if(|(at, _)| *at > now) {
            future += units;
        }
        self.used -= future;
        self.add(now, future);
    }

    fn add(&mut self, now: Timestamp, units: u64) {
        if units == 0 {
            return;
        }
        self.used += units;
        match self.entries.back_mut() {
            Some((at, n)) if *at == now => *n += units,
            _ => self.entries.push_back((now, units)),
        }
    }

    /// Removes up to `units` of those logged at `taken` or before, the newest first.
    fn refund(&mut self, units: u64, taken: Timestamp) {
        let mut left = units;
        let end = self.entries.partition_point(|(at, _)| *at <= taken);
        let mut start = end;
        while left > 0 && start > 0 {
            start -= 1;
            let n = &mut self.entries[start].1;
            let back = left.min(*n);
            *n -= back;
            left -= back;
            self.used -= back;
        }
        let emptied = start + usize::from(start < end && self.entries[start].1 > 0);
        self.entries.drain(emptied..end);
    }

    pub(crate) fn step(
        &mut self,
        now: Timestamp,
        period: TimeDelta,
        limit: u64,
        cost: Cost,
        taken: Option<Timestamp>,
    ) -> Outcome {
        self.roll(now, period);
        if cost.is_refund() {
            self.refund(cost.units(), taken.unwrap_or(now));
            return self.outcome(now, period, limit, Verdict::ALLOWED);
        }
        if cost.is_peek() {
            return self.outcome(now, period, limit, Verdict::ALLOWED);
        }
        if self.used.saturating_add(cost.units()) <= limit {
            self.add(now, cost.units());
            return self.outcome(now, period, limit, Verdict::ALLOWED);
        }
        let retry_after = self.wait(now, period, limit, cost.units());
        self.outcome(now, period, limit, Verdict::Denied { retry_after })
    }

    pub(crate) fn debit(&mut self, now: Timestamp, period: TimeDelta, limit: u64, units: u64) {
        self.roll(now, period);
        self.add(now, units.min((2 * limit).saturating_sub(self.used)));
    }

    /// Returns the exact wait until `units` fit if no other charge is applied.
    fn wait(&self, now: Timestamp, period: TimeDelta, limit: u64, units: u64) -> Option<TimeDelta> {
        let spare = limit.checked_sub(units)?;
        let mut excess = self.used.saturating_sub(spare);
        let last = self.entries.iter().find(|(_, n)| {
            excess = excess.saturating_sub(*n);
            excess == 0
        });
        last.map(|(at, _)| (*at + period).since(now))
    }

    fn outcome(&self, now: Timestamp, period: TimeDelta, limit: u64, verdict: Verdict) -> Outcome {
        let reset_after = self.entries.back().map_or(TimeDelta::ZERO, |(at, _)| (*at + period).since(now));
        let remaining = limit.saturating_sub(self.used);
        let next_after = match remaining {
            0 => self.wait(now, period, limit, 1).unwrap_or_default(),
            _ => TimeDelta::ZERO,
        };
        Outcome { verdict, remaining, next_after, reset_after }
    }
}
