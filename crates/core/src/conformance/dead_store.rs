//! A store that is always unavailable, for tests of fail policies.

use crate::charge::{Charge, Outcomes, Permit};
use crate::store::{CounterStore, StoreError};

/// A store that is always unavailable: every call times out.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeadStore;

impl CounterStore for DeadStore {
    async fn charge(&self, _: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        Err(StoreError::Timeout)
    }

    async fn debit(&self, _: &[Charge<'_>]) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }

    async fn release(&self, _: &[Permit<'_>]) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }
}
