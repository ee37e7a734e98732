//! The durable store: a decorator around a cell's own store that keeps record of what durable counters have given, and
//! debits what the store has lost.
//!
//! No request waits for the database: rows are collected and written beside the traffic, and what was read back lies in
//! memory. After a loss, the first charge of a counter costs a look at the store, and a debit if units are missing.

mod collect;
mod record;
mod restore;

use super::CounterDigest;
use super::canary::Canaries;
use super::kept::{DurableRow, Kept};
use super::outages::Outages;
use super::saved::{Saved, SavedSlot, Slots};
use super::slots::{is_kept, is_plausible, used_after};
use crate::late_record::{record_debited, record_if_kept};
use crate::ledger::Ledger;
use crate::members::Members;
use foldhash::quality::RandomState;
use restore::Restored;
use ring::hmac;
use smallvec::SmallVec;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tollgate_core::{
    Charge, Charged, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, LastKnown, LimitError,
    Mode, Outcome, Outcomes, Permit, RegionMode, StoreError, Timestamp, UnitReturn,
};

/// Maximum number of counters between two collections.
const MAX_ACTIVE: usize = 1 << 17;
/// Maximum number of rows in memory.
const MAX_ROWS: usize = 1 << 18;

/// Whose consumption counts for limits that cells share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// This cell's alone: there are no others.
    None,
    /// That of all cells.
    Cells,
}

/// Why counters are read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadBack {
    /// The process is new to a store that it shares, and that has lost nothing as a whole. What was read ages until a counter is
    /// charged: only a counter that is unused in the store was lost.
    Start,
    /// The store has lost counters. Nodes that had not noticed yet may have charged some since.
    Loss,
    /// This cell may decide counters that another decided before: what that one wrote is missing here, whatever this
    /// one has of earlier.
    Move,
}

/// Statistics of durable counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurableStats {
    /// Rows that are not in the database yet.
    pub pending_rows: usize,
    /// Units that were dropped, because too many rows were pending or too many counters active.
    pub dropped_units: u64,
    /// Counters that were read back and not charged since.
    pub saved_counters: usize,
    /// Counters that were debited what the store had lost.
    pub restored_counters: u64,
    /// Units that were debited.
    pub restored_units: u64,
    /// Attempts to restore a counter that the store failed. The next charge of the counter makes another one.
    pub restore_failures: u64,
}

/// Record of durable counters.
pub struct Durable<C> {
    key: hmac::Key,
    hasher: RandomState,
    pub(super) clock: C,
    peers: Peers,
    canaries: Canaries,
    /// What requests have taken, and what other cells have reported.
    taken: Arc<Ledger>,
    reported: Arc<Ledger>,
    kept: Mutex<Kept>,
    saved: Saved,
    /// Whether this node's rules or the quotas of the database may have durable limits.
    is_expected: AtomicBool,
    /// The cells, where owners may change, and how many changes have been read back.
    pub(super) members: OnceLock<Arc<Members>>,
    pub(super) moves_read: AtomicU64,
    restored: Arc<Restored>,
    outages: Outages,
}

