//! Idempotency keys: a reservation claims its key before it is made, so that a retry finds it.

use super::record::Record;
use super::{CLOSING, ReservationId, ReserveError, seal};
use crate::check::{Check, CheckInput};
use crate::decision_id::DecisionId;
use crate::limiter::Limiter;
use tollgate_core::{CounterStore, RecordName, TimeDelta, Timestamp};

/// A claim on an idempotency key.
pub(super) struct Claim {
    pub(super) name: RecordName,
    /// What is stored of it.
    pub(super) sealed: Vec<u8>,
}

/// What an idempotency key leads to.
pub(super) enum Claimed {
    /// Nothing yet: the caller decides.
    New(Option<Claim>),
    /// An open reservation.
    Open(ReservationId, Box<Record>, Timestamp),
}

impl<S: CounterStore> Limiter<S> {
    /// Claims an idempotency key for the reservation `id`, or finds the one that has it.
    pub(super) async fn claim(
        &self,
        check: &Check<'_>,
        id: ReservationId,
        kept_for: TimeDelta,
        idempotency_key: Option<&str>,
    ) -> Result<Claimed, ReserveError> {
        let Some(key) = idempotency_key else { return Ok(Claimed::New(None)) };
        let records = &self.reservations.records;
        let (name, seal) = seal::for_key(key, &contents(check));
        let began = self.clock.now();
        let claim = seal.close(&[&id.0.to_le_bytes()[..], &began.as_micros().to_le_bytes()].concat())?;
        let mut found = records.store(name, (&claim, kept_for)).await?;
        for _ in 0..2 {
            let Some(kept) = found.record.take() else {
                return Ok(Claimed::New(Some(Claim { name, sealed: claim })));
            };
            // Only the same contents derive the key with which the claim was encrypted.
            let Some((other, began)) = seal.open(&kept).and_then(|bytes| read_claim(&bytes)) else {
                return Err(ReserveError::OtherContents);
            };
            let (record_name, record_seal) = seal::for_id(other);
            let read = records.exchange(record_name, None, None).await?;
            if let Some(record) = read.record.and_then(|bytes| Record::decode(&record_seal.open(&bytes)?)) {
                return match record.end(read.at) {
                    Some(end) => Err(ReserveError::Ended(end)),
                    None => Ok(Claimed::Open(other, Box::new(record), read.at)),
                };
            }
            // It is being made, unless its node has died: the claim says since when.
            if read.at.since(began) < CLOSING {
                return Err(ReserveError::InProgress);
            }
            found = records.exchange(name, Some(&kept), Some((&claim, kept_for))).await?;
            if found.is_stored {
                found.record = None;
            }
        }
        Err(ReserveError::InProgress)
    }
}

/// Returns the reservation that has claimed an idempotency key, and since when.
fn read_claim(bytes: &[u8]) -> Option<(ReservationId, Timestamp)> {
    let (id, began) = bytes.split_at_checked(16)?;
    let began = Timestamp::from_micros(u64::from_le_bytes(began.try_into().ok()?));
    Some((DecisionId(u128::from_le_bytes(id.try_into().ok()?)), began))
}

/// Returns what an idempotency key is bound to: domain, attributes or descriptors, and cost.
fn contents(check: &Check<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut put = |text: &str| {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    };
    put(check.domain);
    put(&format!("{:?}", check.cost));
    match check.input {
        CheckInput::Attributes(attributes) => {
            // Their order has no meaning.
            let mut sorted: Vec<_> = attributes.to_vec();
            sorted.sort_unstable();
            sorted.into_iter().for_each(|(key, value)| {
                put(key);
                put(value);
            });
        }
        CheckInput::Descriptors(descriptors) => {
            for descriptor in descriptors {
                put(&format!("{:?} {:?} {}", descriptor.hits, descriptor.limit, descriptor.entries.len()));
                descriptor.entries.iter().for_each(|(key, value)| {
                    put(key);
                    put(value);
                });
            }
        }
    }
    bytes
}
