//! Fallback counters: local counters that decide while the store is unavailable. Any [`CounterStore`] that charges
//! without waiting. The trait below is the object-safe part of `CounterStore`, so that the limiter needs no second type
//! parameter and this crate does not depend on a store.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use tollgate_core::{Charge, CounterStore, Outcomes, Permit};

/// Charges without waiting.
pub(crate) trait TryCharge: Send + Sync {
    /// See [`CounterStore::try_charge`].
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool;

    /// See [`CounterStore::debit`].
    fn try_debit(&self, charge: &Charge<'_>);

    /// Releases permits that were acquired here; ignores all others.
    fn try_release(&self, permits: &[Permit<'_>]);
}

impl<S: CounterStore> TryCharge for S {
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        CounterStore::try_charge(self, charges, outcomes)
    }

    fn try_debit(&self, charge: &Charge<'_>) {
        let _ = pin!(CounterStore::debit(self, std::slice::from_ref(charge)))
            .poll(&mut Context::from_waker(Waker::noop()));
    }

    fn try_release(&self, permits: &[Permit<'_>]) {
        // One poll is enough for a store that charges without waiting.
        let _ = pin!(CounterStore::release(self, permits)).poll(&mut Context::from_waker(Waker::noop()));
    }
}
