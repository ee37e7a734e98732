//! One type for every store, for tests: a server is generic over its store, and a program that tests it over several would be
//! compiled with a server for each.

use crate::charge::{Charge, Charged, Outcomes, Permit, UnitReturn};
use crate::counter_key::CounterKey;
use crate::outcome::Outcome;
use crate::region::RegionStatus;
use crate::store::{CounterStore, LastKnown, StoreError};
use std::fmt;
use std::future::Future;
use std::pin::Pin;

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A store of a type that is known only when the program runs. It answers as the store inside.
pub struct AnyStore(Box<dyn DynStore>);

impl AnyStore {
    /// Hides the type of a store.
    pub fn new(store: impl CounterStore + 'static) -> Self {
        Self(Box::new(store))
    }
}

impl fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyStore").finish_non_exhaustive()
    }
}

/// [`CounterStore`] with boxed futures; that trait documents the methods.
trait DynStore: Send + Sync {
    fn charge<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, Result<Outcomes, StoreError>>;
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool;
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged>;
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64>;
    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool;
    fn debit<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, Result<(), StoreError>>;
    fn debit_reported<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, Result<(), StoreError>>;
    fn restore_lost_units<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, ()>;
    fn release<'a>(&'a self, permits: &'a [Permit<'_>]) -> Answer<'a, Result<(), StoreError>>;
    fn return_units<'a>(&'a self, back: &'a UnitReturn<'_>) -> Answer<'a, Result<(), StoreError>>;
    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown>;
    fn leased_units(&self, charge: &Charge<'_>) -> u64;
    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus>;
    fn is_down(&self) -> bool;
    fn is_regional_only(&self) -> bool;
}

impl<S: CounterStore> DynStore for S {
    fn charge<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, Result<Outcomes, StoreError>> {
        Box::pin(CounterStore::charge(self, charges))
    }

    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        CounterStore::try_charge(self, charges, outcomes)
    }

    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        CounterStore::try_charge_named(self, charge, name)
    }

    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        CounterStore::prefetch(self, key)
    }

    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        CounterStore::try_charge_each(self, charges, outcomes)
    }

    fn debit<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, Result<(), StoreError>> {
        Box::pin(CounterStore::debit(self, charges))
    }

    fn debit_reported<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, Result<(), StoreError>> {
        Box::pin(CounterStore::debit_reported(self, charges))
    }

    fn restore_lost_units<'a>(&'a self, charges: &'a [Charge<'_>]) -> Answer<'a, ()> {
        Box::pin(CounterStore::restore_lost_units(self, charges))
    }

    fn release<'a>(&'a self, permits: &'a [Permit<'_>]) -> Answer<'a, Result<(), StoreError>> {
        Box::pin(CounterStore::release(self, permits))
    }

    fn return_units<'a>(&'a self, back: &'a UnitReturn<'_>) -> Answer<'a, Result<(), StoreError>> {
        Box::pin(CounterStore::return_units(self, back))
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        CounterStore::last_known(self, charge)
    }

    fn leased_units(&self, charge: &Charge<'_>) -> u64 {
        CounterStore::leased_units(self, charge)
    }

    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus> {
        CounterStore::region_status(self, charge)
    }

    fn is_down(&self) -> bool {
        CounterStore::is_down(self)
    }

    fn is_regional_only(&self) -> bool {
        CounterStore::is_regional_only(self)
    }
}

impl CounterStore for AnyStore {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.0.charge(charges).await
    }

    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        self.0.try_charge(charges, outcomes)
    }

    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        self.0.try_charge_named(charge, name)
    }

    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        self.0.prefetch(key)
    }

    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        self.0.try_charge_each(charges, outcomes)
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.0.debit(charges).await
    }

    async fn debit_reported(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.0.debit_reported(charges).await
    }

    async fn restore_lost_units(&self, charges: &[Charge<'_>]) {
        self.0.restore_lost_units(charges).await;
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.0.release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.0.return_units(back).await
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        self.0.last_known(charge)
    }

    fn leased_units(&self, charge: &Charge<'_>) -> u64 {
        self.0.leased_units(charge)
    }

    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus> {
        self.0.region_status(charge)
    }

    fn is_down(&self) -> bool {
        self.0.is_down()
    }

    fn is_regional_only(&self) -> bool {
        self.0.is_regional_only()
    }
}
