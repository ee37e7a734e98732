//! Debt of a fair share: what a tenant got by another right than its fair share, it has less of that.
//!
//! A tenant beyond its fair share that is served within a guarantee has the larger of both, not the sum. Its bucket goes into debt of at most
//! its depth, so that a guarantee that is used for hours is not held against the tenant for hours.

use super::{FAIR_DEPTH, LEAST_UNITS, NEW_INTERVALS, Shares, TenantRequest};
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::Timestamp;

impl Shares {
    /// Takes tokens from the bucket of a tenant's fair share although there are none. Returns how many units the share does not cover
    /// sooner or later, because the debt is as large as it may be.
    pub(crate) fn debit(&self, request: TenantRequest, now: Timestamp) -> u64 {
        let TenantRequest { tenant, tier, units } = request;
        let slot = self.tenant(tenant, tier);
        let is_new = slot.age.load(Ordering::Relaxed) < NEW_INTERVALS;
        let sharing = self.slots.last().filter(|_| is_new).unwrap_or(slot);
        units - owe(&sharing.fair, self.tier(tier).fair_interval.load(Ordering::Relaxed), units, now)
    }
}

/// Takes tokens of a bucket that holds a theoretical arrival time in microseconds × 1024. Returns how many.
fn owe(bucket: &AtomicU64, interval: u64, units: u64, now: Timestamp) -> u64 {
    if interval == 0 {
        return 0;
    }
    let now = now.as_micros() << 10;
    let depth = (FAIR_DEPTH << 10).max(interval.saturating_mul(LEAST_UNITS));
    let covered = |tat: u64| {
        let left = now.saturating_add(depth.saturating_mul(2)).saturating_sub(tat.max(now));
        units.min(left / interval)
    };
    let next = |tat: u64| match covered(tat) {
        0 => None,
        owed => Some(tat.max(now) + owed * interval),
    };
    bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_or(0, covered)
}

#[cfg(test)]
mod tests {
    use super::super::{NO_TIER, Standing, TenantDemand};
    use super::*;

    const ONE: TenantRequest = TenantRequest { tenant: 1, tier: NO_TIER, units: 1 };

    /// What is owed is paid from the share, and no more than its depth is ever owed.
    #[test]
    fn a_share_in_debt_is_used_up_until_it_is_paid() {
        let (shares, mut demand) = (Shares::new(1, &[]), TenantDemand::new());
        let start = Timestamp::from_secs(1);
        (0..80).for_each(|_| {
            shares.take(ONE, start, true);
        });
        // More is asked for than there is, and 95 of 100 are shared out.
        shares.update(0.1, 100.0, &mut demand);
        let at = |millis: u64| Timestamp::from_micros(2_000_000 + millis * 1_000);
        while shares.take(ONE, at(0), true) != Standing::Excess {}
        let owed = (0..1_000).filter(|_| shares.debit(ONE, at(0)) == 0).count();
        assert!((40..=50).contains(&owed), "half a second of 95: {owed}");
        assert_eq!(shares.take(ONE, at(400), true), Standing::Excess, "in debt");
        assert_ne!(shares.take(ONE, at(600), true), Standing::Excess, "paid");
    }
}
