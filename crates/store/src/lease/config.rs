//! Lease settings.

use tollgate_core::{Algorithm, Limit, LimitParams, LimitSpec, Rate, TimeDelta};

/// What a lease leaves on its mark.
pub(super) const MARK_UNITS: u64 = 1 << 24;

/// How leases are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaseConfig {
    /// The part of a limit's burst that may be out in leases at once, and of what remains that one lease may take.
    pub share: f64,
    /// How long a lease is spent after it was asked for, at most.
    pub ttl: TimeDelta,
    /// For how long a lease is meant to last at the present demand.
    pub horizon: TimeDelta,
    /// A lease that has not been used for so long goes back.
    pub idle: TimeDelta,
    /// Leases kept at once; further keys are asked about in the store.
    pub max_keys: usize,
    /// Nodes that are active at once, as far as known: limits with a smaller burst are not leased.
    pub nodes: u32,
    /// Units a second at this node from which on a key of a central rule is leased by itself; `None` for never.
    pub hot: Option<u64>,
    /// How long a key that was leased for its heat has to be cooler than half of that to be so no more.
    pub cool: TimeDelta,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            share: 0.25,
            ttl: TimeDelta::from_secs(10),
            horizon: TimeDelta::from_secs(2),
            idle: TimeDelta::from_secs(2),
            max_keys: 65_536,
            nodes: 1,
            hot: Some(1_000),
            cool: TimeDelta::from_secs(5),
        }
    }
}

impl LeaseConfig {
    /// Units of this limit that may be out at once; `None` where it is too small to be leased.
    pub(super) fn max_outstanding(&self, limit: &Limit) -> Option<u64> {
        let most = self.share_of(limit.capacity());
        (limit.is_leasable() && most >= 2 && limit.capacity() >= u64::from(self.nodes)).then_some(most)
    }

    /// The longest time between two charges for which a lease is worth its price: four of them while its units are good.
    /// Of a bucket that is not short of units, those in hand become void as fast as the bucket fills.
    pub(super) fn max_gap(&self, limit: &Limit) -> TimeDelta {
        let most = self.ttl.min(self.idle).as_micros();
        let good = match limit.params() {
            LimitParams::Bucket { k, interval, .. } => {
                let units = self.share_of(limit.capacity());
                u64::try_from(u128::from(units) * u128::from(interval) / u128::from(k.max(1))).unwrap_or(most)
            }
            _ => most,
        };
        TimeDelta::from_micros(good.min(most) / 4)
    }

    /// This share of so many units.
    pub(super) fn share_of(&self, units: u64) -> u64 {
        (units as f64 * self.share.clamp(0.0, 1.0)) as u64
    }

    /// What marks, at the authority, that leases may be out: by a limit that always fits what a lease leaves, and by one
    /// that fits nothing beside it. It lasts longer than a lease does, and than the time between two marks.
    pub(super) fn mark(&self, always: bool) -> Option<Limit> {
        let most = if always { Rate::MAX_COUNT } else { MARK_UNITS / 16 };
        let twice = TimeDelta::from_micros(2 * self.ttl.as_micros());
        LimitSpec::new(Algorithm::SlidingWindow, Rate::per(most, twice)).build().ok()
    }

    /// What counts the units that are out, at the authority: a strict window as long as a lease lives.
    pub(super) fn escrow(&self, most: u64) -> Option<Limit> {
        LimitSpec::new(Algorithm::StrictWindow, Rate::per(most, self.ttl)).slots(4).build().ok()
    }
}
