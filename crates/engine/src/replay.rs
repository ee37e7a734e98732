//! Replay of a sampled request that represents many, for impact previews, on separate counters.
//!
//! A path of its own beside [`Limiter::check`], because it changes what a plan charges (weights, nodes, no permits, whole counters
//! in place of shards), never waits, and is neither observed nor billed: as parameters of the path of requests, each of these would
//! cost every request something. What both decide by is shared: the plan, uncharged requests, the standings in the fleet's
//! capacity, and the fold. A differential test holds the decisions equal. Left out are grants, emergency measures and the
//! global shadow mode: a preview is about rules.

use crate::check::Check;
use crate::decide::{decide_uncharged, plan_into};
use crate::decision::{DecidedBy, Decision};
use crate::decision_body::Contents;
use crate::decision_id::DrawnId;
use crate::fleet_fairness::FleetRanking;
use crate::fold;
use crate::limiter::Limiter;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::atomic::Ordering;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterStore, Enforcement, KeyPart, Mode, Outcome, Outcomes, PermitId,
};
use tollgate_rules::{Charges, LimitOrigin, Plan, RuleLimit};

/// The counters that each node has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterSharing {
    /// Only those of rules with `mode: local`; all others are in a store that nodes share.
    Shared,
    /// All counters.
    PerNode,
}

/// Number of requests that one sample represents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleWeight {
    /// Requests of the same caller: the factor for limits with per-caller counters.
    pub per_caller: u64,
    /// Requests of all callers: the factor for limits that all callers share.
    pub shared: u64,
    /// Number of the node that received the request: counters that each node has for itself are separated by it.
    pub node: u32,
    /// The counters that each node has for itself.
    pub sharing: CounterSharing,
}

impl SampleWeight {
    /// Weight of a sample that represents only itself.
    pub const ONE: Self = Self { per_caller: 1, shared: 1, node: 0, sharing: CounterSharing::Shared };
}

impl<S: CounterStore> Limiter<S> {
    /// Decides as [`Limiter::check`] does, at the cost of the requests that this sample represents, and without
    /// permits, because it is not known how long a request would have held one. Observers are not called. Returns
    /// `None` if the store must be awaited.
    pub fn replay(&self, check: &Check<'_>, weight: SampleWeight) -> Option<Decision> {
        let mut decision = self.begin(DrawnId::draw());
        let permit = PermitId(decision.id().0);
        let Contents { details, rules, quotas, .. } = &mut *decision.body;
        *quotas = self.quota_for(check, rules).quotas;
        let mut plan = Plan::default();
        let is_known = plan_into(rules, quotas, check, &mut plan);
        if self.adaptations.any_active() {
            self.scale_adapted(check, rules, &mut plan, details);
        }
        if !is_known && self.denies_unknown.load(Ordering::Relaxed) {
            details.deny_uncharged(DecidedBy::UnknownDomain);
        }
        if plan.limits.is_empty() || plan.malformed_cost.is_some() {
            decide_uncharged(&plan, details);
        } else {
            fold::descriptors(&plan, details);
            weigh(&mut plan, weight);
            if !plan.limits.is_empty() {
                let outcomes = self.charge_replayed(&mut plan, permit, weight)?;
                fold::fold(&plan, &outcomes, details);
            }
        }
        drop(plan);
        Some(decision)
    }

