//! Reconciliation: charges the shared counters with what this node allowed while the store was unavailable.
//!
//! Without it, every outage would end with a fresh burst. A check first reconciles the pending charges of its counters;
//! if that fails, the store counts as unavailable for these counters. The rest is reconciled in the background
//! ([`Limiter::reconcile`]). The full amount is charged although some of it has been refilled over time, which errs
//! toward enforcing the limit. The table is bounded: beyond [`MAX_PENDING`] counters, charges are counted only on this
//! node.
//!
//! A request that was sent, and decided locally because the answer was late, is in doubt: the store may charge it after
//! all. It becomes pending only if the answer says that the store did not, so it counts once, whatever the answer.

use crate::charge_record::ChargeRecord;
use crate::limiter::Limiter;
use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tollgate_core::{Charge, Cost, CounterId, CounterStore, LateAnswer, LateCharge, StoreError};

const MAX_PENDING: usize = 65_536;
/// Maximum number of counters charged in one call.
const BATCH: usize = 64;

#[derive(Default)]
pub(crate) struct PendingCharges {
    /// True if there may be pending charges. False on the usual path, which then takes no lock.
    any: AtomicBool,
    table: Mutex<PendingTable>,
    /// Notified when a reconciliation ends.
    ended: Notify,
}

#[derive(Default)]
struct PendingTable {
    pending: HashMap<CounterId, ChargeRecord>,
    /// Counters whose pending charges are being applied to the store.
    in_progress: HashSet<CounterId>,
    /// Units of which it is not known yet whether the store has charged them.
    in_doubt: HashMap<CounterId, u64>,
}

/// Charges being applied to the store. They become pending again if that fails, also when the future is dropped.
struct ReconcileGuard {
    pending: Arc<PendingCharges>,
    charges: Vec<(CounterId, ChargeRecord)>,
}

/// Charges that the store may have applied although its answer was late. Those that it did not apply become pending when
/// all answers have come, which is when this is dropped.
struct Doubt {
    pending: Arc<PendingCharges>,
    charges: Mutex<Vec<(CounterId, ChargeRecord)>>,
}

fn counter_id(charge: &Charge<'_>) -> CounterId {
    charge.key.id()
}

impl PendingCharges {
    fn table(&self) -> MutexGuard<'_, PendingTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether any counter has pending charges.
    #[inline]
    pub(crate) fn any_pending(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Records a charge on a local counter, to be applied to the shared one.
    pub(crate) fn add(&self, charge: &Charge<'_>) {
        let mut table = self.table();
        table.add(counter_id(charge), ChargeRecord::from_charge(charge));
        self.any.store(true, Ordering::Release);
    }

    /// Records charges on local counters that the store may apply as well, when the answers to `late` come.
    pub(crate) fn add_in_doubt<'c>(
        self: &Arc<Self>,
        charges: impl Iterator<Item = &'c Charge<'c>>,
        late: &[LateCharge],
    ) {
        let charges = charges.map(|charge| (counter_id(charge), ChargeRecord::from_charge(charge)));
        self.hold(charges.collect(), late);
    }

    fn hold(self: &Arc<Self>, charges: Vec<(CounterId, ChargeRecord)>, late: &[LateCharge]) {
        let mut table = self.table();
        for (name, record) in &charges {
            *table.in_doubt.entry(*name).or_default() += record.units;
        }
        drop(table);
        let doubt = Arc::new(Doubt { pending: Arc::clone(self), charges: Mutex::new(charges) });
        for late in late {
            let doubt = Arc::clone(&doubt);
            late.keep(move |answer| {
                if let LateAnswer::Charged(names) = answer {
                    doubt.settle(&names);
                }
            });
        }
    }

    /// Returns the units of a counter that this node has admitted and the store may not have charged yet.
    pub(crate) fn unconfirmed(&self, name: &CounterId) -> u64 {
        let table = self.table();
        let pending = table.pending.get(name).map_or(0, |record| record.units);
        pending + table.in_doubt.get(name).copied().unwrap_or(0)
    }

    /// Takes the pending charges of these counters for reconciliation. On error, returns the indexes of the counters
    /// that are already being reconciled elsewhere.
    fn start(self: &Arc<Self>, names: &[CounterId]) -> Result<ReconcileGuard, Vec<usize>> {
        let mut table = self.table();
        let busy = |at: &usize| table.in_progress.contains(&names[*at]);
        let busy: Vec<usize> = (0..names.len()).filter(busy).collect();
        if !busy.is_empty() {
            return Err(busy);
        }
        let list: Vec<_> = names.iter().filter_map(|name| table.pending.remove_entry(name)).collect();
        table.in_progress.extend(list.iter().map(|(name, _)| *name));
        Ok(ReconcileGuard { pending: Arc::clone(self), charges: list })
    }
}

impl Doubt {
    /// Removes the charges that the store has applied.
    fn settle(&self, names: &[CounterId]) {
        let mut charges = self.charges.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = self.pending.table();
        for (name, record) in charges.extract_if(.., |(name, _)| names.contains(name)) {
            table.confirm(name, record.units);
        }
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        let charges = std::mem::take(self.charges.get_mut().unwrap_or_else(PoisonError::into_inner));
        if charges.is_empty() {
            return;
        }
        let mut table = self.pending.table();
        for (name, record) in charges {
            table.confirm(name, record.units);
            table.add(name, record);
        }
        self.pending.any.store(true, Ordering::Release);
    }
}

