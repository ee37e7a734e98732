//! A store for decisions that must change nothing: it answers what the charges of a request would do, and applies none.
//!
//! A limiter over it takes the ordinary decision path, with other shards and grants, so that an explanation cannot
//! differ from the decision that it foretells. A charge is asked together with one that can never fit, on the same
//! counter and by the same limit: all or none means none, on every store, and still each outcome says whether its charge
//! would fit, and when. By another limit it would not be the same counter: a store may keep a counter that is alone in a
//! form that only its own limit reads.
//! A peek alone was rejected: it shows what remains, but not how long to wait. Limits that count denied requests too
//! (the Envoy profile) would count this one, and are peeked at; in a fixed window, what remains says the rest.

use smallvec::SmallVec;
use std::sync::{Mutex, PoisonError};
use tollgate_core::{
    Admission, Charge, Cost, CounterStore, Enforcement, Mode, Outcome, Outcomes, Permit, PermitId,
    StoreError, Verdict,
};

pub(crate) struct DryRun<'s, S> {
    store: &'s S,
    failure: Mutex<Option<StoreError>>,
}

impl<'s, S: CounterStore> DryRun<'s, S> {
    pub(crate) fn new(store: &'s S) -> Self {
        Self { store, failure: Mutex::default() }
    }

    /// Returns why the store could not be asked, if so: then the fail policy has decided, which is not what would be.
    pub(crate) fn failure(&self) -> Option<StoreError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks about charges of one counter key's values, which are in one part of the store.
    async fn ask(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let asked: SmallVec<[Charge<'_>; 4]> = charges.iter().map(dry).collect();
        let Some(first) = asked.iter().find(|charge| charge.enforcement != Enforcement::Independent) else {
            return self.store.charge(&asked).await;
        };
        let beyond = Cost::new(first.limit.capacity().saturating_add(1));
        let (enforcement, permit) = (Enforcement::Required, PermitId::ANONYMOUS);
        let guard = Charge { cost: beyond, enforcement, permit, ..*first };
        let mut asked = asked.clone();
        asked.push(guard);
        let mut outcomes = self.store.charge(&asked).await?;
        outcomes.per_charge.pop();
        Ok(outcomes)
    }
}

/// Returns the charge as it is asked.
fn dry<'a>(charge: &Charge<'a>) -> Charge<'a> {
    // Local counters keep no alternatives, and no deny cache stands before them.
    let is_local = charge.mode == Mode::Local && charge.enforcement != Enforcement::Alternative;
    let mode = if is_local { Mode::Local } else { Mode::Central };
    if is_peeked(charge) {
        return Charge { cost: Cost::PEEK, enforcement: Enforcement::Independent, mode, ..*charge };
    }
    let enforcement = if is_local { Enforcement::Required } else { Enforcement::Alternative };
    Charge { enforcement, mode, ..*charge }
}

fn is_peeked(charge: &Charge<'_>) -> bool {
    charge.cost.is_peek() || charge.cost.is_refund() || charge.limit.counts_denied()
}

/// Returns the outcome of a charge from what was answered.
fn outcome(charge: &Charge<'_>, answer: Outcome) -> Outcome {
    if answer.verdict == Verdict::Unknown || !is_peeked(charge) || charge.cost.is_peek() {
        return answer;
    }
    let (units, capacity) = (charge.cost.units(), charge.limit.capacity());
    let verdict = match charge.cost.is_refund() || units <= answer.remaining {
        true => Verdict::ALLOWED,
        false => Verdict::Denied { retry_after: (units <= capacity).then_some(answer.reset_after) },
    };
    Outcome { verdict, ..answer }
}

/// Returns an outcome as it is after the charge, which is applied.
fn applied(charge: &Charge<'_>, outcome: Outcome) -> Outcome {
    let units = charge.cost.units();
    let remaining = match charge.cost.is_refund() {
        true => outcome.remaining.saturating_add(units).min(charge.limit.capacity()),
        false => outcome.remaining.saturating_sub(units),
    };
    outcome.with_remaining(remaining)
}

impl<S: CounterStore> CounterStore for DryRun<'_, S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let mut each: SmallVec<[Outcome; 4]> = SmallVec::from_elem(Outcome::UNKNOWN, charges.len());
        let mut outcomes = Outcomes::default();
        let mut open: Vec<usize> = (0..charges.len()).collect();
        while let Some(first) = open.first().copied() {
            let same = |at: &usize| {
                charges[*at].key.parts == charges[first].key.parts
                    && charges[*at].key.scope.store() == charges[first].key.scope.store()
                    && dry(&charges[*at]).mode == dry(&charges[first]).mode
                    && (!charges[*at].key.parts.is_empty()
                        || std::ptr::eq(charges[*at].key.scope, charges[first].key.scope))
            };
            let (group, rest): (Vec<usize>, Vec<usize>) = open.iter().copied().partition(same);
            open = rest;
            let asked: SmallVec<[Charge<'_>; 4]> = group.iter().map(|at| charges[*at]).collect();
            let answer = self.ask(&asked).await.inspect_err(|error| {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
            })?;
            outcomes.at = answer.at;
            for (at, answer) in group.into_iter().zip(answer.per_charge) {
                each[at] = outcome(&charges[at], answer);
            }
        }
        let all = charges.iter().map(|charge| charge.enforcement).zip(&each);
        outcomes.admission = Outcomes::admission(all);
        for (charge, outcome) in charges.iter().zip(each) {
            let takes_part =
                charge.enforcement == Enforcement::Independent || outcomes.admission == Admission::Admitted;
            let is_applied = match outcome.verdict {
                Verdict::Allowed { .. } => takes_part,
                Verdict::Denied { .. } => takes_part && charge.limit.counts_denied(),
                Verdict::Unknown => false,
            };
            outcomes.per_charge.push(if is_applied { applied(charge, outcome) } else { outcome });
        }
        Ok(outcomes)
    }

    async fn debit(&self, _: &[Charge<'_>]) -> Result<(), StoreError> {
        Ok(())
    }

    async fn release(&self, _: &[Permit<'_>]) -> Result<(), StoreError> {
        Ok(())
    }

    fn is_regional_only(&self) -> bool {
        self.store.is_regional_only()
    }
}
