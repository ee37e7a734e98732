//! Refunds of leased buckets that this cell owns, its own and those of other cells.
//!
//! A lease of another cell lies in the time ahead of the bucket. A refund would move the bucket back into it, and its units
//! could be spent twice. So a refund is applied only while no lease may be outstanding: the owner charges it together with
//! the mark that leases leave beside the counter. Otherwise the units recover with time. The owner does this, not the
//! sender: cells of earlier releases, late refills and requests that another owner has denied send plain refunds.

use crate::owner::Transport;
use crate::regional::{Charges, RegionalStore};
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, LimitParams, Mode, Outcomes,
    RegionMode, StoreError,
};

/// Returns whether a charge refunds a bucket that other cells may lease. A reset by an operator, which leaves nothing used, is
/// wanted whatever is outstanding.
pub(crate) fn is_guarded(charge: &Charge<'_>) -> bool {
    charge.cost.is_refund()
        && charge.cost.units() < charge.limit.refill_cost()
        && charge.key.scope.region_mode() == RegionMode::Leased
        && matches!(charge.limit.params(), LimitParams::Bucket { .. })
}

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Debits the own store, refunding leased buckets only while no lease of them may be outstanding.
    pub(crate) async fn debit_own(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        if !charges.iter().any(is_guarded) {
            return self.own.debit(charges).await;
        }
        let (refunds, others): (Vec<usize>, Vec<usize>) =
            (0..charges.len()).partition(|at| is_guarded(&charges[*at]));
        let mut errors = Vec::new();
        // First, because a lease that is undone takes its mark with it.
        if !others.is_empty() {
            let some: Vec<Charge<'_>> = others.iter().map(|at| charges[*at]).collect();
            errors.extend(self.own.debit(&some).await.err().map(|error| (others, error)));
        }
        for at in refunds {
            errors.extend(self.refund_guarded(&charges[at]).await.err().map(|error| (vec![at], error)));
        }
        StoreError::of_debits(errors, charges.len())
    }

    async fn refund_guarded(&self, charge: &Charge<'_>) -> Result<(), StoreError> {
        let Some((scope, limit)) = self.leases.config().refund_guard(charge.key.scope) else { return Ok(()) };
        let refund = Charge { mode: Mode::Central, enforcement: Enforcement::Required, ..*charge };
        let mark = Charge::new(CounterKey { scope: &scope, ..charge.key }, &limit, Cost::ONE);
        let (request, mut outcomes) = ([refund, mark], Outcomes::default());
        if !self.own.try_charge(&request, &mut outcomes) {
            self.own.charge(&request).await?;
        }
        Ok(())
    }

    /// Charges a request that also refunds leased buckets: the refunds follow once the rest is admitted.
    #[cold]
    pub(crate) async fn charge_and_refund(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let mut peeks: Charges<'_> = charges.iter().copied().collect();
        peeks.iter_mut().filter(|charge| is_guarded(charge)).for_each(|charge| charge.cost = Cost::PEEK);
        let mut outcomes = self.own.charge(&peeks).await?;
        if outcomes.admission == Admission::Admitted {
            for (at, charge) in charges.iter().enumerate().filter(|(_, charge)| is_guarded(charge)) {
                self.refund_guarded(charge).await?;
                outcomes.per_charge[at] = self.own.charge(&peeks[at..=at]).await?.per_charge[0];
            }
        }
        Ok(outcomes)
    }
}
