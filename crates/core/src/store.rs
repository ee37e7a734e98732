//! The counter store interface. Memory, Redis and every decorator implement this one trait.

use crate::charge::{Charge, Outcomes, Permit, UnitReturn};
use crate::outcome::Outcome;
use std::future::Future;

/// A place that keeps counters.
pub trait CounterStore: Send + Sync {
    /// Charges one request: its required charges all or none. One round trip, whatever the number.
    fn charge(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<Outcomes, StoreError>> + Send;

    /// Charges one request without waiting, where the store can (counters in memory, leased units), and writes what came of
    /// it into `outcomes`, which must be empty. `false` declines, and nothing has been charged; the caller then awaits
    /// [`CounterStore::charge`] with the same charges.
    #[inline]
    fn try_charge(&self, _charges: &[Charge<'_>], _outcomes: &mut Outcomes) -> bool {
        false
    }

    /// Charges many requests of one charge each without waiting, in order, and appends an outcome for each. `false`
    /// declines, and nothing has been charged. A store in memory starts all its cache misses before it waits for the first.
    #[inline]
    fn try_charge_each(&self, _charges: &[Charge<'_>], _outcomes: &mut Vec<Outcome>) -> bool {
        false
    }

    /// Takes what has already happened elsewhere, beyond the limit if need be. A negative cost gives back.
    fn debit(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Gives permits back. Doing it twice is doing it once.
    fn release(&self, permits: &[Permit<'_>]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Gives back what was taken some time ago and not used: no more than time has not given back already, and once
    /// only, however often it is asked for. A store may also leave it to time.
    fn return_units(&self, _back: &UnitReturn<'_>) -> impl Future<Output = Result<(), StoreError>> + Send {
        std::future::ready(Ok(()))
    }
}

impl<S: CounterStore + ?Sized> CounterStore for std::sync::Arc<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        (**self).charge(charges).await
    }

    #[inline]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        (**self).try_charge(charges, outcomes)
    }

    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        (**self).try_charge_each(charges, outcomes)
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        (**self).debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        (**self).release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        (**self).return_units(back).await
    }
}

/// Why a store did not answer. The engine turns it into a decision by the rule's fail policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// It cannot be reached, or refuses to work.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// It did not answer in time.
    #[error("the store did not answer in time")]
    Timeout,
    /// Some of a request's charges could not be decided, because the part of the store that has them did not answer.
    /// Of the others none is taken: the request can be charged again without those.
    #[error("a part of the store failed: {cause}")]
    Partial {
        /// Which of the request's charges, in order.
        failed: Vec<usize>,
        /// Why not.
        cause: Box<StoreError>,
    },
}
