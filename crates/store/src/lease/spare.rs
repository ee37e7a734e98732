//! Spare slots: time of a bucket that a refund has set free while leases of it are outstanding.
//!
//! A refunded unit has a slot of its own that nobody uses any more. Where it lies is not known, because it may have been
//! exchanged for another; but it has not begun. Slots do not overlap, so of all spare slots together at most one second
//! begins in a second: what is left of them after that may be spent by other requests. `docs/internals/lease-proof.md` has
//! the proof.

use super::key_lease::Lease;
use super::units::SpendMark;
use tollgate_core::{Limit, LimitParams, PermitId, TimeDelta, Timestamp};

/// Time of a bucket that nobody uses, in units of 1/k of a microsecond.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SpareTime {
    time: u128,
    /// When that was left, by this node's clock.
    at: Timestamp,
}

/// Returns a bucket's units of time per microsecond, and per unit of cost.
pub(super) const fn scale(limit: &Limit) -> Option<(u64, u64)> {
    match limit.params() {
        LimitParams::Bucket { k, interval, .. } => Some((k, interval)),
        _ => None,
    }
}

/// Returns the longest time that may have passed where the clock says `passed`: clock rates may differ by a thousandth.
pub(super) const fn at_most(passed: TimeDelta) -> u64 {
    let passed = passed.as_micros();
    if passed == 0 { 0 } else { passed.saturating_add(passed >> 10).saturating_add(1) }
}

impl SpareTime {
    /// Returns whether there is none.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.time == 0
    }

    /// Returns what is left at `now`.
    pub(super) fn left(&self, k: u64, now: Timestamp) -> u128 {
        self.time.saturating_sub(u128::from(at_most(now.since(self.at))) * u128::from(k))
    }

    /// Adds time that was set free at `freed_at`.
    pub(super) fn add(&mut self, time: u128, k: u64, freed_at: Timestamp, now: Timestamp) {
        let freed = Self { time, at: freed_at };
        *self = Self { time: self.left(k, now).saturating_add(freed.left(k, now)), at: now };
    }

    /// Takes `time` if that much is left.
    pub(super) fn take(&mut self, time: u128, k: u64, now: Timestamp) -> bool {
        let left = self.left(k, now);
        let rest = left.checked_sub(time);
        *self = Self { time: rest.unwrap_or(left), at: now };
        rest.is_some()
    }
}

impl Lease {
    /// Spends units where no batch has enough available: of a batch to which spare slots restore some, or spare slots alone.
    /// Returns the batch, if it is one, and its void count.
    #[cold]
    pub(super) fn spend_spare(
        &mut self,
        units: u64,
        now: Timestamp,
    ) -> Option<(Option<PermitId>, SpendMark)> {
        self.restore_units(now);
        for leased in &mut self.units {
            if let (Some(mark), _) = leased.spend(units, now) {
                return Some((Some(leased.id), mark));
            }
        }
        let (k, interval) = scale(&self.key.limit)?;
        let time = u128::from(units) * u128::from(interval);
        self.spare.take(time, k, now).then_some((None, SpendMark::NONE))
    }

    /// Refunds `units` of a limit that charges the same counter, whose slots had not begun at `freed_at`. Returns whether the
    /// lease is for that counter's bucket.
    pub(super) fn refund(&mut self, limit: &Limit, units: u64, freed_at: Timestamp, now: Timestamp) -> bool {
        let (Some((k, interval)), Some((own_k, own))) = (scale(limit), scale(&self.key.limit)) else {
            return false;
        };
        let time = u128::from(units) * u128::from(interval);
        // More than a bucket can give is a reset of its counter.
        let max = u128::from(self.key.limit.capacity()) * u128::from(own);
        if k != own_k || !self.is_for(&limit.in_whole_units()) || time > max {
            return false;
        }
        self.spare.add(time, k, freed_at, now);
        self.restore_units(now);
        self.forget_denial();
        true
    }

    /// Drops all units, because the authority's counter is reset: it counts none of them any more. Those of a refill in flight
    /// are dropped when they come; which of the two was first is not known.
    pub(super) fn reset(&mut self) {
        self.spent += self.units.drain(..).map(|leased| leased.unreported()).sum::<u64>();
        self.spare = SpareTime::default();
        self.is_reset = self.is_refilling;
        self.forget_denial();
    }

    /// Exchanges spare slots for those of spent units: requests that have spent them keep slots that have not begun, and the
    /// units of which the end of validity is known are available again.
    fn restore_units(&mut self, now: Timestamp) {
        let Some((k, interval)) = scale(&self.key.limit) else { return };
        for leased in &mut self.units {
            let whole = self.spare.left(k, now) / u128::from(interval.max(1));
            let restored = leased.restore(u64::try_from(whole).unwrap_or(u64::MAX), now);
            if restored > 0 {
                self.spare.take(u128::from(restored) * u128::from(interval), k, now);
            }
        }
    }

    /// Returns the units that spare slots are enough for.
    pub(super) fn spare_units(&self, now: Timestamp) -> u64 {
        match scale(&self.key.limit).filter(|_| !self.spare.is_empty()) {
            Some((k, interval)) => {
                let units = self.spare.left(k, now) / u128::from(interval.max(1));
                u64::try_from(units).unwrap_or(u64::MAX)
            }
            None => 0,
        }
    }
}
