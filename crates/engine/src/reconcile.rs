//! Reconciliation: charges the shared counters with what this node allowed while the store was unavailable.
//!
//! Without it, every outage would end with a fresh burst. A check first reconciles the pending charges of its counters;
//! if that fails, the store counts as unavailable for these counters. The rest is reconciled in the background
//! ([`Limiter::reconcile`]). The full amount is charged although some of it has been refilled over time, which errs
//! toward enforcing the limit; of the fleet's capacity only the rest is (`refill.rs`). The table is bounded: beyond [`MAX_PENDING`] counters or its bytes, charges are counted
//! only on this node. Counters with long values have a share of the bytes, so that a caller who invents them leaves room
//! for those with ordinary ones.
//!
//! A request that was sent, and decided locally because the answer was late, is in doubt: the store may charge it after
//! all. It becomes pending only if the answer says that the store did not, so it counts once, whatever the answer. What is
//! in doubt is bounded in bytes as well: beyond it a charge becomes pending at once, and the store undoes its own.

use crate::charge_record::ChargeRecord;
use crate::limiter::Limiter;
use crate::refill::Refill;
use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tollgate_core::{Charge, Cost, CounterId, CounterStore, LateAnswer, LateCharge, StoreError, Timestamp};

const MAX_PENDING: usize = 65_536;
/// Default bytes of a limiter.
const DEFAULT_BYTES: usize = 16 << 20;
/// Bytes of a charge in doubt beside its counter's values: the record, and both sides of its late answer.
const DOUBT_BYTES: usize = 512;
/// Counters with longer values have a quarter of the bytes.
const LONG: usize = 256;
/// Maximum number of counters charged in one call.
const BATCH: usize = 64;

pub(crate) struct PendingCharges {
    /// True if there may be pending charges. False on the usual path, which then takes no lock.
    any: AtomicBool,
    table: Mutex<PendingTable>,
    /// Notified when a reconciliation ends.
    ended: Notify,
    /// Maximum bytes of counter values that are pending, and of charges in doubt.
    max_bytes: usize,
}

impl Default for PendingCharges {
    fn default() -> Self {
        Self::with_bytes(DEFAULT_BYTES)
    }
}

#[derive(Default)]
struct PendingTable {
    pending: HashMap<CounterId, ChargeRecord>,
    /// Bytes of the values of pending counters: of all, and of those with long values.
    bytes: usize,
    long_bytes: usize,
    /// Counters whose pending charges are being applied to the store.
    in_progress: HashSet<CounterId>,
    /// Units of which it is not known yet whether the store has charged them.
    in_doubt: HashMap<CounterId, u64>,
    /// Bytes of the charges in doubt.
    doubt_bytes: usize,
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
    bytes: usize,
}

/// What an answer that never comes means for a charge in doubt.
#[derive(Clone, Copy)]
enum LostAnswer {
    Charged,
    NotCharged,
}

fn doubt_bytes(charges: &[(CounterId, ChargeRecord)]) -> usize {
    charges.iter().map(|(_, record)| DOUBT_BYTES + record.key_bytes()).sum()
}

fn counter_id(charge: &Charge<'_>) -> CounterId {
    charge.key.id()
}

fn record(charge: &Charge<'_>, refill: Option<Refill>) -> ChargeRecord {
    ChargeRecord { refill, ..ChargeRecord::from_charge(charge) }
}

impl PendingCharges {
    /// Creates an empty table of at most so many bytes.
    pub(crate) fn with_bytes(max_bytes: usize) -> Self {
        Self { any: AtomicBool::new(false), table: Mutex::default(), ended: Notify::new(), max_bytes }
    }

    fn table(&self) -> MutexGuard<'_, PendingTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether any counter has pending charges.
    #[inline]
    pub(crate) fn any_pending(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Records a charge on a local counter, to be applied to the shared one.
    pub(crate) fn add(&self, charge: &Charge<'_>, refill: Option<Refill>) {
        let mut table = self.table();
        table.add(counter_id(charge), record(charge, refill), self.max_bytes);
        self.any.store(true, Ordering::Release);
    }

    /// Records charges on local counters that the store may apply as well, when the answers to `late` come.
    pub(crate) fn add_in_doubt<'c>(
        self: &Arc<Self>,
        charges: impl Iterator<Item = (&'c Charge<'c>, Option<Refill>)>,
        late: &[LateCharge],
    ) {
        let charges = charges.map(|(charge, refill)| (counter_id(charge), record(charge, refill)));
        let charges: Vec<_> = charges.collect();
        if self.table().doubt_bytes + doubt_bytes(&charges) <= self.max_bytes {
            return self.hold(charges, late, LostAnswer::NotCharged);
        }
        // The late charge is not kept then, so the store undoes it.
        let mut table = self.table();
        charges.into_iter().for_each(|(name, record)| table.add(name, record, self.max_bytes));
        self.any.store(true, Ordering::Release);
    }

