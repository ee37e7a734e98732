//! Inline limits: limits that arrive with the request, independent of the rules (a key, the limit's numbers, a cost).
//!
//! Their counters are in the store, next to those of the rules. There is no rule and therefore no fail policy: if the
//! store fails, the caller gets an error.

use crate::limiter::Limiter;
use crate::observer::Enforced;
use std::pin::pin;
use tollgate_core::{Charge, CounterStore, Outcome, Outcomes, StoreError, Verdict};

impl<S: CounterStore> Limiter<S> {
    /// Charges each limit independently, in order and without waiting, and appends one outcome per charge. Returns
    /// `false` if the store declines, and nothing has been charged in that case, or if it panics.
    #[inline]
    pub fn try_charge_inline(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        let from = outcomes.len();
        let charged = self.guarded(|| {
            if !self.store.try_charge_each(charges, outcomes) {
                return false;
            }
            self.is_observed(charges, &mut outcomes[from..]);
            true
        });
        charged.unwrap_or_else(|_| {
            // Each is charged on its own then, and the one that panics is answered with an error.
            outcomes.truncate(from);
            false
        })
    }

    /// Charges one inline limit.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not respond; whether it applied the charge is then unknown.
    pub async fn charge_inline(&self, charge: Charge<'_>) -> Result<Outcome, StoreError> {
        let charged = self.guarded_future(pin!(self.charge_one_inline(charge))).await;
        charged.unwrap_or_else(|_| Err(StoreError::Unavailable("panic while deciding".to_owned())))
    }

    async fn charge_one_inline(&self, charge: Charge<'_>) -> Result<Outcome, StoreError> {
        let mut outcomes = Outcomes::default();
        if !self.store.try_charge(&[charge], &mut outcomes) {
            outcomes = self.store.charge(&[charge]).await?;
        }
        let unanswered = || StoreError::Unavailable("it did not decide".to_owned());
        let mut outcome = outcomes.per_charge.first().copied().ok_or_else(unanswered)?;
        if outcome.verdict == Verdict::Unknown {
            return Err(unanswered());
        }
        self.is_observed(&[charge], std::slice::from_mut(&mut outcome));
        Ok(outcome)
    }

    /// Reports the outcomes to the observers and allows denied charges if denials are not enforced.
    #[inline]
    fn is_observed(&self, charges: &[Charge<'_>], outcomes: &mut [Outcome]) {
        let enforced = if self.denies_nothing() { Enforced::No } else { Enforced::Yes };
        for observer in &self.observers {
            observer.on_inline_limits(charges, outcomes, enforced);
        }
        if enforced == Enforced::No {
            outcomes.iter_mut().for_each(allow);
        }
    }
}

/// In shadow mode or under an allow-all measure, a denial is counted as one but returned as allowed.
fn allow(outcome: &mut Outcome) {
    if outcome.verdict.is_denied() {
        outcome.verdict = Verdict::ALLOWED;
    }
}
