//! Refund of a request that was charged to its guarantee or to its priority's reserve, by a caller that only reports its end (negative hits).
//!
//! Nobody remembers which of the two admitted it. It is that of the guarantee as long as something of that is used, for requests ask
//! for it first; what is more than that was reserved. Both at once would free places that others hold.

use crate::limiter::Limiter;
use tollgate_core::{Charge, Cost, CounterStore, PermitId};
use tollgate_rules::Plan;

impl<S: CounterStore> Limiter<S> {
    /// Divides a refund between the guarantee and the reserve of the request.
    pub(crate) async fn choose_refunded_claim(&self, plan: &mut Plan<'_>) {
        let Some((guarantee, reserve)) = plan.refunded_claims() else { return };
        // It gives back all of the capacity, and is charged by no other standing.
        plan.fleet = None;
        let used = {
            let charge = plan.charge(&plan.limits[guarantee], PermitId::ANONYMOUS);
            let peeked = self.store.charge(&[Charge { cost: Cost::PEEK, ..charge }]).await.ok();
            let outcome = peeked.and_then(|peeked| peeked.per_charge.first().copied());
            // Without an answer nothing of the reserve is given back: others may hold it.
            outcome.map_or(u64::MAX, |outcome| charge.limit.capacity().saturating_sub(outcome.remaining))
        };
        let units = plan.limits[guarantee].cost.units();
        let refund = |units: u64| if units == 0 { Cost::PEEK } else { Cost::refund(units) };
        plan.limits[guarantee].cost = refund(units.min(used));
        plan.limits[reserve].cost = refund(units.saturating_sub(used));
    }
}
