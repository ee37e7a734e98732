//! What the durable store records of debits and refunds.
//!
//! A counter gives back no more than it has used, so a refund of more is recorded only as far: otherwise the record would
//! fall below what was consumed, and after a loss the limit would be too generous. A counter also holds no more than twice
//! its limit, so a debit of more, as of a settlement far beyond a reservation, is recorded only as far: a reset gives back
//! what the counter holds, and would leave the rest in the record. Rejected: an outcome that says what was given
//! back, because every store and its scripts would have to count it for this alone.

use super::{Durable, DurableStore, at_store};
use crate::durable::marker::{MARKER, Marker};
use crate::late_record::record_debited;
use crate::ledger::Ledger;
use crate::used_units::{self, given_back};
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{Charge, Clock, Cost, CounterStore, StoreError};

/// The part of a limit from which on a debit may be more than its counter has room for, unless many are made at once.
const LARGE: u64 = 8;

/// Charges as they are recorded.
type Recorded<'a> = SmallVec<[Charge<'a>; 4]>;

impl<S: CounterStore, C: Clock> DurableStore<S, C> {
    /// Returns the units that the store says are used, of the limit.
    pub(super) async fn used(&self, charge: &Charge<'_>) -> Result<u64, StoreError> {
        let looked = self.inner.charge(&[Charge { cost: Cost::PEEK, ..at_store(charge) }]).await?;
        let left = looked.per_charge.first().map_or(charge.limit.capacity(), |outcome| outcome.remaining);
        Ok(charge.limit.capacity().saturating_sub(left))
    }

    /// Returns the units that requests have taken, also beyond the limit. What this process has leased in advance is not
    /// recorded before a request takes it.
    async fn taken(&self, charge: &Charge<'_>) -> Result<u64, StoreError> {
        let known = used_units::read(&self.inner, charge).await?;
        Ok(known.used.saturating_sub(self.inner.leased_units(charge)))
    }

    /// Returns charges as they are recorded: those refunds that `is_read` only as far as units are used. If the store does
    /// not answer, they count as they are.
    pub(super) async fn as_given_back<'c>(
        &self,
        durable: &Durable<C>,
        charges: &[Charge<'c>],
        is_read: impl Fn(&Charge<'_>) -> bool,
    ) -> Recorded<'c> {
        let mut recorded: Recorded<'c> = charges.iter().copied().collect();
        for charge in &mut recorded {
            if charge.cost.is_refund()
                && durable.is_taken(charge)
                && is_read(charge)
                && let Ok(taken) = self.taken(charge).await
            {
                charge.cost = given_back(charge, taken);
            }
        }
        recorded
    }

    /// Cuts large debits to what their counters have room for. If the store does not answer, they count as they are.
    pub(super) async fn cut_to_room(&self, durable: &Durable<C>, recorded: &mut Recorded<'_>) {
        for charge in recorded.iter_mut() {
            if !charge.cost.is_refund()
                && charge.cost.units() > charge.limit.capacity() / LARGE
                && durable.is_taken(charge)
                && let Ok(known) = used_units::read(&self.inner, charge).await
            {
                charge.cost = Cost::new(charge.cost.units().min(known.room));
            }
        }
    }

    /// Debits the store, and records it.
    pub(super) async fn record_debit(
        &self,
        durable: &Durable<C>,
        ledger: &Arc<Ledger>,
        mut counted: Recorded<'_>,
        debit: impl Future<Output = Result<(), StoreError>>,
    ) -> Result<(), StoreError> {
        let mut resets: SmallVec<[Charge<'_>; 1]> = SmallVec::new();
        for charge in &mut counted {
            // A reset refunds more than was used: what counts is what the store had.
            if is_reset(charge) && durable.is_taken(charge) {
                let taken = self.taken(charge).await.map_err(|_| StoreError::Timeout)?;
                charge.cost = given_back(charge, taken);
                resets.push(*charge);
            }
        }
        let result = debit.await.inspect_err(|error| durable.outages.record(error));
        // Other nodes may have read what was used before the reset, and must not debit it.
        for charge in &resets {
            if let Ok(marker) = Marker::new(charge, MARKER) {
                let _ = self.inner.charge(&[marker.charge(charge)]).await;
            }
        }
        record_debited(ledger, &counted, &result, |charge| durable.is_taken(charge));
        result
    }
}

/// Returns whether a charge empties its counter.
pub(super) fn is_reset(charge: &Charge<'_>) -> bool {
    charge.cost.is_refund() && charge.cost.units() >= charge.limit.capacity()
}
