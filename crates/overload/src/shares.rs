//! Fair shares: guarantees of tenants, and what is left by weighted max–min.
//!
//! A guarantee is a share of what the upstream completes, as a token bucket: a request that finds a token is within the
//! guarantee and is not shed. Nothing is set aside. What a tenant does not use, others do, and the owner has it back with
//! its next request, because its bucket has filled meanwhile.
//!
//! What is left goes by the water level: the rate up to which every tenant's demand is served if the sum is to be nearly
//! the upstream's throughput. A second bucket fills at that level. A request that finds it empty is beyond the fair share and
//! takes a place in the second half of its priority, behind all requests that are within theirs. A tenant that asks for less
//! than its share keeps its bucket at least half full, and goes before those that ask for more: what a queue loses is lost by
//! tenants that keep theirs empty.
//!
//! A stranger who takes a new name for each request must not have a fresh share each time. Tenants that have just been seen for
//! the first time share the entry of those that find no other; those with which the load began have entries at once.
//!
//! Tenants are kept in a table of fixed size by a keyed hash. Those that find it full share one entry, weight and guarantee
//! included, unless they have a guarantee of their own and others do not; an entry is free again after
//! [`IDLE_INTERVALS`] without a request.

mod debt;

use crate::cohort::mix;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use tollgate_core::Timestamp;

const SLOTS: usize = 2048;
const PROBES: usize = 8;
/// Control intervals after which an entry without requests is free.
const IDLE_INTERVALS: u32 = 100;
/// Most that a request of many units takes ahead of a share beyond its bucket, in microseconds of its rate: what it asks for may not be granted.
const MOST_AHEAD: u64 = 10_000_000;
/// Depth of a tenant's bucket, of a tier's common one and of the fair share's, in microseconds of their rates, and in units at least.
const GUARANTEE_DEPTH: u64 = 4_000_000;
const POOL_DEPTH: u64 = 500_000;
const FAIR_DEPTH: u64 = 500_000;
const LEAST_UNITS: u64 = 4;
/// A level that no demand reaches.
const UNBOUNDED: f64 = u32::MAX as f64;
/// Part of the throughput that fair shares distribute: the rest keeps the queue of what is within them short.
pub(crate) const DISTRIBUTED: f64 = 0.95;
/// Part of its bucket from which on a tenant is well within its share.
const AMPLE: f64 = 0.5;
/// Control intervals for which a new tenant shares an entry's bucket and demand with others.
const NEW_INTERVALS: u32 = 10;
/// Control intervals in which tenants are not new because none was known before.
const FIRST_INTERVALS: u32 = 5;
/// Time constant of a tenant's demand, in seconds.
const DEMAND_MEMORY: f64 = 0.4;

/// Who a guarantee is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuaranteeScope {
    /// Every tenant of the tier has it.
    Each,
    /// All tenants of the tier have it together.
    Together,
}

/// Share of a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierShare {
    /// Guaranteed part of the capacity, 0 to 1.
    pub guarantee: f64,
    /// Who the guarantee is for.
    pub scope: GuaranteeScope,
    /// Weight in sharing what is left.
    pub weight: f64,
}

/// A request of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantRequest {
    /// Hash of the tenant.
    pub tenant: u64,
    /// Its tier.
    pub tier: TierIndex,
    /// What it costs; shares are counted in these.
    pub units: u64,
}

/// What a tier's tenants ask for and have, in units: an upstream counts requests, a fleet's capacity what they cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierState {
    /// Tenants that sent requests of late.
    pub tenants: u32,
    /// Their units per second.
    pub demand: f64,
    /// Units per second that are guaranteed: to each tenant, or to all together, as the share says.
    pub guarantee: f64,
    /// Units per second of one tenant up to which it is within its fair share; `None` if all demand fits.
    pub fair: Option<f64>,
}

/// Index of the tier of a request among the configured ones.
pub type TierIndex = u16;
/// A request without a configured tier.
pub const NO_TIER: TierIndex = TierIndex::MAX;

