//! Debt of a fair share: what a tenant got by another right than its fair share, it has less of that.
//!
//! A tenant beyond its fair share that is served within a guarantee has the larger of both, not the sum. Its bucket goes into debt of at most
//! its depth, so that a guarantee that is used for hours is not held against the tenant for hours.

use super::{FAIR_DEPTH, LEAST_UNITS, NEW_INTERVALS, Shares, TierIndex};
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::Timestamp;

impl Shares {
    /// Takes a token from the bucket of a tenant's fair share although there is none. Returns whether the share covers it sooner or later:
    /// not if the debt is as large as it may be.
    pub(crate) fn debit(&self, tenant: u64, tier: TierIndex, now: Timestamp) -> bool {
        let slot = self.tenant(tenant, tier);
        let is_new = slot.age.load(Ordering::Relaxed) < NEW_INTERVALS;
        let sharing = self.slots.last().filter(|_| is_new).unwrap_or(slot);
        owe(&sharing.fair, self.tier(tier).fair_interval.load(Ordering::Relaxed), now)
    }
}

/// Takes a token of a bucket that holds a theoretical arrival time in microseconds × 1024.
fn owe(bucket: &AtomicU64, interval: u64, now: Timestamp) -> bool {
    if interval == 0 {
        return false;
    }
    let now = now.as_micros() << 10;
    let depth = (FAIR_DEPTH << 10).max(interval.saturating_mul(LEAST_UNITS));
    let next = |tat: u64| {
        let next = tat.max(now).checked_add(interval)?;
        (next - now <= depth.saturating_mul(2)).then_some(next)
    };
    bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::{NO_TIER, Standing, TenantDemand};
    use super::*;

    /// What is owed is paid from the share, and no more than its depth is ever owed.
    #[test]
    fn a_share_in_debt_is_used_up_until_it_is_paid() {
        let (shares, mut demand) = (Shares::new(1, &[]), TenantDemand::new());
        let start = Timestamp::from_secs(1);
        (0..80).for_each(|_| {
            shares.take(1, NO_TIER, start, true);
        });
        // More is asked for than there is, and 95 of 100 are shared out.
        shares.update(0.1, 100.0, &mut demand);
        let at = |millis: u64| Timestamp::from_micros(2_000_000 + millis * 1_000);
        while shares.take(1, NO_TIER, at(0), true) != Standing::Excess {}
        let owed = (0..1_000).filter(|_| shares.debit(1, NO_TIER, at(0))).count();
        assert!((40..=50).contains(&owed), "half a second of 95: {owed}");
        assert_eq!(shares.take(1, NO_TIER, at(400), true), Standing::Excess, "in debt");
        assert_ne!(shares.take(1, NO_TIER, at(600), true), Standing::Excess, "paid");
    }
}
