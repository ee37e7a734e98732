//! Leased units: deducted by the authority at one instant, each with an end of validity.

use tollgate_core::{Escrow, PermitId, TimeDelta, Timestamp};

/// One grant.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeasedUnits {
    escrow: Escrow,
    /// When it was asked for, by this node's clock: before the authority deducted.
    asked_at: Timestamp,
    /// When it was deducted, by the authority's.
    pub(super) at: Timestamp,
    /// When the bucket was to be full again, by the authority's.
    pub(super) full_at: Timestamp,
    /// How many are spent or void. The first to become void is the first to be spent.
    used: u64,
    /// How often units had become void before they could be spent.
    voids: u32,
    /// How many the authority has been told to be out no longer.
    reported: u64,
    /// Names the grant, for giving back.
    pub(super) id: PermitId,
    /// No unit is spent later than this after asking.
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

    /// How many can be spent at this instant.
    pub(super) fn available(&self, now: Timestamp) -> u64 {
        self.escrow.units() - self.used.max(self.void(now))
    }

    /// Spends `units` if there are as many, and tells what is left; the rest of the answer is for [`LeasedUnits::unspend`].
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

    /// Takes back units that were spent a moment ago. Not if units have become void since: then these have too, and who
    /// came later has spent what came after them.
    pub(super) fn unspend(&mut self, units: u64, voids: u32) {
        if voids == self.voids {
            self.used = self.used.saturating_sub(units);
        }
    }

    /// How many have been spent or become void since this was last asked.
    pub(super) fn report(&mut self, now: Timestamp) -> u64 {
        let gone = self.used.max(self.void(now));
        let news = gone.saturating_sub(self.reported);
        self.reported = self.reported.max(gone);
        news
    }

    /// The instant that the authority counts the last `units` as taken at.
    pub(super) fn taken_at(&self, units: u64) -> Timestamp {
        self.escrow.taken_at(units, self.at)
    }

    /// How many can no longer be spent. Clocks may differ in rate by a thousandth: a margin for that is taken off.
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