#[derive(Debug, Default)]
struct Tenant {
    hash: AtomicU64,
    /// Units that were asked for in this interval.
    arrivals: AtomicU64,
    idle: AtomicU32,
    /// Control intervals since it was first seen.
    age: AtomicU32,
    tier: AtomicU16,
    guarantee: AtomicU64,
    fair: AtomicU64,
}

#[derive(Debug)]
struct Tier {
    share: TierShare,
    /// Microseconds × 1024 per guaranteed request; 0 if nothing is guaranteed.
    interval: AtomicU64,
    /// Of the fair share.
    fair_interval: AtomicU64,
    together: AtomicU64,
}

/// Where a request stands among the tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Guaranteed,
    /// Within the fair share, of which much is left.
    Ample,
    Fair,
    Excess,
}

/// Shares of all tenants.
#[derive(Debug)]
pub(crate) struct Shares {
    key: u64,
    /// The last slot is for the tenants that find no other.
    slots: Box<[Tenant]>,
    /// The last tier is that of requests without one.
    tiers: Box<[Tier]>,
    /// Control intervals for which there have been tenants.
    active: AtomicU32,
}

/// Demand of the tenants, which the control step keeps between intervals.
#[derive(Debug)]
pub(crate) struct TenantDemand(Vec<f64>);

impl TenantDemand {
    pub(crate) fn new() -> Self {
        Self(vec![0.0; SLOTS + 1])
    }

    /// Returns the number of tenants that ask for anything; those that are not told apart are one.
    pub(crate) fn tenants(&self) -> usize {
        self.0.iter().filter(|rate| **rate > 0.0).count()
    }
}

impl Shares {
    pub(crate) fn new(key: u64, tiers: &[TierShare]) -> Self {
        let rest = TierShare { guarantee: 0.0, scope: GuaranteeScope::Together, weight: 1.0 };
        let tier = |share: &TierShare| Tier {
            share: *share,
            interval: AtomicU64::new(0),
            fair_interval: AtomicU64::new(0),
            together: AtomicU64::new(0),
        };
        Self {
            key,
            slots: (0..=SLOTS).map(|_| Tenant::default()).collect(),
            tiers: tiers.iter().chain([&rest]).map(tier).collect(),
            active: AtomicU32::new(0),
        }
    }

    fn tier(&self, at: TierIndex) -> &Tier {
        let rest = self.tiers.len() - 1;
        &self.tiers[usize::from(at).min(rest)]
    }

    /// Returns whether every tenant of a tier has a guarantee of its own.
    fn has_own_guarantee(&self, tier: TierIndex) -> bool {
        let share = self.tier(tier).share;
        share.scope == GuaranteeScope::Each && share.guarantee > 0.0
    }

    fn keyed(&self, hash: u64) -> u64 {
        mix(hash ^ self.key).max(1)
    }

    fn probed(&self, hash: u64) -> impl Iterator<Item = &Tenant> {
        (0..PROBES).map(move |probe| &self.slots[(hash as usize).wrapping_add(probe) % SLOTS])
    }

    fn known(&self, hash: u64) -> Option<&Tenant> {
        self.probed(hash).find(|slot| slot.hash.load(Ordering::Relaxed) == hash)
    }

