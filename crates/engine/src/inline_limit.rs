//! Inline limits: limits that arrive with the request, apart from the rules (a key, the numbers of its limit, a cost).
//!
//! The counters are the store's, beside those of the rules. There is no rule, so there is no fail policy: when the store
//! fails, the caller gets an error.

use crate::limiter::Limiter;
use crate::observer::Enforced;
use tollgate_core::{Charge, CounterStore, Outcome, Outcomes, StoreError, Verdict};

impl<S: CounterStore> Limiter<S> {
    /// Charges each on its own, in order and without waiting, and appends one outcome for each. `false` where the store
    /// declines; nothing is charged then.
    #[inline]
    pub fn try_charge_inline(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        let from = outcomes.len();
        if !self.store.try_charge_each(charges, outcomes) {
            return false;
        }
        self.is_observed(charges, &mut outcomes[from..]);
        true
    }

    /// Charges one.
    ///
    /// # Errors
    /// A [`StoreError`] if the store did not answer; nothing is known to be taken then.
    pub async fn charge_inline(&self, charge: Charge<'_>) -> Result<Outcome, StoreError> {
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

    /// Tells those who watch, and lets pass what is not to be denied.
    #[inline]
    fn is_observed(&self, charges: &[Charge<'_>], outcomes: &mut [Outcome]) {
        let bites = if self.denies_nothing() { Enforced::No } else { Enforced::Yes };
        for observer in &self.observers {
            observer.on_inline_limits(charges, outcomes, bites);
        }
        if bites == Enforced::No {
            outcomes.iter_mut().for_each(allow);
        }
    }
}

/// In shadow, or in an emergency that lets everything pass, a denial is counted as one but not told.
fn allow(outcome: &mut Outcome) {
    if outcome.verdict.is_denied() {
        outcome.verdict = Verdict::ALLOWED;
    }
}
