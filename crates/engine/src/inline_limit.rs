//! Inline limits: limits that arrive with the request, apart from the rules (a key, the numbers of its limit, a cost).
//!
//! The counters are the store's, beside those of the rules. There is no rule, so there is no fail policy: when the store
//! fails, the caller gets an error.

use crate::limiter::Limiter;
use crate::observer::Bites;
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
        self.watched(charges, &mut outcomes[from..]);
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
        self.watched(&[charge], std::slice::from_mut(&mut outcome));
        Ok(outcome)
    }

    /// Tells those who watch, and lets pass what is not to be denied.
    #[inline]
    fn watched(&self, charges: &[Charge<'_>], outcomes: &mut [Outcome]) {
        let bites = if self.denies_nothing() { Bites::No } else { Bites::Yes };
        for observer in &self.observers {
            observer.throttled(charges, outcomes, bites);
        }
        if bites == Bites::No {
            outcomes.iter_mut().for_each(let_pass);
        }
    }
}

/// In shadow, or in an emergency that lets everything pass, a denial is counted as one but not told.
fn let_pass(outcome: &mut Outcome) {
    if outcome.verdict.is_denied() {
        outcome.verdict = Verdict::ALLOWED;
    }
}