    /// Returns a tenant's entry: its own, else a free one, else for a tenant with a guarantee of its own that of one
    /// without, so that new keys cannot displace tenants with a guarantee.
    fn tenant(&self, hash: u64, tier: TierIndex) -> &Tenant {
        let hash = self.keyed(hash);
        if let Some(own) = self.known(hash) {
            return own;
        }
        let probed = || self.probed(hash);
        let claim = |slot: &&Tenant, from: u64| match slot.hash.compare_exchange(
            from,
            hash,
            Ordering::Relaxed,
            Ordering::Relaxed,
        ) {
            Ok(_) => {
                slot.tier.store(tier, Ordering::Relaxed);
                slot.guarantee.store(0, Ordering::Relaxed);
                slot.fair.store(0, Ordering::Relaxed);
                let is_first = self.active.load(Ordering::Relaxed) < FIRST_INTERVALS;
                slot.age.store(if is_first { NEW_INTERVALS } else { 0 }, Ordering::Relaxed);
                true
            }
            Err(other) => other == hash,
        };
        let is_free = |slot: &&Tenant| slot.hash.load(Ordering::Relaxed) == 0;
        if let Some(free) = probed().filter(is_free).find(|slot| claim(slot, 0)) {
            return free;
        }
        if self.has_own_guarantee(tier) {
            let is_weaker = |slot: &&Tenant| !self.has_own_guarantee(slot.tier.load(Ordering::Relaxed));
            let taken = |slot: &&Tenant| claim(slot, slot.hash.load(Ordering::Relaxed));
            if let Some(taken) = probed().filter(is_weaker).find(taken) {
                return taken;
            }
        }
        &self.slots[SLOTS]
    }

    /// Counts a request of a tenant, and takes from its buckets: from the fair share's only if the request's priority is
    /// not shed as a whole.
    pub(crate) fn take(&self, request: TenantRequest, now: Timestamp, may_pass: bool) -> Standing {
        let TenantRequest { tenant, tier, units } = request;
        let (slot, own) = (self.tenant(tenant, tier), self.tier(tier));
        slot.arrivals.fetch_add(units, Ordering::Relaxed);
        let is_new = slot.age.load(Ordering::Relaxed) < NEW_INTERVALS;
        let sharing = if is_new { &self.slots[SLOTS] } else { slot };
        for entry in [slot, sharing] {
            if entry.tier.load(Ordering::Relaxed) != tier {
                entry.tier.store(tier, Ordering::Relaxed);
            }
        }
        let (bucket, depth) = match own.share.scope {
            GuaranteeScope::Each => (&slot.guarantee, GUARANTEE_DEPTH),
            GuaranteeScope::Together => (&own.together, POOL_DEPTH),
        };
        let left = match may_pass {
            true => take(&sharing.fair, own.fair_interval.load(Ordering::Relaxed), FAIR_DEPTH, units, now),
            false => None,
        };
        match (take(bucket, own.interval.load(Ordering::Relaxed), depth, units, now), left) {
            (Some(_), _) => Standing::Guaranteed,
            (None, Some(left)) if left >= AMPLE => Standing::Ample,
            (None, Some(_)) => Standing::Fair,
            (None, None) => Standing::Excess,
        }
    }

    /// Ends a control interval: sets the rates of the buckets for this throughput.
    pub(crate) fn update(&self, length: f64, throughput: f64, demand: &mut TenantDemand) {
        let weight = 1.0 - (-length / DEMAND_MEMORY).exp();
        let mut tenants: Vec<(f64, f64)> = Vec::new();
        let mut together = 0.0;
        for (slot, rate) in self.slots.iter().zip(&mut demand.0) {
            if slot.hash.load(Ordering::Relaxed) == 0
                && *rate == 0.0
                && slot.arrivals.load(Ordering::Relaxed) == 0
            {
                continue;
            }
            let arrived = slot.arrivals.swap(0, Ordering::Relaxed);
            *rate += weight * (arrived as f64 / length - *rate);
            if arrived > 0 {
                slot.idle.store(0, Ordering::Relaxed);
            } else if slot.idle.fetch_add(1, Ordering::Relaxed) >= IDLE_INTERVALS {
                *rate = 0.0;
                slot.hash.store(0, Ordering::Relaxed);
                slot.idle.store(0, Ordering::Relaxed);
                continue;
            }
            let is_common = slot.hash.load(Ordering::Relaxed) == 0;
            if is_common || slot.age.fetch_add(1, Ordering::Relaxed) < NEW_INTERVALS {
                together += *rate;
            } else {
                tenants.push((*rate, self.tier(slot.tier.load(Ordering::Relaxed)).share.weight));
            }
        }
        let common = &self.slots[SLOTS];
        if together > 0.0 {
            tenants.push((together, self.tier(common.tier.load(Ordering::Relaxed)).share.weight));
        }
        let active =
            if tenants.is_empty() { 0 } else { self.active.load(Ordering::Relaxed).saturating_add(1) };
        self.active.store(active, Ordering::Relaxed);
        let level = water_level(&mut tenants, throughput * DISTRIBUTED);
        for tier in &self.tiers {
            tier.interval.store(interval(tier.share.guarantee * throughput), Ordering::Relaxed);
            tier.fair_interval.store(interval(level * tier.share.weight), Ordering::Relaxed);
        }
    }

