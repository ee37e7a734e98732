//! Replay of a sampled request that represents many, for impact previews, on counters of its own.

use crate::check::Check;
use crate::decision::{Decision, DecisionDetails};
use crate::decision_id::DecisionId;
use crate::fold;
use crate::limiter::{Limiter, plan_into};
use tollgate_core::{Algorithm, Cost, CounterStore, KeyPart, Mode, Outcomes, PermitId};
use tollgate_rules::{Charges, Plan};

/// Which counters nodes have of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterSharing {
    /// Those of rules that say `mode: local`: all others are in a store that nodes share.
    Shared,
    /// All.
    PerNode,
}

/// How many requests one stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleWeight {
    /// Of its caller's own: what limits with counters for each caller are charged.
    pub per_caller: u64,
    /// Of all callers': what limits that all callers share are charged.
    pub shared: u64,
    /// The node that it was asked on: what is counted on each node is counted apart.
    pub node: u32,
    /// What is counted on each node.
    pub sharing: CounterSharing,
}

impl SampleWeight {
    /// For itself alone.
    pub const ONE: Self = Self { per_caller: 1, shared: 1, node: 0, sharing: CounterSharing::Shared };
}

impl<S: CounterStore> Limiter<S> {
    /// Decides as [`Limiter::check`] does, at the price of the requests that this one stands for, and without permits: how
    /// long a request would have held one is not known. Nobody watches. `None` where the store must be waited for.
    pub fn replay(&self, check: &Check<'_>, weight: SampleWeight) -> Option<Decision> {
        let (id, rules) = (DecisionId::generate(), self.rules.load());
        let tenant = self.quota_for(check, &rules).overrides;
        let mut details = DecisionDetails::unmatched();
        {
            let mut plan = Plan::default();
            plan_into(&rules, tenant.as_deref(), check, &mut plan);
            plan.limits.retain(|matched| matched.limit.limit.algorithm() != Algorithm::Concurrency);
            for matched in &mut plan.limits {
                let shared = matched.rule.is_some_and(|rule| rule.shared_by_callers);
                matched.cost =
                    scale_cost(matched.cost, if shared { weight.shared } else { weight.per_caller });
            }
            if weight.node > 0 {
                split_by_node(&mut plan, weight);
            }
            if !plan.limits.is_empty() {
                let (mut charges, mut outcomes) = (Charges::new(), Outcomes::default());
                plan.charges(PermitId(id.0), &mut charges);
                if !self.store.try_charge(&charges, &mut outcomes) {
                    return None;
                }
                fold::fold(&plan, &outcomes, &mut details);
            }
        }
        Some(Decision { id, details, rules, overrides: tenant, grants: None, effect: None })
    }
}

/// Gives what is counted on each node a counter of this node's own: its name has one part more.
fn split_by_node(plan: &mut Plan<'_>, weight: SampleWeight) {
    for matched in &mut plan.limits {
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
