//! Records of reservations, which all nodes see at once: only what becomes of counters is simulated.

use crate::world::Shared;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tollgate_core::{Exchange, RecordFuture, RecordName, RecordStore, TimeDelta};

/// Records by name, on the store's clock.
pub(crate) struct Records {
    world: Shared,
    records: Mutex<HashMap<RecordName, Vec<u8>>>,
}

impl Records {
    pub(crate) fn new(world: &Shared) -> Self {
        Self { world: world.clone(), records: Mutex::default() }
    }
}

impl RecordStore for Records {
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange> {
        let at = {
            let world = self.world.lock();
            world.authority.time(world.now)
        };
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.get(&name).cloned();
        let new = new.filter(|_| record.as_deref() == expected);
        if let Some((bytes, _)) = new {
            records.insert(name, bytes.to_vec());
        }
        let exchange = Exchange { is_stored: new.is_some(), record, at };
        Box::pin(std::future::ready(Ok(exchange)))
    }

    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        Box::pin(std::future::ready(Ok(())))
    }
}