    /// Charges a plan whose costs are those of the requests that its sample represents. Tenants share the fleet's capacity by their
    /// guarantees, and if the sample is one request by their fair shares; else how much each of them sends is not known.
    fn charge_replayed(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        weight: SampleWeight,
    ) -> Option<Outcomes> {
        if plan.is_fleet_shadow() {
            plan.fleet = None;
        }
        let is_one = (weight.per_caller, weight.shared) == (1, 1);
        let ranking = if is_one { FleetRanking::ByDemand } else { FleetRanking::AllFair };
        self.choose_fleet_standing(plan, permit, ranking);
        self.try_fleet_standings(plan, permit, |plan, before| {
            weigh_claim(plan, weight);
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            // Independent charges are made by the first attempt.
            let is_open =
                |at: &usize| before.is_none() || charges[*at].enforcement != Enforcement::Independent;
            let open: SmallVec<[usize; 8]> = (0..charges.len()).filter(is_open).collect();
            let list: SmallVec<[Charge<'_>; 8]> = open.iter().map(|at| charges[*at]).collect();
            let mut charged = Outcomes::default();
            if !self.store.try_charge(&list, &mut charged) {
                return None;
            }
            let mut outcomes = Outcomes { per_charge: SmallVec::new(), ..charged };
            outcomes.per_charge.extend(before.iter().flat_map(|before| before.per_charge.iter().copied()));
            outcomes.per_charge.resize(charges.len(), Outcome::UNKNOWN);
            for (at, outcome) in open.into_iter().zip(charged.per_charge) {
                outcomes.per_charge[at] = outcome;
            }
            Some(outcomes)
        })
    }
}

/// Makes the charges those of the requests that a sample represents.
fn weigh(plan: &mut Plan<'_>, weight: SampleWeight) {
    plan.limits.retain(|matched| matched.limit.limit.algorithm() != Algorithm::Concurrency);
    for matched in &mut plan.limits {
        let shared = matched.rule.is_some_and(|rule| rule.shared_by_callers);
        matched.cost = scale_cost(matched.cost, if shared { weight.shared } else { weight.per_caller });
    }
    join_shards(plan);
    if weight.node > 0 {
        let limits = 0..plan.limits.len();
        split_by_node(plan, weight, limits);
    }
}

/// Gives each split counter's limit one counter for the whole. Checks find the shard that has room; the requests that a sample
/// represents would be charged to all shards, and none of these could hold the sample.
fn join_shards(plan: &mut Plan<'_>) {
    for at in 0..plan.limits.len() {
        if plan.limits[at].limit.shards.is_some() {
            plan.move_to_shard(at, 0);
            let whole = RuleLimit { shards: None, ..RuleLimit::clone(&plan.limits[at].limit) };
            plan.limits[at].limit = LimitOrigin::Inline(Box::new(whole));
        }
    }
    plan.is_split = false;
}

/// Charges a guarantee, which is the last limit of the plan, for the requests that a sample represents, on the counter of its node.
fn weigh_claim(plan: &mut Plan<'_>, weight: SampleWeight) {
    let Some(own) = plan.fleet.filter(|_| plan.is_claim_charged()) else { return };
    let claim = plan.limits.len() - 1;
    if own.is_claim_per_caller(own.standing) {
        plan.limits[claim].cost = Cost::new(weight.per_caller);
    }
    if weight.node > 0 {
        split_by_node(plan, weight, claim..claim + 1);
    }
}

/// Gives limits with per-node counters a separate counter for this node, by adding one part to the counter key.
fn split_by_node(plan: &mut Plan<'_>, weight: SampleWeight, limits: Range<usize>) {
    for matched in &mut plan.limits[limits] {
        if weight.sharing == CounterSharing::Shared && matched.limit.mode != Mode::Local {
            continue;
        }
        let own = usize::from(matched.parts.0)..usize::from(matched.parts.1);
        let (Ok(from), Ok(upto)) =
            (u16::try_from(plan.parts.len()), u16::try_from(plan.parts.len() + own.len() + 1))
        else {
            continue;
        };
        for at in own {
            let part = plan.parts[at];
            plan.parts.push(part);
        }
        plan.parts.push(KeyPart::Network { address: weight.node.into(), prefix: u8::MAX });
        matched.parts = (from, upto);
    }
}

fn scale_cost(cost: Cost, factor: u64) -> Cost {
    let units = cost.units().saturating_mul(factor);
    if cost.is_refund() { Cost::refund(units) } else { Cost::new(units) }
}
