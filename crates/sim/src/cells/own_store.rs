//! The store of a cell: counters and records in memory that are out of reach while it is down, as those in a Redis are.

use super::links::CellClock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tollgate_core::conformance::MemoryRecords;
use tollgate_core::{
    Charge, Charged, CounterKey, CounterStore, Outcome, Outcomes, Permit, StoreError, UnitReturn,
};
use tollgate_store::MemoryStore;

pub(crate) struct OwnStore {
    memory: MemoryStore<CellClock>,
    records: MemoryRecords<CellClock>,
    stood_still: Arc<AtomicU64>,
    is_down: AtomicBool,
}

impl OwnStore {
    /// Creates a store. The time of records is `clock`'s.
    pub(crate) fn new(memory: MemoryStore<CellClock>, clock: CellClock) -> Self {
        let stood_still = Arc::clone(&clock.stood_still);
        Self { memory, records: MemoryRecords::new(clock), stood_still, is_down: AtomicBool::new(false) }
    }

    /// Returns the records; `None` while it is down.
    pub(crate) fn records(&self) -> Option<&MemoryRecords<CellClock>> {
        (!self.is_down()).then_some(&self.records)
    }

    /// Lets the time of records stand still, in microseconds.
    pub(crate) fn stand_still(&self, micros: u64) {
        self.stood_still.fetch_add(micros, Ordering::Relaxed);
    }

    /// Sets whether it is down; returns whether it was.
    pub(crate) fn set_down(&self, is_down: bool) -> bool {
        self.is_down.swap(is_down, Ordering::Relaxed)
    }

    fn reach(&self) -> Result<&MemoryStore<CellClock>, StoreError> {
        if self.is_down() { Err(StoreError::Unavailable("it is down".to_owned())) } else { Ok(&self.memory) }
    }
}

impl CounterStore for OwnStore {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.reach()?.charge(charges).await
    }

    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        self.reach().is_ok_and(|memory| memory.try_charge(charges, outcomes))
    }

    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        self.reach().ok()?.try_charge_named(charge, name)
    }

    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        self.memory.prefetch(key)
    }

    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        self.reach().is_ok_and(|memory| memory.try_charge_each(charges, outcomes))
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.reach()?.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.reach()?.release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.reach()?.return_units(back).await
    }

    fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }
}