    /// Gives every tenant as much as it asks for, until the next update.
    pub(crate) fn share_without_bound(&self) {
        for tier in &self.tiers {
            tier.fair_interval.store(interval(UNBOUNDED), Ordering::Relaxed);
        }
    }

    /// Returns the state of each tier at this throughput; the last is that of requests without one.
    pub(crate) fn states(&self, demand: &TenantDemand, throughput: f64) -> Vec<TierState> {
        let state = |tier: &Tier| TierState {
            guarantee: tier.share.guarantee * throughput,
            fair: match tier.fair_interval.load(Ordering::Relaxed) {
                0 | 1 => None,
                interval => Some(1.024e9 / interval as f64),
            },
            ..TierState::default()
        };
        let mut states: Vec<TierState> = self.tiers.iter().map(state).collect();
        let rest = states.len() - 1;
        for (slot, rate) in self.slots.iter().zip(&demand.0).filter(|(_, rate)| **rate > 0.0) {
            let own = &mut states[usize::from(slot.tier.load(Ordering::Relaxed)).min(rest)];
            own.tenants += 1;
            own.demand += rate;
        }
        states
    }
}

/// Returns microseconds × 1024 between units at this rate; 0 for none, so at least 1 for any rate.
fn interval(rate: f64) -> u64 {
    if rate < 1e-3 { 0 } else { ((1.024e9 / rate) as u64).max(1) }
}

/// Takes tokens of a bucket that holds a theoretical arrival time in microseconds × 1024, for a request of so many units. Returns the part of
/// the bucket that is left. A request of several units needs one of them there, and takes the others ahead, so that a share below what one
/// request costs still lets some pass.
fn take(bucket: &AtomicU64, interval: u64, depth: u64, units: u64, now: Timestamp) -> Option<f64> {
    if interval == 0 {
        return None;
    }
    let now = now.as_micros() << 10;
    let depth = (depth << 10).max(interval.saturating_mul(LEAST_UNITS));
    let most = now.checked_add(depth)?.checked_add(MOST_AHEAD << 10)?;
    let next = |tat: u64| {
        let first = tat.max(now).checked_add(interval)?;
        let next = first.saturating_add(interval.saturating_mul(units.saturating_sub(1))).min(most);
        (first - now <= depth).then_some(next)
    };
    let before = bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
    next(before).map(|next| 1.0 - (next - now) as f64 / depth as f64)
}

