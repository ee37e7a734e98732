//! Records of this process, for counters that are its own. The budget of reservations bounds their bytes.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{Clock, Exchange, RecordFuture, RecordName, RecordStore, TimeDelta, Timestamp};

pub(super) struct LocalRecords {
    clock: Arc<dyn Clock>,
    table: Mutex<RecordTable>,
}

#[derive(Default)]
struct RecordTable {
    records: HashMap<RecordName, (Vec<u8>, Timestamp)>,
    expiries: BTreeSet<(Timestamp, RecordName)>,
}

impl RecordTable {
    fn remove(&mut self, name: RecordName) {
        if let Some((_, until)) = self.records.remove(&name) {
            self.expiries.remove(&(until, name));
        }
    }
}

impl LocalRecords {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, table: Mutex::default() }
    }

    fn table(&self) -> MutexGuard<'_, RecordTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there is no record.
    pub(super) fn is_empty(&self) -> bool {
        self.table().records.is_empty()
    }

    /// Returns whether there is a record of this name.
    pub(super) fn has(&self, name: RecordName) -> bool {
        self.table().records.contains_key(&name)
    }

    /// Returns the names of all records.
    pub(super) fn names(&self) -> Vec<RecordName> {
        self.table().records.keys().copied().collect()
    }

    /// Returns a record, and how long it is still kept.
    pub(super) fn get(&self, name: RecordName) -> Option<(Vec<u8>, TimeDelta)> {
        let (bytes, until) = self.table().records.get(&name).cloned()?;
        Some((bytes, until.since(self.clock.now())))
    }

    fn exchange_now(
        &self,
        name: RecordName,
        expected: Option<&[u8]>,
        new: Option<(&[u8], TimeDelta)>,
    ) -> Exchange {
        let at = self.clock.now();
        let mut table = self.table();
        while let Some((until, name)) = table.expiries.first().copied().filter(|(until, _)| *until <= at) {
            table.expiries.remove(&(until, name));
            table.records.remove(&name);
        }
        let record = table.records.get(&name).map(|(bytes, _)| bytes.clone());
        let new = new.filter(|_| record.as_deref() == expected);
        if let Some((bytes, life)) = new {
            table.remove(name);
            table.records.insert(name, (bytes.to_vec(), at + life));
            table.expiries.insert((at + life, name));
        }
        Exchange { is_stored: new.is_some(), record, at }
    }
}

impl RecordStore for LocalRecords {
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange> {
        Box::pin(std::future::ready(Ok(self.exchange_now(name, expected, new))))
    }

    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()> {
        self.table().remove(name);
        Box::pin(std::future::ready(Ok(())))
    }
}
