//! Panicking store for tests: wraps any store and panics when a charge has a marked counter value.

use super::yield_once;
use crate::charge::{Charge, Outcomes, Permit};
use crate::counter_key::KeyPart;
use crate::outcome::Outcome;
use crate::store::{CounterStore, StoreError};

/// A store that panics; see the module and its constants.
#[derive(Debug)]
pub struct PanickingStore<S>(pub S);

impl<S> PanickingStore<S> {
    /// A counter with this value panics when it is charged without waiting.
    pub const AT_ONCE: &'static str = "panics-at-once";
    /// A counter with this value declines to be charged without waiting, and panics in the second poll.
    pub const LATER: &'static str = "panics-later";
}

fn has(charges: &[Charge<'_>], value: &str) -> bool {
    let is_marked = |part: &KeyPart<'_>| matches!(part, KeyPart::Text(text) | KeyPart::Secret(text) if text.contains(value));
    charges.iter().any(|charge| charge.key.parts.iter().any(is_marked))
}

impl<S: CounterStore> CounterStore for PanickingStore<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        assert!(!has(charges, Self::AT_ONCE), "a bug in the store");
        if has(charges, Self::LATER) {
            yield_once().await;
        }
        assert!(!has(charges, Self::LATER), "a bug in the store, after a while");
        self.0.charge(charges).await
    }

    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        assert!(!has(charges, Self::AT_ONCE), "a bug in the store");
        !has(charges, Self::LATER) && self.0.try_charge(charges, outcomes)
    }

    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        assert!(!has(charges, Self::AT_ONCE), "a bug in the store");
        !has(charges, Self::LATER) && self.0.try_charge_each(charges, outcomes)
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.0.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.0.release(permits).await
    }
}
