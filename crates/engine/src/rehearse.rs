//! Deciding a request that stands for many: for rehearsals, on counters that nobody else uses.

use crate::check::Check;
use crate::decision::Decision;
use crate::fold;
use crate::limiter::{Limiter, plan_into};
use tollgate_core::{Algorithm, Cost, CounterStore, PermitId};
use tollgate_rules::{Charges, Plan};

/// How many requests one stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stands {
    /// Of its caller's own: what limits with counters for each caller are charged.
    pub own: u64,
    /// Of all callers': what limits that all callers share are charged.
    pub all: u64,
}

impl Stands {
    /// For itself alone.
    pub const ONE: Self = Self { own: 1, all: 1 };
}

impl<S: CounterStore> Limiter<S> {
    /// Decides as [`Limiter::check`] does, at the price of the requests that this one stands for, and without permits: how
    /// long a request would have held one is not known. Nobody watches. `None` where the store must be waited for.
    pub fn rehearse(&self, check: &Check<'_>, stands: Stands) -> Option<Decision> {
        let mut decision = self.undecided();
        decision.tenant = self.agreed_with(check, &decision.rules).tenant;
        {
            let Decision { id, answer, rules, tenant, .. } = &mut decision;
            let mut plan = Plan::default();
            plan_into(rules, tenant.as_deref(), check, &mut plan);
            plan.hits.retain(|hit| hit.limit.limit.algorithm() != Algorithm::Concurrency);
            for hit in &mut plan.hits {
                let shared = hit.rule.is_some_and(|rule| rule.shared);
                hit.cost = times(hit.cost, if shared { stands.all } else { stands.own });
            }
            if !plan.hits.is_empty() {
                let mut charges = Charges::new();
                plan.charges(PermitId(id.0), &mut charges);
                let outcomes = self.store.charge_at_once(&charges)?;
                fold::fold(&plan, &outcomes, answer);
            }
        }
        Some(decision)
    }
}

fn times(cost: Cost, factor: u64) -> Cost {
    let units = cost.units().saturating_mul(factor);
    if cost.is_refund() { Cost::refund(units) } else { Cost::take(units) }
}