impl<C: Clock> Durable<C> {
    /// Creates the record of a process. `key` is the same on all nodes of a database; `canaries` are kept in each of
    /// the `stores` with a name and in the default one.
    ///
    /// # Errors
    /// [`LimitError`], which is a bug.
    pub fn new(
        key: &[u8],
        process: &str,
        stores: &[String],
        canaries: usize,
        peers: Peers,
        clock: C,
    ) -> Result<Self, LimitError> {
        Ok(Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, key),
            hasher: RandomState::default(),
            clock,
            peers,
            canaries: Canaries::new(process, stores, canaries)?,
            taken: Arc::new(Ledger::new(MAX_ACTIVE)),
            reported: Arc::new(Ledger::new(MAX_ACTIVE)),
            kept: Mutex::new(Kept::new(MAX_ROWS)),
            saved: Saved::new(),
            is_expected: AtomicBool::new(true),
            members: OnceLock::new(),
            moves_read: AtomicU64::new(0),
            restored: Arc::default(),
            outages: Outages::default(),
        })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets whether any limit may be durable.
    pub fn expect_durable(&self, is_expected: bool) {
        self.is_expected.store(is_expected, Ordering::Relaxed);
    }

    /// Returns up to `limit` rows to write.
    #[must_use]
    pub fn pending(&self, limit: usize) -> Vec<DurableRow> {
        self.kept().pending(limit)
    }

    /// Records that rows are in the database.
    pub fn record_written(&self, rows: &[DurableRow]) {
        self.kept().record_written(rows);
    }

    /// Sets what the database has: each counter is compared with the store when it is charged next.
    pub fn install(&self, slots: Vec<SavedSlot>, after: ReadBack) {
        self.saved.install(slots, after);
    }

    /// Returns whether there is nothing to keep: no limit may be durable, and no counter was.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.is_expected.load(Ordering::Relaxed) && self.kept().is_empty() && self.saved.len() == 0
    }

    /// Returns statistics.
    #[must_use]
    pub fn stats(&self) -> DurableStats {
        let (pending_rows, dropped) = {
            let kept = self.kept();
            (kept.unwritten(), kept.dropped())
        };
        let unread = self.taken.dropped().saturating_add(self.reported.dropped());
        DurableStats {
            pending_rows,
            dropped_units: dropped.saturating_add(unread),
            saved_counters: self.saved.len(),
            restored_counters: self.restored.counters.load(Ordering::Relaxed),
            restored_units: self.restored.units.load(Ordering::Relaxed),
            restore_failures: self.restored.failures.load(Ordering::Relaxed),
        }
    }

    /// Returns whether consumption of a charge is kept. Its scope says so, wherever it comes from: this node's rules, another
    /// cell, or the record of a reservation.
    #[inline]
    pub(super) fn is_durable(&self, charge: &Charge<'_>) -> bool {
        charge.key.scope.is_durable() && charge.mode != Mode::Local && is_kept(charge.limit)
    }

    #[inline]
    fn is_taken(&self, charge: &Charge<'_>) -> bool {
        !charge.cost.is_peek() && self.is_durable(charge)
    }

    fn digest(&self, key: &CounterKey<'_>) -> CounterDigest {
        let mut context = hmac::Context::with_key(&self.key);
        let mut field = |kind: u8, bytes: &[u8]| {
            context.update(&[kind]);
            context.update(&(bytes.len() as u64).to_le_bytes());
            context.update(bytes);
        };
        field(0, key.scope.label().as_bytes());
        for part in key.parts {
            match part {
                KeyPart::Text(text) => field(1, text.as_bytes()),
                KeyPart::Secret(text) => field(2, text.as_bytes()),
                KeyPart::Network { address, prefix } => {
                    field(3, &address.to_le_bytes());
                    field(4, &[*prefix]);
                }
            }
        }
        let tag = context.sign();
        tag.as_ref()[..16].try_into().unwrap_or_default()
    }

    /// Returns a hash of a charge's counter within this process; never zero. Another after each change of owners, if its
    /// own may have changed.
    fn hash(&self, charge: &Charge<'_>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(charge.key.scope.id());
        charge.key.parts.hash(&mut hasher);
        if self.may_move(charge) {
            hasher.write_u64(self.moves_read.load(Ordering::Relaxed));
        }
        hasher.finish() | 1
    }

    /// Returns whether a charge's counter must be compared with what is saved first.
    fn must_compare(&self, charge: &Charge<'_>) -> bool {
        self.is_durable(charge) && !self.saved.is_compared(self.hash(charge))
    }

    /// Returns the units of a counter that the database has, of those that still count.
    fn used_saved(&self, charge: &Charge<'_>, slots: &Slots, now: Timestamp) -> u64 {
        let hash = charge.key.stable_hash();
        let used = |units: fn(&SavedSlot) -> i64| {
            let slots: SmallVec<[(Timestamp, i64); 4]> = slots
                .iter()
                .map(|slot| (slot.last_at, units(slot)))
                .filter(|(_, units)| is_plausible(charge.limit, *units))
                .collect();
            used_after(charge.limit, &slots, now, hash)
        };
        match (charge.key.scope.region_mode(), self.peers) {
            (RegionMode::Split, _) | (_, Peers::None) => used(|slot| slot.own),
            // Not what others have written and not reported yet: their reports will bring it.
            (RegionMode::Shared, Peers::Cells) => used(|slot| slot.own.saturating_add(slot.reported)),
            // Written by the cell that was the owner then.
            (RegionMode::Owner | RegionMode::Leased, Peers::Cells) => used(|slot| slot.all),
        }
    }
}

