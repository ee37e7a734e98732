//! Tenants' shares of the fleet's capacity: by which standing a request charges it first, and by which one next.
//!
//! The standing is chosen before the charge, so that a request is one call to the store. While the capacity is not contended,
//! requests charge it as without fairness, from leased units where there are any. While it is, a request whose tenant has a
//! guarantee tries that first. Only a guess that was wrong costs a second call: the first denial of a contention, and a
//! guarantee that has just been used up, which is then left alone for a moment.

use crate::decide::Tried;
use crate::decision::DecisionDetails;
use crate::fold;
use crate::in_flight::{FleetPlace, FleetPlaces};
use crate::limiter::Limiter;
use arc_swap::ArcSwap;
use foldhash::SharedSeed;
use foldhash::fast::{RandomState, SeedableRandomState};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use tollgate_core::{Admission, CounterStore, Outcomes, PermitId, Priority, Timestamp};
use tollgate_overload::{
    FleetFairness, NO_TIER, NodePart, NodePlaces, TenantRequest, TierState, UsedUpMarks,
};
use tollgate_rules::{Charges, FleetCapacity, FleetMatch, FleetStanding, Plan, Ruleset, TierFairness};

/// Shares of one domain's fleet.
struct DomainFleet {
    tiers: Vec<TierFairness>,
    fairness: FleetFairness,
    /// Shares of what is reserved for each priority.
    reserves: [FleetFairness; 4],
    /// Requests that a guarantee admitted while the capacity was in use.
    taken_back: AtomicU64,
    /// Places that this node's requests hold, of a capacity in flight.
    places: Arc<FleetPlaces>,
}

type Domains = HashMap<Box<str>, Arc<DomainFleet>, RandomState>;

/// Seeds of the hashes of tenants and counters: a secret of the process. All its limiters have the same, so that those which are sent the
/// same requests (a preview, say) have the same collisions in their tables, and decide alike.
static SEEDS: LazyLock<(u64, SharedSeed)> = LazyLock::new(|| {
    let system = std::hash::RandomState::new();
    (system.hash_one(1_u8), SharedSeed::from_u64(system.hash_one(2_u8)))
});

/// Shares of the fleets of all domains; none if no rule asks for any.
pub(crate) struct FleetShares {
    domains: ArcSwap<Domains>,
    hasher: SeedableRandomState,
    /// Guarantees and reserves that were found used up a moment ago.
    pub(crate) marks: UsedUpMarks,
}

/// What this node has seen of the tenants of a fleet.
pub(crate) struct SharedFleet {
    /// Demand and fair shares of the tiers, the last of requests without one; empty while the capacity is not contended.
    pub(crate) tiers: Vec<TierState>,
    /// Number of requests that a guarantee admitted while the capacity was in use.
    pub(crate) taken_back: u64,
}

/// Which requests count as beyond their tenant's fair share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FleetRanking {
    /// Those that are, by the measured demand.
    ByDemand,
    /// None: the demand of tenants is not known.
    AllFair,
}

/// A request among the tenants of its domain.
struct FleetEntry {
    fleet: Arc<DomainFleet>,
    request: TenantRequest,
    now: Timestamp,
}

impl FleetShares {
    pub(crate) fn new(rules: &Ruleset) -> Self {
        let (seed, shared) = &*SEEDS;
        let hasher = SeedableRandomState::with_seed(*seed, shared);
        let shares = Self { domains: ArcSwap::default(), hasher, marks: UsedUpMarks::default() };
        shares.on_rules_changed(rules);
        shares
    }

