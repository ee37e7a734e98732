//! Records of an outage: reservations that were made while the shared records could not be reached.
//!
//! A reservation follows its rules' fail policy as a check does, so it must be possible to make one without the store.
//! What cannot be stored where all nodes find it is kept in this process, and handed over as soon as the shared records
//! answer. Until then only this node can settle or cancel it, and it ends with this process, as its local charges do.
//! Refusing reservations was rejected: a rule that admits checks during an outage would deny the same request here.

use super::local::LocalRecords;
use std::sync::Arc;
use tokio::sync::RwLock;
use tollgate_core::{Clock, Exchange, RecordName, RecordStore, StoreError, TimeDelta};

pub(super) struct Records {
    shared: Arc<dyn RecordStore>,
    /// Records of an outage; none if the shared records are this process's own.
    outage: Option<LocalRecords>,
    /// Held exclusively while a record moves, so that it is always found in one of the two places.
    moving: RwLock<()>,
}

impl Records {
    /// Creates records of this process.
    pub(super) fn of_this_process(clock: Arc<dyn Clock>) -> Self {
        Self { shared: Arc::new(LocalRecords::new(clock)), outage: None, moving: RwLock::default() }
    }

    /// Creates records that all nodes share.
    pub(super) fn shared(shared: Arc<dyn RecordStore>, clock: Arc<dyn Clock>) -> Self {
        Self { shared, outage: Some(LocalRecords::new(clock)), moving: RwLock::default() }
    }

    /// Returns the records that all nodes share, if they are not this process's own.
    pub(super) fn shared_store(&self) -> Option<Arc<dyn RecordStore>> {
        self.outage.is_some().then(|| Arc::clone(&self.shared))
    }

    /// Returns the records of an outage, if this is one of them.
    fn outage_of(&self, name: RecordName) -> Option<&LocalRecords> {
        self.outage.as_ref().filter(|records| records.has(name))
    }

    /// Returns whether only this node has the record.
    pub(super) fn is_of_outage(&self, name: RecordName) -> bool {
        self.outage_of(name).is_some()
    }

    pub(super) async fn exchange(
        &self,
        name: RecordName,
        expected: Option<&[u8]>,
        new: Option<(&[u8], TimeDelta)>,
    ) -> Result<Exchange, StoreError> {
        let _still = self.moving.read().await;
        match self.outage_of(name) {
            Some(records) => records.exchange(name, expected, new).await,
            None => self.shared.exchange(name, expected, new).await,
        }
    }

    /// Stores a record if there is none; if the shared records fail, in this process.
    pub(super) async fn store(
        &self,
        name: RecordName,
        new: (&[u8], TimeDelta),
    ) -> Result<Exchange, StoreError> {
        match self.exchange(name, None, Some(new)).await {
            Err(error) => self.store_here(name, new).await?.ok_or(error),
            stored => stored,
        }
    }

    /// Stores a record in this process if there is none; `None` if the shared records are this process's own.
    pub(super) async fn store_here(
        &self,
        name: RecordName,
        new: (&[u8], TimeDelta),
    ) -> Result<Option<Exchange>, StoreError> {
        match &self.outage {
            Some(records) => records.exchange(name, None, Some(new)).await.map(Some),
            None => Ok(None),
        }
    }

    pub(super) async fn remove(&self, name: RecordName) -> Result<(), StoreError> {
        let _still = self.moving.read().await;
        match self.outage_of(name) {
            Some(records) => records.remove(name).await,
            None => self.shared.remove(name).await,
        }
    }

    /// Moves the records of an outage to the shared ones.
    pub(super) async fn hand_over(&self) -> Result<(), StoreError> {
        let Some(records) = self.outage.as_ref().filter(|records| !records.is_empty()) else { return Ok(()) };
        for name in records.names() {
            let _moves = self.moving.write().await;
            let Some((bytes, life)) = records.get(name) else { continue };
            let new = Some((&bytes[..], life));
            let found = self.shared.exchange(name, None, new).await?;
            if let Some(kept) = found.record.filter(|kept| *kept != bytes) {
                // A reply that was lost: this process knows how the record went on.
                self.shared.exchange(name, Some(&kept), new).await?;
            }
            records.remove(name).await?;
        }
        Ok(())
    }
}