/// A store that keeps record of durable counters; without a record, the store alone.
pub struct DurableStore<S, C> {
    inner: S,
    durable: Option<Arc<Durable<C>>>,
}

impl<S: CounterStore, C: Clock> DurableStore<S, C> {
    /// Puts a record in front of a store.
    pub const fn new(inner: S, durable: Option<Arc<Durable<C>>>) -> Self {
        Self { inner, durable }
    }

    /// Returns the store.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Returns the record.
    pub const fn durable(&self) -> Option<&Arc<Durable<C>>> {
        self.durable.as_ref()
    }

    /// Returns whether the store has lost counters since canaries were renewed, or this process is new to it.
    ///
    /// # Errors
    /// [`StoreError`] if the store does not answer.
    pub async fn is_lost(&self) -> Result<bool, StoreError> {
        match &self.durable {
            Some(durable) => {
                let is_lost = durable.canaries.is_lost(&self.inner).await;
                is_lost.inspect_err(|error| durable.outages.record(error))
            }
            None => Ok(false),
        }
    }

    async fn debit_recorded(&self, durable: &Durable<C>, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        if durable.saved.is_active() {
            self.restore(durable, charges).await;
        }
        let mut counted = self.as_given_back(durable, charges, |charge| !record::is_reset(charge)).await;
        self.cut_to_room(durable, &mut counted).await;
        self.record_debit(durable, &durable.taken, counted, self.inner.debit(charges)).await
    }

    async fn debit_reports(&self, durable: &Durable<C>, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        if durable.saved.is_active() {
            self.restore(durable, charges).await;
        }
        let counted = charges.iter().copied().collect();
        self.record_debit(durable, &durable.reported, counted, self.inner.debit_reported(charges)).await
    }

    /// Debits charges that are not held back, and names those that are: durable ones after an outage, until it is known whether the
    /// store has lost its counters, and until those are read back.
    async fn debit_unless_held<'c, F>(
        &self,
        durable: &Durable<C>,
        charges: &[Charge<'c>],
        debit: impl FnOnce(Vec<Charge<'c>>) -> F,
    ) -> Result<(), StoreError>
    where
        F: Future<Output = Result<(), StoreError>>,
    {
        let is_held = |at: &usize| !charges[*at].cost.is_refund() && durable.is_taken(&charges[*at]);
        let (held, others): (Vec<usize>, Vec<usize>) = (0..charges.len()).partition(is_held);
        let refusal = match durable.outages.unlooked() {
            Some(failures) if !held.is_empty() && durable.canaries.is_begun() => {
                let look = self.is_lost().await;
                look.and_then(|is_lost| durable.outages.look(failures, is_lost, durable.clock.now())).err()
            }
            _ => None,
        };
        let Some(refusal) = refusal else { return debit(charges.to_vec()).await };
        let mut errors = vec![(held, refusal)];
        if !others.is_empty() {
            let result = debit(others.iter().map(|at| charges[*at]).collect()).await;
            errors.extend(result.err().map(|error| (others, error)));
        }
        StoreError::of_debits(errors, charges.len())
    }

    /// Returns whether the store has lost counters while no process looked, or less than a minute ago. For a new process, which
    /// has not marked the store: counters that are in use may have been lost too.
    ///
    /// # Errors
    /// [`StoreError`] if the store does not answer.
    pub async fn is_new(&self) -> Result<bool, StoreError> {
        match &self.durable {
            Some(durable) => durable.canaries.is_new(&self.inner).await,
            None => Ok(false),
        }
    }

    /// Marks the store as known to this process, once what it had lost has been read back.
    ///
    /// # Errors
    /// [`StoreError`] if the store does not answer: then renew the marks.
    pub async fn write_canaries(&self) -> Result<(), StoreError> {
        match &self.durable {
            Some(durable) => durable.canaries.write(&self.inner).await,
            None => Ok(()),
        }
    }

    /// Renews the marks before they expire, unless the store has lost one.
    ///
    /// # Errors
    /// [`StoreError`] if the store does not answer, or has lost a mark.
    pub async fn renew_canaries(&self) -> Result<(), StoreError> {
        match &self.durable {
            Some(durable) => durable.canaries.renew(&self.inner).await,
            None => Ok(()),
        }
    }
}

/// Returns a charge that the store itself decides, alone.
fn at_store<'a>(charge: &Charge<'a>) -> Charge<'a> {
    Charge { enforcement: Enforcement::Independent, mode: Mode::Central, ..*charge }
}

