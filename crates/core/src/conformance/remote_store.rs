//! Remote store for tests: wraps any store and simulates a network. It declines every attempt to charge without
//! waiting, is pending for one poll, and records the charges it receives.

use super::yield_once;
use crate::charge::{Charge, Outcomes, Permit};
use crate::store::{CounterStore, StoreError};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A store wrapped to behave as if it were remote; see the module.
#[derive(Debug)]
pub struct RemoteStore<S> {
    inner: S,
    charged: Mutex<Vec<Vec<String>>>,
}

impl<S> RemoteStore<S> {
    /// Wraps `inner`.
    pub const fn new(inner: S) -> Self {
        Self { inner, charged: Mutex::new(Vec::new()) }
    }

    fn record(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.charged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the calls since the previous `take_calls`, in order: for each, the scopes and values of the counters it
    /// charged.
    pub fn take_calls(&self) -> Vec<Vec<String>> {
        std::mem::take(&mut self.record())
    }
}

fn counter(charge: &Charge<'_>) -> String {
    let values: Vec<String> = charge.key.parts.iter().map(ToString::to_string).collect();
    format!("{} [{}]", charge.key.scope.label(), values.join(", "))
}

impl<S: CounterStore> CounterStore for RemoteStore<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.record().push(charges.iter().map(counter).collect());
        yield_once().await;
        self.inner.charge(charges).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.inner.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.inner.release(permits).await
    }
}
