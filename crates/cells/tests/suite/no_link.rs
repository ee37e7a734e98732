//! The link of cells whose counters have no owner.

use tollgate_cells::message::Message;
use tollgate_cells::{SentCharge, Transport};
use tollgate_core::{CounterId, Outcomes, StoreError};

/// A link that nothing passes.
#[derive(Clone)]
pub(crate) struct NoLink;

impl Transport for NoLink {
    async fn charge(&self, _: usize, _: Vec<SentCharge>, _: Vec<CounterId>) -> Result<Outcomes, StoreError> {
        Err(StoreError::Timeout)
    }
    async fn send(&self, _: usize, _: Message, _: Vec<CounterId>) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }
    fn post(&self, _: usize, _: Message) {}
}