impl<S: CounterStore, C: Clock> CounterStore for DurableStore<S, C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let Some(durable) = &self.durable else { return self.inner.charge(charges).await };
        if let Some(refusal) = durable.refusal(charges) {
            return Err(refusal);
        }
        if durable.saved.is_active() {
            self.restore(durable, charges).await;
        }
        let is_taken = |charge: &Charge<'_>| durable.is_taken(charge);
        let given_back = match charges.iter().any(|charge| charge.cost.is_refund()) {
            true => self.as_given_back(durable, charges, |_| true).await,
            false => SmallVec::new(),
        };
        let recorded = if given_back.is_empty() { charges } else { &given_back };
        let charged = self.inner.charge(charges).await.inspect_err(|error| durable.outages.record(error));
        let outcomes = charged.map_err(|error| record_if_kept(&durable.taken, recorded, error, is_taken))?;
        durable.taken.record_applied(recorded, &outcomes, is_taken);
        Ok(outcomes)
    }

    #[inline]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        let Some(durable) = &self.durable else { return self.inner.try_charge(charges, outcomes) };
        if durable.saved.is_active() && charges.iter().any(|charge| durable.must_compare(charge)) {
            return false;
        }
        if durable.unread_moves().is_some() && charges.iter().any(|charge| durable.must_wait(charge)) {
            return false;
        }
        // What the counter can give back is read first.
        if charges.iter().any(|charge| charge.cost.is_refund() && durable.is_durable(charge)) {
            return false;
        }
        let is_charged = self.inner.try_charge(charges, outcomes);
        if is_charged {
            durable.taken.record_applied(charges, outcomes, |charge| durable.is_taken(charge));
        }
        is_charged
    }

    #[inline]
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        match &self.durable {
            Some(durable) if durable.is_durable(charge) => {
                Charged::of_list(charge, |charges, outcomes| self.try_charge(charges, outcomes))
            }
            // What `try_charge` does before and after concerns durable limits only.
            _ => self.inner.try_charge_named(charge, name),
        }
    }

    #[inline]
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        self.inner.prefetch(key)
    }

    #[inline]
    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        let Some(durable) = &self.durable else { return self.inner.try_charge_each(charges, outcomes) };
        if charges.iter().any(|charge| durable.is_durable(charge)) {
            return false;
        }
        self.inner.try_charge_each(charges, outcomes)
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let Some(durable) = &self.durable else { return self.inner.debit(charges).await };
        if durable.outages.unlooked().is_some() {
            let debit = |charges: Vec<_>| async move { self.debit_recorded(durable, &charges).await };
            return self.debit_unless_held(durable, charges, debit).await;
        }
        self.debit_recorded(durable, charges).await
    }

    async fn debit_reported(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let Some(durable) = &self.durable else { return self.inner.debit_reported(charges).await };
        if durable.outages.unlooked().is_some() {
            let debit = |charges: Vec<_>| async move { self.debit_reports(durable, &charges).await };
            return self.debit_unless_held(durable, charges, debit).await;
        }
        self.debit_reports(durable, charges).await
    }

    async fn restore_lost_units(&self, charges: &[Charge<'_>]) {
        if let Some(durable) = self.durable.as_ref().filter(|durable| durable.saved.is_active()) {
            self.restore(durable, charges).await;
        }
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.inner.release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.inner.return_units(back).await?;
        if let Some(durable) = &self.durable {
            let refund = Charge::new(back.key, back.limit, Cost::refund(back.units));
            record_debited(&durable.taken, &[refund], &Ok(()), |charge| durable.is_taken(charge));
        }
        Ok(())
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        self.inner.last_known(charge)
    }

    fn is_down(&self) -> bool {
        self.inner.is_down()
    }
}