impl PendingTable {
    fn add(&mut self, name: CounterId, charge_record: ChargeRecord) {
        if let Some(known) = self.pending.get_mut(&name) {
            known.units = known.units.saturating_add(charge_record.units).min(2 * known.limit.capacity());
        } else if self.pending.len() < MAX_PENDING {
            self.pending.insert(name, charge_record);
        }
    }

    /// Ends the doubt about units of a counter.
    fn confirm(&mut self, name: CounterId, units: u64) {
        if let Some(doubted) = self.in_doubt.get_mut(&name) {
            *doubted = doubted.saturating_sub(units);
            if *doubted == 0 {
                self.in_doubt.remove(&name);
            }
        }
    }
}

impl ReconcileGuard {
    async fn debit(mut self, store: &impl CounterStore) -> Result<(), StoreError> {
        let debited = {
            let parts: Vec<_> = self.charges.iter().map(|(_, charge_record)| charge_record.parts()).collect();
            let charges: Vec<_> = self
                .charges
                .iter()
                .zip(&parts)
                .map(|((_, charge_record), parts)| {
                    charge_record.charge(parts, Cost::new(charge_record.units))
                })
                .collect();
            store.debit(&charges).await
        };
        let Err(error) = debited else {
            self.end(|_| true);
            return Ok(());
        };
        if let StoreError::Partial { failed, .. } = &error {
            self.end(|at| !failed.contains(&at));
        }
        let late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
        if !late.is_empty() {
            // The store may apply them yet; until that is known they are not sent again.
            let charges = std::mem::take(&mut self.charges);
            self.pending.hold(charges.clone(), &late);
            self.charges = charges;
            self.end(|_| true);
        }
        Err(error)
    }

    /// Ends the reconciliation of the charges at these positions.
    fn end(&mut self, is_done: impl Fn(usize) -> bool) {
        let mut table = self.pending.table();
        let mut at = 0;
        for (name, _) in self.charges.extract_if(.., |_| {
            at += 1;
            is_done(at - 1)
        }) {
            table.in_progress.remove(&name);
        }
        if table.pending.is_empty() && table.in_progress.is_empty() {
            self.pending.any.store(false, Ordering::Release);
        }
    }
}

impl Drop for ReconcileGuard {
    fn drop(&mut self) {
        if !self.charges.is_empty() {
            let mut table = self.pending.table();
            for (name, charge_record) in self.charges.drain(..) {
                table.in_progress.remove(&name);
                table.add(name, charge_record);
            }
        }
        self.pending.ended.notify_waiters();
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Charges the shared counters with what was allowed without them. Call it periodically; it does nothing, at no
    /// cost, if nothing is pending. Charges that cannot be applied yet stay pending. Returns whether the store failed
    /// to apply any.
    pub async fn reconcile(&self) -> bool {
        if !self.pending.any_pending() {
            return false;
        }
        let owing: Vec<CounterId> = self.pending.table().pending.keys().copied().collect();
        for batch in owing.chunks(BATCH) {
            let Ok(guard) = self.pending.start(batch) else { continue };
            if !guard.charges.is_empty() && guard.debit(&self.store).await.is_err() {
                return true;
            }
        }
        false
    }

    /// Reconciles the pending charges of these counters. The error contains the charges for which the store counts as
    /// unavailable.
    pub(crate) async fn reconcile_before(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        if !self.pending.any_pending() {
            return Ok(());
        }
        let names: Vec<CounterId> = charges.iter().map(counter_id).collect();
        let mut has_waited = false;
        let (failed, why) = loop {
            let mut ended = pin!(self.pending.ended.notified());
            ended.as_mut().enable();
            let guard = match self.pending.start(&names) {
                Ok(guard) if guard.charges.is_empty() => return Ok(()),
                Ok(guard) => guard,
                // Somebody else is charging them, within the store's deadline.
                Err(_) if !has_waited => {
                    ended.await;
                    has_waited = true;
                    continue;
                }
                Err(busy) => break (busy, still_owing()),
            };
            let owing: HashSet<CounterId> = guard.charges.iter().map(|(name, _)| *name).collect();
            let owing = (0..names.len()).filter(|at| owing.contains(&names[*at])).collect();
            if has_waited {
                // That has failed: nobody waits for the store twice.
                break (owing, still_owing());
            }
            match guard.debit(&self.store).await {
                Ok(()) => return Ok(()),
                Err(why) => break (owing, why),
            }
        };
        // The indexes in a partial error refer to pending charges, not to `charges`.
        let why = StoreError::Unavailable(why.to_string());
        let all = failed.len() == charges.len();
        Err(if all { why } else { StoreError::Partial { failed, cause: Box::new(why) } })
    }
}

fn still_owing() -> StoreError {
    StoreError::Unavailable("what was let through is being charged".to_owned())
}
