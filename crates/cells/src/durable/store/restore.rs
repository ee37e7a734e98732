//! Debits what a store has lost of durable counters, when they are charged for the first time since.
//!
//! A counter stays in what is saved until the store has answered: that nothing is missing, that it is debited now, or that
//! its marker was. Whatever else happens, the next charge of the counter tries again. A store that comes back empty is slow
//! for a while, so a debit may be applied after its deadline. It is kept: undone, it could be what the next look finds
//! there. Made again, it counts once, because of the marker.

use super::{Durable, DurableStore, ReadBack, Slots, at_store};
use crate::durable::marker::{MARKER, Marker};
use crate::durable::slots::inexact_units;
use crate::stats::add;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterStore, Enforcement, LateAnswer, StoreError, Verdict,
};

/// A counter that lacks less than this part of what is saved was not lost: processes write at different times.
const TOLERANCE: u64 = 64;
/// Times that a counter is looked at and debited for one charge: others may charge it between the two.
const MAX_LOOKS: usize = 3;

/// Counts of what was restored.
#[derive(Default)]
pub(super) struct Restored {
    pub(super) counters: AtomicU64,
    pub(super) units: AtomicU64,
    pub(super) failures: AtomicU64,
}

impl Restored {
    fn count(&self, units: u64) {
        add(&self.counters, 1);
        add(&self.units, units);
    }
}

impl<S: CounterStore, C: Clock> DurableStore<S, C> {
    /// Compares the counters of a request with what is saved, and debits what is missing.
    #[cold]
    pub(super) async fn restore(&self, durable: &Durable<C>, charges: &[Charge<'_>]) {
        for charge in charges.iter().filter(|charge| durable.must_compare(charge)) {
            let digest = durable.digest(&charge.key);
            // Taken out only when it has been compared: a request that is abandoned meanwhile leaves it to the next.
            if let Some((slots, after)) = durable.saved.get(&digest)
                && self.restore_one(durable, charge, &slots, after).await.is_err()
            {
                add(&durable.restored.failures, 1);
                continue;
            }
            durable.saved.remove(&digest);
            durable.saved.set_compared(durable.hash(charge));
        }
    }

    async fn restore_one(
        &self,
        durable: &Durable<C>,
        charge: &Charge<'_>,
        slots: &Slots,
        after: (ReadBack, bool),
    ) -> Result<(), StoreError> {
        for _ in 0..MAX_LOOKS {
            let now = durable.clock.now();
            let saved = durable.used_saved(charge, slots, now).min(charge.limit.capacity());
            let used = self.used(charge).await?;
            let missing = saved.saturating_sub(used);
            let has_moved = after.1 && durable.may_move(charge);
            let tolerated = match (used, if has_moved { ReadBack::Move } else { after.0 }) {
                (0, ReadBack::Loss | ReadBack::Move) => 0,
                (0, ReadBack::Start) => inexact_units(charge.limit),
                (_, ReadBack::Start) => return Ok(()),
                (_, ReadBack::Loss | ReadBack::Move) => saved / TOLERANCE + inexact_units(charge.limit),
            };
            if missing <= tolerated {
                return Ok(());
            }
            // Of all nodes that find units missing, one debits them: the marker and the units are charged together or not
            // at all. A counter may move more than once, with more used each time.
            let suffix = if has_moved { format!("{MARKER}={saved}") } else { MARKER.to_owned() };
            let Ok(marker) = Marker::new(charge, &suffix) else { return Ok(()) };
            if self.debit_missing(durable, charge, &marker, missing).await? {
                return Ok(());
            }
        }
        // Others charge it all the time.
        Err(StoreError::Timeout)
    }

    /// Debits missing units together with the marker. Returns whether they are debited, now or before; otherwise others have
    /// charged the counter since it was looked at, and it has no room for so many.
    async fn debit_missing(
        &self,
        durable: &Durable<C>,
        charge: &Charge<'_>,
        marker: &Marker,
        missing: u64,
    ) -> Result<bool, StoreError> {
        let missing_units =
            Charge { cost: Cost::new(missing), enforcement: Enforcement::Required, ..at_store(charge) };
        let charged = self.inner.charge(&[marker.charge(charge), missing_units]).await;
        let outcomes = charged.inspect_err(|error| {
            for late in error.late() {
                let restored = Arc::clone(&durable.restored);
                late.keep(move |answer| {
                    if matches!(answer, LateAnswer::Charged(_)) {
                        restored.count(missing);
                    }
                });
            }
        })?;
        if outcomes.admission == Admission::Admitted {
            durable.restored.count(missing);
            return Ok(true);
        }
        let of_marker = outcomes.per_charge.first().map(|outcome| outcome.verdict);
        Ok(matches!(of_marker, Some(Verdict::Denied { .. })))
    }
}
