//! Records in memory for tests: a record store that fails on demand, after a number of calls.

use crate::clock::Clock;
use crate::record_store::{Exchange, RecordFuture, RecordName, RecordStore};
use crate::store::StoreError;
use crate::time::TimeDelta;
use std::collections::HashMap;
use std::future::ready;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Records that all nodes of a test see at once, and that never expire. They have the time of their own clock.
///
/// ```
/// use tollgate_core::conformance::{MemoryRecords, block_on};
/// use tollgate_core::{ManualClock, RecordName, RecordStore, TimeDelta};
/// let (records, name) = (MemoryRecords::new(ManualClock::default()), RecordName([0; 16]));
/// let new = Some((&b"made"[..], TimeDelta::from_secs(60)));
/// assert!(block_on(records.exchange(name, None, new)).is_ok_and(|exchange| exchange.is_stored));
/// assert!(block_on(records.exchange(name, None, new)).is_ok_and(|exchange| !exchange.is_stored));
/// records.fail_after(0);
/// assert!(block_on(records.remove(name)).is_err());
/// ```
#[derive(Debug)]
pub struct MemoryRecords<C> {
    clock: C,
    state: Mutex<RecordState>,
}

#[derive(Debug, Default)]
struct RecordState {
    records: HashMap<RecordName, Vec<u8>>,
    /// Calls that succeed before the next ones fail; `None` if none fails.
    left: Option<u32>,
}

impl RecordState {
    fn call(&mut self) -> Result<(), StoreError> {
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(1).ok_or(StoreError::Timeout)?;
        }
        Ok(())
    }
}

impl<C> MemoryRecords<C> {
    /// Creates an empty store of records.
    pub fn new(clock: C) -> Self {
        Self { clock, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, RecordState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets this many calls succeed, and all further ones time out.
    pub fn fail_after(&self, calls: u32) {
        self.state().left = Some(calls);
    }

    /// Lets every call succeed from now on.
    pub fn clear_fault(&self) {
        self.state().left = None;
    }

    /// Returns all records.
    pub fn all(&self) -> Vec<(RecordName, Vec<u8>)> {
        self.state().records.iter().map(|(name, record)| (*name, record.clone())).collect()
    }
}

impl<C: Clock> RecordStore for MemoryRecords<C> {
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange> {
        let at = self.clock.now();
        let mut state = self.state();
        let exchanged = state.call().map(|()| {
            let record = state.records.get(&name).cloned();
            let new = new.filter(|_| record.as_deref() == expected);
            if let Some((bytes, _)) = new {
                state.records.insert(name, bytes.to_vec());
            }
            Exchange { is_stored: new.is_some(), record, at }
        });
        Box::pin(ready(exchanged))
    }

    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()> {
        let mut state = self.state();
        let removed = state.call().map(|()| drop(state.records.remove(&name)));
        Box::pin(ready(removed))
    }
}