/// Returns the level per unit of weight up to which the demands (rate, weight) add up to `capacity`; infinite if all do.
fn water_level(tenants: &mut [(f64, f64)], capacity: f64) -> f64 {
    let by_level = |(rate, weight): &(f64, f64)| rate / weight;
    tenants.sort_unstable_by(|a, b| by_level(a).total_cmp(&by_level(b)));
    let mut left = capacity;
    let mut weights: f64 = tenants.iter().map(|(_, weight)| weight).sum();
    for (rate, weight) in tenants.iter() {
        if rate / weight * weights > left {
            return left / weights;
        }
        left -= rate;
        weights -= weight;
    }
    UNBOUNDED
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(tenant: u64, tier: TierIndex) -> TenantRequest {
        TenantRequest { tenant, tier, units: 1 }
    }

    #[test]
    fn while_all_demand_fits_no_caller_is_beyond_its_share() {
        let (shares, mut demand) = (Shares::new(1, &[]), TenantDemand::new());
        let now = Timestamp::from_secs(1);
        (0..10).for_each(|tenant| {
            shares.take(one(tenant, NO_TIER), now, true);
        });
        shares.update(0.1, 1_000.0, &mut demand);
        let standings: Vec<_> = (0..10).map(|tenant| shares.take(one(tenant, NO_TIER), now, true)).collect();
        assert_eq!(standings, [Standing::Ample; 10]);
    }

    #[test]
    fn new_keys_that_fill_the_table_take_no_guarantee() {
        let tiers = [TierShare { guarantee: 0.01, scope: GuaranteeScope::Each, weight: 1.0 }];
        let (shares, mut demand) = (Shares::new(3, &tiers), TenantDemand::new());
        let now = Timestamp::from_secs(1);
        (0..50_000).for_each(|new_key| {
            shares.take(one(new_key, NO_TIER), now, true);
        });
        shares.update(0.1, 100.0, &mut demand);
        let standings: Vec<_> = (0..60).map(|own| shares.take(one(1 << 32 | own, 0), now, true)).collect();
        assert_eq!(standings, [Standing::Guaranteed; 60]);
    }

    /// Sends one request of each of 20 tenants and 40 requests with new names in every tenth of a second.
    #[test]
    fn new_names_take_no_share_of_tenants_that_are_known() {
        let (shares, mut demand) = (Shares::new(5, &[]), TenantDemand::new());
        let mut standings = Vec::new();
        for step in 0..100u64 {
            let now = Timestamp::from_micros(1_000_000 + step * 100_000);
            let names = if step < 20 { 0 } else { 40 };
            let fresh =
                (0..names).map(|name| shares.take(one(1 << 32 | step << 16 | name, NO_TIER), now, true));
            let fair = fresh.filter(|standing| *standing != Standing::Excess).count();
            let known: Vec<_> = (0..20).map(|tenant| shares.take(one(tenant, NO_TIER), now, true)).collect();
            shares.update(0.1, 400.0, &mut demand);
            standings.push((step, fair, known));
        }
        for (step, fair, known) in standings.into_iter().filter(|(step, ..)| *step > 30) {
            assert_eq!(known, [Standing::Ample; 20], "at {step}");
            assert!(fair < 30, "{fair} of 40 new names are within a fair share at {step}");
        }
    }

    proptest! {
        #[test]
        fn the_water_level_is_max_min(
            mut tenants in prop::collection::vec((0.1f64..1000.0, 0.1f64..10.0), 1..60),
            capacity in 1.0f64..5000.0,
        ) {
            let total: f64 = tenants.iter().map(|(rate, _)| rate).sum();
            let level = water_level(&mut tenants, capacity);
            let served: f64 = tenants.iter().map(|(rate, weight)| rate.min(level * weight)).sum();
            // All that fits is served, no more; no caller below the level goes short.
            prop_assert!((served - total.min(capacity)).abs() < 1e-6 * total, "{served} of {total}, {capacity}");
        }

        #[test]
        fn a_guarantee_is_kept_whatever_the_others_send(others in 1u64..400, seed: u64) {
            let tiers = [TierShare { guarantee: 0.05, scope: GuaranteeScope::Each, weight: 1.0 }];
            let (shares, mut demand) = (Shares::new(seed, &tiers), TenantDemand::new());
            let mut guaranteed = 0;
            for step in 0..200u64 {
                shares.update(0.1, 100.0, &mut demand);
                let now = Timestamp::from_micros(1 + step * 100_000);
                (0..others).for_each(|other| { shares.take(one(seed ^ (other + 2), NO_TIER), now, true); });
                // Half of its five a second.
                if step % 4 == 0 && shares.take(one(seed ^ 1, 0), now, true) == Standing::Guaranteed {
                    guaranteed += 1;
                }
            }
            prop_assert_eq!(guaranteed, 50);
        }
    }
}
