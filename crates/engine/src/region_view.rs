//! How cells share the limit that a decision is attributed to, for an observer that records it with the decision.
//!
//! It is read when a decision is recorded, not when it is made: the request is planned again, because few decisions are
//! recorded and all others would carry what this needs.

use crate::check::Check;
use crate::decide::plan_into;
use crate::decision::{Decision, LimitStatus};
use crate::limiter::Limiter;
use tollgate_core::{Charge, CounterKey, CounterStore, PermitId, RegionStatus};
use tollgate_rules::Plan;

/// Knows how cells share counters.
pub trait RegionView: Send + Sync {
    /// Returns how cells share the counter of one limit of a decision; `None` if there are no other cells, or the limit
    /// cannot be found again.
    fn region_of_limit(
        &self,
        check: &Check<'_>,
        decision: &Decision,
        status: &LimitStatus,
    ) -> Option<RegionStatus>;
}

impl<S: CounterStore> RegionView for Limiter<S> {
    fn region_of_limit(
        &self,
        check: &Check<'_>,
        decision: &Decision,
        status: &LimitStatus,
    ) -> Option<RegionStatus> {
        let own = decision.limit(status)?;
        let mut plan = Plan::default();
        plan_into(decision.rules(), &[], check, &mut plan);
        // A caller's override counts by the same values.
        let matched = plan.limits.iter().find(|matched| {
            matched.descriptor == status.descriptor && matched.rule.map(|rule| rule.id) == status.rule
        })?;
        let charge = plan.charge(matched, PermitId::ANONYMOUS);
        let key = CounterKey { scope: &own.scope, ..charge.key };
        self.store.region_status(&Charge { key, limit: &own.limit, mode: own.mode, ..charge })
    }
}
