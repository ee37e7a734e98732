//! Leased units: deducted by the authority at one instant, each with an end of validity.

use tollgate_core::{Escrow, PermitId, TimeDelta, Timestamp};

/// The units of one refill.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeasedUnits {
    escrow: Escrow,
    /// When the refill was requested, by this node's clock: before the authority deducted the units.
    asked_at: Timestamp,
    /// When the units were deducted, by the authority's clock.
    pub(super) at: Timestamp,
    /// When the bucket was to be full again, by the authority's clock.
    pub(super) full_at: Timestamp,
    /// Number of units spent or void. The first to become void is the first to be spent.
    used: u64,
    /// How many times units became void before they could be spent, or were restored.
    voids: u32,
    /// Number of units reported to the authority as no longer outstanding.
    reported: u64,
    /// ID of the refill, for returning its units.
    pub(super) id: PermitId,
    /// Time after the request during which units may be spent.
    ttl: TimeDelta,
}

impl LeasedUnits {
    pub(super) fn new(
        escrow: Escrow,
        asked: Timestamp,
        (at, full_at): (Timestamp, Timestamp),
        id: PermitId,
        ttl: TimeDelta,
    ) -> Self {
        Self { escrow, asked_at: asked, at, full_at, used: 0, voids: 0, reported: 0, id, ttl }
    }

    /// Returns how many units can be spent at `now`.
    pub(super) fn available(&self, now: Timestamp) -> u64 {
        self.escrow.units() - self.used.max(self.void(now))
    }

    /// Spends `units` if that many are available. Returns the void count for [`LeasedUnits::unspend`], if spent, and
    /// the units left.
    #[inline]
    pub(super) fn spend(&mut self, units: u64, now: Timestamp) -> (Option<u32>, u64) {
        let void = self.void(now);
        let gone = self.used.max(void);
        let good = self.escrow.units() - gone;
        if units > good {
            return (None, good);
        }
        if void >= self.used {
            self.voids = self.voids.wrapping_add(1);
        }
        self.used = gone + units;
        (Some(self.voids), good - units)
    }

    /// Undoes a recent spend. Does nothing if units have become void since: these have too, and later requests have
    /// spent the units after them.
    pub(super) fn unspend(&mut self, units: u64, voids: u32) {
        if voids == self.voids {
            self.used = self.used.saturating_sub(units);
        }
    }

    /// Makes up to this many spent units available again, whose holders have got other slots that have not begun. Returns how
    /// many: those whose own slots have not begun.
    pub(super) fn restore(&mut self, units: u64, now: Timestamp) -> u64 {
        let restored = units.min(self.used.saturating_sub(self.void(now)));
        if restored > 0 {
            self.used -= restored;
            // Requests in flight may have got the other slots, which may begin before these are undone.
            self.voids = self.voids.wrapping_add(1);
        }
        restored
    }

    /// Returns how many units were spent or became void since the last call.
    pub(super) fn report(&mut self, now: Timestamp) -> u64 {
        let gone = self.used.max(self.void(now));
        let news = gone.saturating_sub(self.reported);
        self.reported = self.reported.max(gone);
        news
    }

    /// Returns the instant at which the authority counts the last `units` as taken.
    pub(super) fn taken_at(&self, units: u64) -> Timestamp {
        self.escrow.taken_at(units, self.at)
    }

    /// Returns how many units can no longer be spent. Clock rates may differ by a thousandth: a margin for that is
    /// deducted.
    #[inline]
    fn void(&self, now: Timestamp) -> u64 {
        let passed = now.since(self.asked_at);
        if passed >= self.ttl {
            return self.escrow.units();
        }
        let passed = passed.as_micros();
        let at_most = TimeDelta::from_micros(passed + (passed >> 10) + 1);
        self.escrow.units() - self.escrow.valid_after(at_most)
    }
}
