//! What this node let through while the store was away, to be charged to the shared counters when it is back.
//!
//! Without it every outage would hand out a fresh burst at its end. The whole is charged, though time has given some of
//! it back: that errs on the limit's side. Bounded: beyond [`MOST`] counters what is let through is only counted here.

use crate::holding::Holding;
use crate::limiter::Limiter;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, Cost, CounterStore};

const MOST: usize = 65_536;
/// Counters charged in one call.
const BATCH: usize = 64;

#[derive(Default)]
pub(crate) struct Debts {
    any: AtomicBool,
    owed: Mutex<HashMap<(u64, u64), Holding>>,
}

impl Debts {
    fn owed(&self) -> MutexGuard<'_, HashMap<(u64, u64), Holding>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what a charge on a local counter took of the shared one.
    pub(crate) fn add(&self, charge: &Charge<'_>) {
        let name = (charge.key.scope.id(), charge.key.stable_hash());
        let mut owed = self.owed();
        if let Some(debt) = owed.get_mut(&name) {
            debt.units = debt.units.saturating_add(charge.cost.units()).min(2 * debt.limit.capacity());
        } else if owed.len() < MOST {
            owed.insert(name, Holding::of(charge));
            self.any.store(true, Ordering::Release);
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Charges the shared counters with what was let through without them. To be called now and then; does nothing, at no
    /// cost, when nothing is owed. What cannot be charged yet is kept.
    pub async fn pay_debts(&self) {
        if !self.debts.any.swap(false, Ordering::AcqRel) {
            return;
        }
        let mut owed: Vec<_> = std::mem::take(&mut *self.debts.owed()).into_iter().collect();
        while !owed.is_empty() {
            let batch = &owed[owed.len().saturating_sub(BATCH)..];
            let parts: Vec<_> = batch.iter().map(|(_, debt)| debt.parts()).collect();
            let charges: Vec<_> = batch
                .iter()
                .zip(&parts)
                .map(|((_, debt), parts)| debt.charge(parts, Cost::take(debt.units)))
                .collect();
            if self.store.debit(&charges).await.is_err() {
                break;
            }
            owed.truncate(owed.len() - charges.len());
        }
        if !owed.is_empty() {
            let mut kept = self.debts.owed();
            for (name, debt) in owed {
                kept.entry(name).and_modify(|newer| newer.units += debt.units).or_insert(debt);
            }
            self.debts.any.store(true, Ordering::Release);
        }
    }
}
