//! Units that time refills while they wait to be charged.
//!
//! What this node admitted while the store was unavailable is charged to the shared counters afterwards, all of it, which errs toward enforcing
//! a caller's limit. The fleet's capacity is not a caller's limit: charged with an hour's requests it would shed an idle service for an hour. Of
//! such a counter only what its rate has not refilled meanwhile is charged, by this node's part of the rate.

use tollgate_core::{Algorithm, Charge, Timestamp};

/// How charged units are refilled: a bucket of their own, which holds the time at which all are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refill {
    /// Time in which one unit is refilled, in nanoseconds.
    interval: u64,
    /// When the units were charged, and when all of them will have been refilled, in nanoseconds.
    since: u64,
    full_at: u64,
}

const fn nanos(time: Timestamp) -> u64 {
    time.as_micros().saturating_mul(1_000)
}

impl Refill {
    /// Begins to refill what is charged now, of a limit that this many nodes share. `None` if time does not refill it.
    pub(crate) fn new(charge: &Charge<'_>, nodes: u32, now: Timestamp) -> Option<Self> {
        if charge.limit.algorithm() == Algorithm::Concurrency {
            return None;
        }
        let rate = charge.limit.rate();
        let period = u128::from(rate.period.length().as_micros()) * 1_000 * u128::from(nodes.max(1));
        let interval = u64::try_from(period / u128::from(rate.count.max(1))).unwrap_or(u64::MAX).max(1);
        let since = nanos(now);
        let lasts = interval.saturating_mul(charge.cost.units());
        Some(Self { interval, since, full_at: since.saturating_add(lasts) })
    }

    /// Adds units that were charged to the same counter.
    pub(crate) fn add(&mut self, other: &Self) {
        let lasts = other.full_at - other.since;
        self.full_at = self.full_at.max(other.since).saturating_add(lasts);
        self.interval = other.interval;
    }

    /// Takes units back.
    pub(crate) const fn take_back(&mut self, units: u64) {
        self.full_at = self.full_at.saturating_sub(self.interval.saturating_mul(units));
    }

    /// Returns the units that have not been refilled, with one that is being refilled.
    pub(crate) const fn left(&self, now: Timestamp) -> u64 {
        self.full_at.saturating_sub(nanos(now)).div_ceil(self.interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tollgate_core::{Cost, CounterKey, LimitSpec, Rate, Scope, TimeDelta};

    proptest! {
        /// What is left to charge is what a bucket of the same rate would hold.
        #[test]
        fn units_are_refilled_at_the_nodes_part_of_the_rate(
            count in 1_u64..1_000,
            seconds in 1_u64..100,
            nodes in 1_u32..10,
            charges in prop::collection::vec((1_u64..20, 0_u64..5_000), 1..60),
        ) {
            let rate = Rate::per(count, TimeDelta::from_secs(seconds));
            let limit = LimitSpec::new(Algorithm::Gcra, rate).build().expect("a limit");
            let scope = Scope::new("s");
            let per_milli = count as f64 / (seconds as f64 * 1e3 * f64::from(nodes));
            let (mut refill, mut level, mut now) = (None::<Refill>, 0.0_f64, Timestamp::from_secs(1_000));
            for (units, pause) in charges {
                let charge = Charge::new(CounterKey { scope: &scope, parts: &[] }, &limit, Cost::new(units));
                let own = Refill::new(&charge, nodes, now).expect("a rate");
                level += units as f64;
                match &mut refill {
                    Some(refill) => refill.add(&own),
                    None => refill = Some(own),
                }
                now = now + TimeDelta::from_millis(pause);
                level = (level - per_milli * pause as f64).max(0.0);
                let left = refill.map_or(0, |refill| refill.left(now)) as f64;
                prop_assert!((left - level).abs() <= 1.0 + level * 1e-3, "{} left, {} by the bucket", left, level);
            }
        }
    }
}