    /// Records charges that the store may apply when the answers to `late` come: those of which it says that it did not become
    /// pending. If an answer is lost, they count as charged.
    pub(crate) fn add_unless_charged<'c>(
        self: &Arc<Self>,
        charges: impl Iterator<Item = &'c Charge<'c>>,
        late: &[LateCharge],
    ) {
        let charges: Vec<_> = charges.map(|charge| (counter_id(charge), record(charge, None))).collect();
        if charges.is_empty() || self.table().doubt_bytes + doubt_bytes(&charges) > self.max_bytes {
            return late.iter().for_each(|late| late.keep(|_| {}));
        }
        self.hold(charges, late, LostAnswer::Charged);
    }

    /// Takes back pending units of a counter. Returns whether they were pending: else they have been charged.
    pub(crate) fn take_back(&self, name: &CounterId, units: u64) -> bool {
        let mut table = self.table();
        let Some(known) = table.pending.get_mut(name).filter(|known| known.units >= units) else {
            return false;
        };
        known.units -= units;
        if let Some(refill) = &mut known.refill {
            refill.take_back(units);
        }
        if known.units == 0 {
            table.remove(name);
        }
        true
    }

    /// Returns the number of counters and units that the store has not been charged with, or may not have been.
    pub(crate) fn totals(&self) -> (usize, u64) {
        let table = self.table();
        let pending = table.pending.values().map(|record| record.units);
        let units = pending.chain(table.in_doubt.values().copied()).fold(0, u64::saturating_add);
        (table.pending.len() + table.in_doubt.len() + table.in_progress.len(), units)
    }

    fn hold(
        self: &Arc<Self>,
        charges: Vec<(CounterId, ChargeRecord)>,
        late: &[LateCharge],
        lost: LostAnswer,
    ) {
        let mut table = self.table();
        for (name, record) in &charges {
            *table.in_doubt.entry(*name).or_default() += record.units;
        }
        let bytes = doubt_bytes(&charges);
        table.doubt_bytes += bytes;
        drop(table);
        let doubt = Arc::new(Doubt { pending: Arc::clone(self), charges: Mutex::new(charges), bytes });
        for late in late {
            let doubt = Arc::clone(&doubt);
            late.keep(move |answer| match (answer, lost) {
                (LateAnswer::Charged(names), _) => doubt.settle(|name| names.contains(name)),
                (LateAnswer::Unknown, LostAnswer::Charged) => doubt.settle(|_| true),
                _ => {}
            });
        }
    }

    /// Returns the units of a counter that this node has admitted and the store may not have charged yet.
    pub(crate) fn unconfirmed(&self, name: &CounterId, now: Timestamp) -> u64 {
        let table = self.table();
        let pending = table.pending.get(name).map_or(0, |record| record.units_left(now));
        pending + table.in_doubt.get(name).copied().unwrap_or(0)
    }

    /// Takes the pending charges of these counters for reconciliation, as far as they have not been refilled. On error, returns the
    /// indexes of the counters that are already being reconciled elsewhere.
    fn start(self: &Arc<Self>, names: &[CounterId], now: Timestamp) -> Result<ReconcileGuard, Vec<usize>> {
        let mut table = self.table();
        let busy = |at: &usize| table.in_progress.contains(&names[*at]);
        let busy: Vec<usize> = (0..names.len()).filter(busy).collect();
        if !busy.is_empty() {
            return Err(busy);
        }
        let list = names.iter().filter_map(|name| Some((*name, table.remove(name)?)));
        let list: Vec<_> = list.filter(|(_, record)| record.units_left(now) > 0).collect();
        if list.is_empty() && table.pending.is_empty() && table.in_progress.is_empty() {
            self.any.store(false, Ordering::Release);
        }
        table.in_progress.extend(list.iter().map(|(name, _)| *name));
        Ok(ReconcileGuard { pending: Arc::clone(self), charges: list })
    }
}

