//! The record store interface: small records that nodes share, such as reservations.
//!
//! One operation, compare and exchange, is enough for every change of a record's state, and every store that has counters
//! can provide it. The store neither reads nor explains a record.

use crate::store::StoreError;
use crate::time::{TimeDelta, Timestamp};
use std::future::Future;
use std::pin::Pin;

/// Name of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordName(pub [u8; 16]);

/// The result of [`RecordStore::exchange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Whether the new record was stored.
    pub is_stored: bool,
    /// The record before the call.
    pub record: Option<Vec<u8>>,
    /// Time of the call, by the store's clock.
    pub at: Timestamp,
}

/// A call to a record store in progress.
pub type RecordFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of records.
pub trait RecordStore: Send + Sync {
    /// Stores `new` for a time, if the record is `expected` (`None`: if there is none). Without `new` it only reads.
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange>;

    /// Removes a record. Idempotent.
    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()>;
}
