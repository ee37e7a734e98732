//! Lease settings.

use super::spare::{at_most, scale};
use tollgate_core::{Algorithm, Limit, LimitParams, LimitSpec, Rate, Scope, TimeDelta};

/// Units that a lease adds to its mark.
pub(super) const MARK_UNITS: u64 = 1 << 24;

/// Lease settings.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaseConfig {
    /// Fraction of a limit's burst that may be outstanding at once, and of the remaining units that one lease may take.
    pub share: f64,
    /// Longest time after the request that a lease may be spent.
    pub ttl: TimeDelta,
    /// How long a lease is meant to last at the current demand.
    pub horizon: TimeDelta,
    /// Time without use after which a lease is returned.
    pub idle: TimeDelta,
    /// Maximum number of leases; charges of further keys go to the store.
    pub max_keys: usize,
    /// Number of active nodes, as far as known: limits with a smaller burst are not leased.
    pub nodes: u32,
    /// Units per second at this node at which a key of a central rule is leased automatically; `None` for never.
    pub hot: Option<u64>,
    /// How long a hot key must stay below half of that rate before it is demoted.
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
    /// Returns the units of this limit that may be outstanding at once, or `None` if it is too small to be leased.
    pub(super) fn max_outstanding(&self, limit: &Limit) -> Option<u64> {
        let most = self.share_of(limit.capacity());
        (limit.is_leasable() && most >= 2 && limit.capacity() >= u64::from(self.nodes)).then_some(most)
    }

    /// Returns the longest time between two charges at which a lease pays off: four charges while its units are valid.
    /// If a bucket is not short of units, leased ones become void as fast as the bucket fills.
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

    /// Returns the configured share of `units`.
    pub(super) fn share_of(&self, units: u64) -> u64 {
        (units as f64 * self.share.clamp(0.0, 1.0)) as u64
    }

    /// Returns the limit of the mark that leases may be outstanding, kept at the authority: with `always`, one that
    /// always fits what a lease adds, otherwise one that is full once a lease has been added. The mark outlasts a lease
    /// and the time between two marks.
    pub(super) fn mark(&self, always: bool) -> Option<Limit> {
        let most = if always { Rate::MAX_COUNT } else { MARK_UNITS / 16 };
        let twice = TimeDelta::from_micros(2 * self.ttl.as_micros());
        LimitSpec::new(Algorithm::SlidingWindow, Rate::per(most, twice)).build().ok()
    }

    /// Returns the counter beside `scope`'s that leases mark while they may be outstanding, and a limit that is full then. A
    /// refund of a bucket is charged together with one unit of it, all or none, so that it is applied only while no lease
    /// may be outstanding.
    #[must_use]
    pub fn refund_guard(&self, scope: &Scope) -> Option<(Scope, Limit)> {
        Some((scope.sibling(crate::MARK_SUFFIX), self.mark(false)?))
    }

    /// Returns how much of a bucket must be used for a refund beside outstanding leases: units whose slots begin only after the
    /// leases of now have expired, and any that are returned meanwhile, at least as many as may be outstanding. These are half
    /// as many again as `share` allows, because late reports of spent units may hide some; and other nodes may refund a part
    /// each at the same time.
    pub(super) fn refund_depth(&self, limit: &Limit) -> Option<RefundDepth> {
        let (k, interval) = scale(limit)?;
        let parts = limit.parts_of_unit().max(1);
        let (held, nodes) = (self.share_of(limit.capacity() / parts).max(1), u64::from(self.nodes.max(1)));
        let units = held + held / 2 + (held / 4).max(nodes);
        let ttl = 2 * u128::from(at_most(self.ttl)) * u128::from(k);
        let least = ttl + u128::from(units) * u128::from(parts) * u128::from(interval);
        Some(RefundDepth { part: (held / 4 / nodes).max(1) * parts, least, k, interval })
    }

    /// Returns the limit that counts outstanding units at the authority: a strict window as long as a lease's lifetime.
    pub(super) fn escrow(&self, most: u64) -> Option<Limit> {
        LimitSpec::new(Algorithm::StrictWindow, Rate::per(most, self.ttl)).slots(4).build().ok()
    }
}

/// How much of a bucket must be used for a refund beside outstanding leases.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefundDepth {
    /// Maximum units of one refund.
    pub(super) part: u64,
    /// What must remain used, in units of the bucket's time.
    least: u128,
    k: u64,
    interval: u64,
}

impl RefundDepth {
    /// Returns whether units can be refunded to a bucket that is unused after `reset_after`.
    pub(super) fn allows(&self, reset_after: TimeDelta, units: u64) -> bool {
        let used = u128::from(reset_after.as_micros()) * u128::from(self.k);
        used >= self.least + u128::from(units) * u128::from(self.interval)
    }
}