impl Doubt {
    /// Removes the charges that the store has applied.
    fn settle(&self, is_applied: impl Fn(&CounterId) -> bool) {
        let mut charges = self.charges.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = self.pending.table();
        for (name, record) in charges.extract_if(.., |(name, _)| is_applied(name)) {
            table.confirm(name, record.units);
        }
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        let charges = std::mem::take(self.charges.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut table = self.pending.table();
        table.doubt_bytes -= self.bytes;
        if charges.is_empty() {
            return;
        }
        for (name, record) in charges {
            table.confirm(name, record.units);
            table.add(name, record, self.pending.max_bytes);
        }
        self.pending.any.store(true, Ordering::Release);
    }
}

impl PendingTable {
    fn add(&mut self, name: CounterId, charge_record: ChargeRecord, max_bytes: usize) {
        if let Some(known) = self.pending.get_mut(&name) {
            known.units = known.units.saturating_add(charge_record.units).min(2 * known.limit.capacity());
            match (&mut known.refill, &charge_record.refill) {
                (Some(known), Some(refill)) => known.add(refill),
                (known, _) => *known = None,
            }
            return;
        }
        let size = charge_record.key_bytes();
        let long = if size > LONG { size } else { 0 };
        if self.pending.len() < MAX_PENDING
            && self.bytes + size <= max_bytes
            && self.long_bytes + long <= max_bytes / 4
        {
            (self.bytes, self.long_bytes) = (self.bytes + size, self.long_bytes + long);
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

    fn remove(&mut self, name: &CounterId) -> Option<ChargeRecord> {
        let charge_record = self.pending.remove(name)?;
        let size = charge_record.key_bytes();
        self.bytes -= size;
        self.long_bytes -= if size > LONG { size } else { 0 };
        Some(charge_record)
    }
}

impl ReconcileGuard {
    async fn debit(mut self, store: &impl CounterStore, now: Timestamp) -> Result<(), StoreError> {
        let debited = {
            let parts: Vec<_> = self.charges.iter().map(|(_, charge_record)| charge_record.parts()).collect();
            let charges: Vec<_> = self
                .charges
                .iter()
                .zip(&parts)
                .map(|((_, charge_record), parts)| {
                    charge_record.charge(parts, Cost::new(charge_record.units_left(now)))
                })
                .collect();
            store.debit(&charges).await
        };
        let Err(error) = debited else {
            self.end(|_| true);
            return Ok(());
        };
        for (at, late) in error.late_beside() {
            // The store may apply them yet, though others failed.
            let charges = at.iter().filter_map(|at| self.charges.get(*at)).cloned().collect();
            self.pending.hold(charges, late, LostAnswer::NotCharged);
        }
        if let StoreError::Partial { failed, .. } = &error {
            self.end(|at| !failed.contains(&at));
        }
        let late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
        if !late.is_empty() {
            // The store may apply them yet; until that is known they are not sent again.
            let charges = std::mem::take(&mut self.charges);
            self.pending.hold(charges.clone(), &late, LostAnswer::NotCharged);
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
                table.add(name, charge_record, self.pending.max_bytes);
            }
        }
        self.pending.ended.notify_waiters();
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Charges the shared counters with what was allowed without them. Call it periodically; it does nothing, at no
    /// cost, if nothing is pending. Charges that cannot be applied yet stay pending. Returns whether the store failed
    /// to apply any. Reservations that were made without the store are handed to it afterwards. Limits that follow signals make the steps that
    /// were missed.
    pub async fn reconcile(&self) -> bool {
        self.catch_up_adapted();
        self.reconcile_pending().await || self.hand_over_reservations().await
    }

    /// Returns the number of counters, and of units, that were admitted without the store and not charged to it yet.
    #[must_use]
    pub fn unreconciled(&self) -> (usize, u64) {
        self.pending.totals()
    }

    /// Sets the bytes of what was admitted without the store: values of pending counters, and charges in doubt.
    #[must_use]
    pub fn with_pending_bytes(mut self, bytes: usize) -> Self {
        self.pending = Arc::new(PendingCharges::with_bytes(bytes));
        self
    }

    async fn reconcile_pending(&self) -> bool {
        if !self.pending.any_pending() {
            return false;
        }
        let pending: Vec<CounterId> = self.pending.table().pending.keys().copied().collect();
        for batch in pending.chunks(BATCH) {
            let now = self.clock.now();
            let Ok(guard) = self.pending.start(batch, now) else { continue };
            if !guard.charges.is_empty() && guard.debit(&self.store, now).await.is_err() {
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
        // Rare, and large: see `Limiter::finish`.
        Box::pin(self.reconcile_charges(charges)).await
    }

    async fn reconcile_charges(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let names: Vec<CounterId> = charges.iter().map(counter_id).collect();
        let (now, mut has_waited) = (self.clock.now(), false);
        let (failed, why) = loop {
            let mut ended = pin!(self.pending.ended.notified());
            ended.as_mut().enable();
            let guard = match self.pending.start(&names, now) {
                Ok(guard) if guard.charges.is_empty() => return Ok(()),
                Ok(guard) => guard,
                // Another check is charging them, within the store's deadline.
                Err(_) if !has_waited => {
                    ended.await;
                    has_waited = true;
                    continue;
                }
                Err(busy) => break (busy, still_pending()),
            };
            let pending: HashSet<CounterId> = guard.charges.iter().map(|(name, _)| *name).collect();
            let pending = (0..names.len()).filter(|at| pending.contains(&names[*at])).collect();
            if has_waited {
                // That has failed; a check does not wait for the store twice.
                break (pending, still_pending());
            }
            match guard.debit(&self.store, now).await {
                Ok(()) => return Ok(()),
                Err(why) => break (pending, why),
            }
        };
        // The indexes in a partial error refer to pending charges, not to `charges`.
        let why = StoreError::Unavailable(why.to_string());
        let all = failed.len() == charges.len();
        Err(if all { why } else { StoreError::Partial { failed, cause: Box::new(why) } })
    }
}

fn still_pending() -> StoreError {
    StoreError::Unavailable("what was let through is being charged".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{Algorithm, CounterKey, KeyPart, Limit, LimitSpec, Rate, Scope, nonzero};

    fn add(pending: &PendingCharges, scope: &Scope, limit: &Limit, value: &str) {
        let parts = [KeyPart::Text(value)];
        pending.add(&Charge::new(CounterKey { scope, parts: &parts }, limit, Cost::ONE), None);
    }

    /// A caller who invents long values while the store is down neither fills the memory nor displaces the others.
    #[test]
    fn what_is_pending_is_bounded_in_bytes() {
        let (pending, scope) = (PendingCharges::default(), Scope::new("s"));
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(5))).build().expect("a limit");
        for number in 0..20_000 {
            add(&pending, &scope, &limit, &format!("{number:08192}"));
        }
        let long = pending.table().pending.len();
        assert!(long * 8_192 <= DEFAULT_BYTES / 4 && long > 100, "{long}");
        for number in 0..1_000 {
            add(&pending, &scope, &limit, &format!("honest{number}"));
        }
        let mut table = pending.table();
        assert_eq!(table.pending.len(), long + 1_000);
        let names: Vec<_> = table.pending.keys().copied().collect();
        names.iter().for_each(|name| assert!(table.remove(name).is_some()));
        assert_eq!((table.bytes, table.long_bytes), (0, 0));
    }

    /// A store that answers late, asked with long values, must not fill the memory with what is in doubt.
    #[test]
    fn what_is_in_doubt_is_bounded_in_bytes() {
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(5))).build().expect("a limit");
        let (pending, scope) = (Arc::new(PendingCharges::with_bytes(1 << 20)), Scope::new("s"));
        let mut responders = Vec::new();
        for number in 0..2_000 {
            let value = format!("{number:08192}");
            let parts = [KeyPart::Text(&value)];
            let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE);
            let (late, responder) = LateCharge::new();
            pending.add_in_doubt(std::iter::once((&charge, None)), &[late]);
            responders.push(responder);
        }
        let held = pending.table().in_doubt.len();
        assert!((100..=(1 << 20) / 8_192).contains(&held), "{held}");
        assert!(pending.table().doubt_bytes <= 1 << 20);
        // Of the others the store undoes what it charges; those that are held count as the store charged them.
        let undone = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        for responder in responders {
            let undone = Arc::clone(&undone);
            let undo = move || {
                undone.fetch_add(1, Ordering::Relaxed);
            };
            responder.answer(LateAnswer::Charged(Vec::new()), undo);
        }
        assert_eq!(undone.load(Ordering::Relaxed), 2_000 - held);
        let table = pending.table();
        assert_eq!((table.doubt_bytes, table.in_doubt.len()), (0, 0));
    }
}
