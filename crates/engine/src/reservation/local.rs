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