    /// Adjusts to new rules: a domain with the same shares keeps what was measured.
    pub(crate) fn on_rules_changed(&self, rules: &Ruleset) {
        let known = self.domains.load();
        let mut domains = Domains::default();
        for domain in rules.domains() {
            let Some(overload) = domain.overload().filter(|own| own.fleet.is_some()) else { continue };
            let Some(fairness) = &overload.fairness else { continue };
            let known = known.get(domain.name());
            let same = known.filter(|known| known.tiers == fairness.tiers);
            let own = same.cloned().unwrap_or_else(|| {
                let shares: Vec<_> = fairness.tiers.iter().map(crate::workers::tier_share).collect();
                let key = |part: &str| self.hasher.hash_one((part, domain.name()));
                Arc::new(DomainFleet {
                    tiers: fairness.tiers.clone(),
                    fairness: FleetFairness::new(key("fleet"), &shares),
                    reserves: Priority::ALL.map(|above| FleetFairness::new(key(above.name()), &shares)),
                    taken_back: AtomicU64::new(0),
                    places: known.map_or_else(Default::default, |known| Arc::clone(&known.places)),
                })
            });
            domains.insert(domain.name().into(), own);
        }
        self.domains.store(Arc::new(domains));
    }

    fn entry(&self, plan: &Plan<'_>, now: Timestamp) -> Option<FleetEntry> {
        let own = plan.fleet.as_ref()?;
        let fleet = Arc::clone(self.domains.load().get(own.domain)?);
        let tier = own.tier.and_then(|at| u16::try_from(at).ok()).unwrap_or(NO_TIER);
        let tenant = self.hasher.hash_one(("tenant", own.tenant));
        Some(FleetEntry { fleet, request: TenantRequest { tenant, tier, units: plan.fleet_units() }, now })
    }

    /// Returns what this node has seen of the tenants that share a domain's capacity; `None` if none do.
    pub(crate) fn state(&self, domain: &str, now: Timestamp) -> Option<SharedFleet> {
        let domains = self.domains.load();
        let own = domains.get(domain)?;
        let taken_back = own.taken_back.load(Ordering::Relaxed);
        Some(SharedFleet { tiers: own.fairness.states(now), taken_back })
    }

    /// Returns whether tenants share no fleet's capacity.
    pub(crate) fn is_empty(&self) -> bool {
        self.domains.load().is_empty()
    }

    pub(crate) fn hash(&self, value: &impl Hash) -> u64 {
        self.hasher.hash_one(value)
    }

    /// Returns whether the counter of a guarantee or a reserve may admit the request: not if it was charged to it before, nor if that was
    /// found used up a moment ago.
    fn is_open(&self, own: &FleetMatch<'_>, standing: FleetStanding, now: Timestamp) -> bool {
        own.claim(standing).is_some() && own.is_untried(standing) && !self.is_used_up(now, own, standing)
    }
}

