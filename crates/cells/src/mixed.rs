//! Requests that several stores decide: the cell's own first, then owners; all or none.
//!
//! The own store is charged first, with all of the request's charges that it decides, in one call; only if it admits
//! them are owners asked. If an owner denies or fails, the own charges are undone here, where an undo cannot be lost.
//! So a denied request holds units of its own cell for at most a deadline, and units of an owner only where several
//! stores decided: those that admitted are sent a refund, without waiting for it, and if that message is lost the units
//! recover with time. Owners first was rejected: every denial by the cell's own limits would cost two messages, of
//! which the second may be lost.
//!
//! What is undone depends on what was applied: a charge that was allowed, in a store that admitted its part or to which
//! it was sent as independent. After a denial all of it is undone but what is independent by its rule; after a failure
//! all of it, because the request is charged again without what failed.

use crate::owner::{Transport, is_applied, without};
use crate::regional::{Charges, RegionalStore};
use crate::stats::add;
use smallvec::SmallVec;
use tollgate_core::{
    Admission, Charge, Clock, CounterStore, Enforcement, Mode, Outcome, Outcomes, Permit, RegionMode,
    StoreError, Timestamp,
};

type Indexes = SmallVec<[usize; 4]>;

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Charges a request that other cells decide in part.
    pub(crate) async fn charge_both(
        &self,
        charges: &[Charge<'_>],
        here: &[usize],
        there: &[usize],
    ) -> Result<Outcomes, StoreError> {
        let is_alternative = |at: &usize| charges[*at].enforcement == Enforcement::Alternative;
        // One alternative must fit, wherever it is: each place applies those that fit.
        let is_spread = here.iter().any(is_alternative) && there.iter().any(is_alternative);
        let as_sent = |at: &usize| match charges[*at].enforcement {
            Enforcement::Alternative if is_spread => {
                Charge { enforcement: Enforcement::Independent, ..charges[*at] }
            }
            _ => charges[*at],
        };
        // What a place has applied, of what it was sent.
        let applied = |of: &[usize], outcomes: &Outcomes| -> Indexes {
            let pairs = of.iter().zip(&outcomes.per_charge);
            let pairs = pairs
                .filter(|(at, outcome)| is_applied(as_sent(at).enforcement, outcome, outcomes.admission));
            pairs.map(|(at, _)| *at).collect()
        };
        let mut whole = Outcomes {
            admission: Admission::Admitted,
            at: Timestamp::ZERO,
            per_charge: charges.iter().map(|_| Outcome::UNKNOWN).collect(),
        };
        let mut own_applied = Indexes::new();
        if !here.is_empty() {
            let own: Charges<'_> = here.iter().map(as_sent).collect();
            let own = self.charge_own(&own).await.map_err(|error| remapped(error, here, charges.len()))?;
            own_applied = applied(here, &own);
            here.iter().zip(&own.per_charge).for_each(|(at, outcome)| whole.per_charge[*at] = *outcome);
            (whole.admission, whole.at) = (own.admission, own.at);
        }
        let is_denied = whole.admission == Admission::Denied;
        // After a denial nothing more is taken; what is only counted still is.
        let is_asked = |at: &usize| !is_denied || charges[*at].enforcement == Enforcement::Independent;
        let asked: Indexes = there.iter().copied().filter(is_asked).collect();
        let mut far_applied = Indexes::new();
        if !asked.is_empty() {
            let wanted: Charges<'_> = asked
                .iter()
                .map(|at| {
                    let is_leased = charges[*at].key.scope.region_mode() == RegionMode::Leased;
                    Charge { mode: if is_leased { Mode::Leased } else { Mode::Central }, ..as_sent(at) }
                })
                .collect();
            add(&self.counts.forwarded, 1);
            let mut far = Outcomes::default();
            let answer = match self.leases.try_charge(&wanted, &mut far) {
                true => Ok(far),
                false => self.leases.charge(&wanted).await,
            };
            match answer {
                Ok(far) => {
                    far_applied = applied(&asked, &far);
                    whole.at = whole.at.max(far.at);
                    asked
                        .iter()
                        .zip(far.per_charge)
                        .for_each(|(at, outcome)| whole.per_charge[*at] = outcome);
                }
                // What is only counted is not worth an error.
                Err(_) if is_denied => {}
                Err(error) => {
                    add(&self.counts.forward_failures, 1);
                    self.refund(charges, &own_applied, &mut whole).await;
                    return Err(remapped(error, &asked, charges.len()));
                }
            }
        }
        let pairs = charges.iter().map(|charge| charge.enforcement).zip(&whole.per_charge);
        whole.admission = if is_denied { Admission::Denied } else { Outcomes::admission(pairs) };
        if whole.admission == Admission::Denied {
            let is_undone = |at: &usize| charges[*at].enforcement != Enforcement::Independent;
            own_applied.retain(|at| is_undone(at));
            far_applied.retain(|at| is_undone(at));
            self.refund(charges, &own_applied, &mut whole).await;
            self.refund_far(charges, &far_applied, &mut whole);
        }
        Ok(whole)
    }

    /// Undoes what the own store has applied.
    async fn refund(&self, charges: &[Charge<'_>], taken: &[usize], whole: &mut Outcomes) {
        let (held, spent): (Vec<usize>, Vec<usize>) =
            taken.iter().partition(|at| charges[**at].limit.is_released(charges[**at].permit));
        let refunds: Vec<Charge<'_>> =
            spent.iter().map(|at| Charge { cost: charges[*at].cost.negated(), ..charges[*at] }).collect();
        if !refunds.is_empty()
            && let Err(error) = self.debit_own(&refunds).await
        {
            error.keep_late();
        }
        self.shorten_overdrafts(refunds.iter());
        let permits: Vec<Permit<'_>> = held
            .iter()
            .map(|at| Permit { key: charges[*at].key, limit: charges[*at].limit, id: charges[*at].permit })
            .collect();
        if !permits.is_empty() {
            let _ = self.own.release(&permits).await;
        }
        for at in taken {
            whole.per_charge[*at] = without(&charges[*at], whole.per_charge[*at]);
        }
    }

    /// Undoes what owners have applied, without waiting for them.
    fn refund_far(&self, charges: &[Charge<'_>], taken: &[usize], whole: &mut Outcomes) {
        if taken.is_empty() {
            return;
        }
        let undone: Vec<&Charge<'_>> = taken.iter().map(|at| &charges[*at]).collect();
        self.owners.undo(&undone);
        for at in taken {
            whole.per_charge[*at] = without(&charges[*at], whole.per_charge[*at]);
        }
    }
}

/// Maps an error about some charges to one about the whole request.
pub(crate) fn remapped(error: StoreError, part: &[usize], all: usize) -> StoreError {
    match error {
        StoreError::Partial { failed, cause } => {
            let failed = failed.into_iter().filter_map(|at| part.get(at).copied()).collect();
            StoreError::Partial { failed, cause }
        }
        error if part.len() < all => StoreError::Partial { failed: part.to_vec(), cause: Box::new(error) },
        error => error,
    }
}