impl<S> Limiter<S> {
    /// Returns the places of a request that was admitted, among those that this node's requests hold of the capacity.
    pub(crate) fn fleet_place(&self, plan: &Plan<'_>) -> Option<FleetPlace> {
        let own = plan.fleet.as_ref()?;
        let fleet = Arc::clone(&self.fleet_shares.domains.load().get(own.domain)?.places);
        let reserve = own.holds_reserve().then_some(own.priority);
        Some(FleetPlace { fleet, reserve, units: plan.fleet_units() })
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Charges a request without waiting, as [`Limiter::try_charge`], whose tenant shares the fleet's capacity with others.
    #[inline(never)]
    pub(crate) fn try_charge_shared(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        has_grants: bool,
        details: &mut DecisionDetails,
    ) -> Tried {
        self.choose_fleet_standing(plan, permit, FleetRanking::ByDemand);
        // A capacity in shadow mode is charged apart from the rest.
        if self.pending.any_pending() || plan.is_fleet_shadow() || plan.refunded_claims().is_some() {
            return Tried::Declined;
        }
        let mut outcomes = Outcomes::default();
        {
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            if !self.store.try_charge(&charges, &mut outcomes) {
                return Tried::Declined;
            }
        }
        let is_denied = fold::is_denied(plan, &outcomes);
        let is_open = is_denied && (has_grants || plan.is_split);
        if is_open || self.next_fleet_standing(plan, permit, &outcomes).is_some() {
            return Tried::Denied(Box::new(outcomes));
        }
        plan.settle_fleet(&mut outcomes);
        fold::fold(plan, &outcomes, details);
        Tried::Decided
    }

    /// Chooses the standing by which a request charges the fleet's capacity.
    pub(crate) fn choose_fleet_standing(&self, plan: &mut Plan<'_>, permit: PermitId, ranking: FleetRanking) {
        if !plan.shares_fleet() {
            // One that gives back a guarantee or a reserve: the store says which.
            if plan.refunded_claims().is_none() {
                plan.fleet = None;
            }
            return;
        }
        let Some(entry) = self.fleet_shares.entry(plan, self.clock.now()) else {
            if !plan.is_fleet_shadow() {
                plan.fleet = None;
            }
            return;
        };
        let FleetEntry { fleet, request, now } = &entry;
        let is_pressed = fleet.fairness.is_pressed(*now);
        let part = || match (plan.fleet_capacity(), self.live_nodes()) {
            (Some(capacity), nodes @ 1..) => node_part(capacity, nodes, permit, || fleet.places.read()),
            _ => NodePart::Unknown,
        };
        let is_excess = match ranking {
            FleetRanking::ByDemand => is_pressed && fleet.fairness.is_excess(*now, *request, part),
            FleetRanking::AllFair => false,
        };
        if let Some(own) = &mut plan.fleet {
            (own.is_contended, own.is_excess) = (is_pressed, is_excess);
            if ranking == FleetRanking::AllFair {
                own.rank_in_reserve(false);
            }
        }
        self.charge_fleet_first_as(plan, permit, &entry);
    }

    /// Charges the capacity by the standing that is tried first.
    pub(crate) fn charge_fleet_first(&self, plan: &mut Plan<'_>, permit: PermitId) {
        if let Some(entry) = self.fleet_shares.entry(plan, self.clock.now()) {
            self.charge_fleet_first_as(plan, permit, &entry);
        }
    }

    fn charge_fleet_first_as(&self, plan: &mut Plan<'_>, permit: PermitId, entry: &FleetEntry) {
        // Guarantees of requests in flight are held from the first on: those that began in calm times count as well.
        let (is_in_flight, _) = plan.fleet_counts();
        let is_contended = plan.fleet.as_ref().is_some_and(|own| own.is_contended);
        let claim = if is_contended || is_in_flight { self.open_claim(plan, permit, entry) } else { None };
        let Some(standing) = claim.or_else(|| plan.fleet.as_ref().map(FleetMatch::base)) else { return };
        plan.charge_fleet_as(standing);
    }

    /// Returns the counter besides the capacity's that may admit the request: its guarantee, then what is reserved for its priority.
    fn open_claim(&self, plan: &mut Plan<'_>, permit: PermitId, entry: &FleetEntry) -> Option<FleetStanding> {
        let is_open = |own: Option<&FleetMatch<'_>>, standing| {
            own.is_some_and(|own| self.fleet_shares.is_open(own, standing, entry.now))
        };
        if is_open(plan.fleet.as_ref(), FleetStanding::Guaranteed) {
            return Some(FleetStanding::Guaranteed);
        }
        self.rank_in_reserve(plan, permit, entry);
        is_open(plan.fleet.as_ref(), FleetStanding::Reserved).then_some(FleetStanding::Reserved)
    }

    /// Counts a request among those that ask for what is reserved for its priority, if more is asked for than there is.
    fn rank_in_reserve(&self, plan: &mut Plan<'_>, permit: PermitId, entry: &FleetEntry) {
        let Some(own) = plan.fleet.as_mut().filter(|own| own.is_contended) else { return };
        let (at, now) = (own.priority.index(), entry.now);
        let reserve = &entry.fleet.reserves[at];
        if !reserve.is_pressed(now) || own.is_ranked_in_reserve() {
            return;
        }
        let Some(capacity) = own.reserved_capacity() else { return };
        let part = || match (capacity, self.live_nodes()) {
            // What it gets of it is what it gives.
            (FleetCapacity::InFlight { .. }, 1) => NodePart::Whole,
            (FleetCapacity::InFlight { .. }, 0) => NodePart::Unknown,
            (_, nodes) => node_part(capacity, nodes.max(1), permit, || entry.fleet.places.read_reserve(at)),
        };
        own.rank_in_reserve(reserve.is_excess(now, entry.request, part));
    }

    /// Records what the store said of the fleet's capacity. Returns the standing by which the request is to be tried again, if it
    /// may still be admitted.
    pub(crate) fn next_fleet_standing(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        outcomes: &Outcomes,
    ) -> Option<FleetStanding> {
        let own = plan.fleet.as_ref()?;
        let is_calm = own.standing == FleetStanding::Fair && !own.is_contended;
        if is_calm && !outcomes.per_charge.iter().any(|outcome| outcome.verdict.is_denied()) {
            return None;
        }
        let entry = self.fleet_shares.entry(plan, self.clock.now())?;
        let FleetEntry { fleet, request, now } = &entry;
        let claim = plan.limits.len() - usize::from(plan.is_claim_charged());
        let denies = |at: usize| outcomes.per_charge.get(at).is_some_and(|one| one.verdict.is_denied());
        let is_full = (0..claim).any(|at| own.is_fleet(&plan.limits[at]) && denies(at));
        let is_used_up = claim < plan.limits.len() && denies(claim);
        if is_used_up {
            self.fleet_shares.mark_used_up(*now, own);
        }
        let reserve = &fleet.reserves[own.priority.index()];
        let is_reserved = own.standing == FleetStanding::Reserved;
        if is_reserved && (is_used_up || is_full) {
            reserve.press(*now);
        }
        let takes_back = own.standing.is_claim() && !is_full && plan.exceeds_fleet(outcomes);
        if is_full || takes_back {
            fleet.fairness.press(*now);
        }
        if !fold::is_denied(plan, outcomes) {
            if fleet.fairness.is_pressed(*now) {
                match own.standing.is_claim() {
                    true => fleet.fairness.count_guaranteed(*now, *request, own.is_excess),
                    false => fleet.fairness.count_admitted(request.units),
                }
            }
            if is_reserved && reserve.is_pressed(*now) {
                match own.is_beyond_reserve() {
                    true => reserve.count_excess(*now, *request),
                    false => reserve.count_admitted(request.units),
                }
            }
            if takes_back && own.standing == FleetStanding::Guaranteed {
                fleet.taken_back.fetch_add(1, Ordering::Relaxed);
            }
            return None;
        }
        // Another limit denies it whatever its standing.
        let others = plan.limits.iter().zip(&outcomes.per_charge).filter(|(one, _)| !own.is_fleet(one));
        let others = others.map(|(one, outcome)| (one.enforcement, outcome));
        if Outcomes::admission(others) == Admission::Denied {
            return None;
        }
        let base = Some(own.base()).filter(|base| is_used_up && own.is_untried(*base));
        match own.standing {
            FleetStanding::Fair | FleetStanding::Excess if !is_full => None,
            // Where it finds no room in the capacity, no other standing does.
            FleetStanding::Reserved if !is_used_up => None,
            _ => self.open_claim(plan, permit, &entry).or(base),
        }
    }
}

/// Returns a node's part of a capacity, if all nodes had the same. `held` returns the places of it that the node's requests hold, and
/// how many ever have.
fn node_part(
    capacity: FleetCapacity,
    nodes: u32,
    permit: PermitId,
    held: impl FnOnce() -> (u64, u64),
) -> NodePart {
    match capacity {
        FleetCapacity::PerSecond(rate) => NodePart::Rate(rate / f64::from(nodes)),
        FleetCapacity::InFlight { places, ttl } => {
            // Permits without a holder are not released.
            let held = match permit == PermitId::ANONYMOUS {
                true => NodePlaces::Lasting(ttl.as_micros() as f64 / 1e6),
                false => {
                    let (now, begun) = held();
                    NodePlaces::Reported { now, begun }
                }
            };
            NodePart::InFlight { places: places / f64::from(nodes), held }
        }
    }
}
