//! Leases: decisions from units that the authority has already deducted, without a network call on the fast path and
//! never above the limit. `docs/leases.md` has the theorem and its proof.
//!
//! | module | contents |
//! |---|---|
//! | `config` | the settings |
//! | `units` | units of one refill, and until when each is valid |
//! | `key_lease` | one key's lease: available units, the authority's last known state, the next refill |
//! | `spare` | slots of refunded units |
//! | `table` | leases by key |
//! | `refund` | where refunds go while leases are outstanding |
//! | `hot_list` | counters that other processes have found hot |
//! | `tasks` | refilling and returning units in the background |
//! | `stats` | statistics |
//!
//! A request is decided locally first: local counters, then leases; the remaining charges go to the inner store in one
//! call. If any of them is denied, what was taken locally is undone: all or none, as everywhere. A key without
//! available units is charged in the store like any other, and a lease is requested in the background.

mod config;
mod hot_list;
mod key_lease;
mod refund;
mod spare;
mod stats;
mod table;
mod tasks;
mod units;

pub use config::LeaseConfig;
pub use hot_list::{CounterNamer, HotCounter};
pub use stats::LeaseStats;
pub use table::HotKey;
pub use tasks::LeaseTask;

use crate::hot_key::HotKeys;
use crate::memory::{KeyHasher, MemoryStore};
use hot_list::HotList;
use key_lease::{LeaseKey, SpendReceipt, SpendResult};
use refund::RefundLocks;
use smallvec::SmallVec;
use stats::{Counts, add};
use table::Table;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterStore, Enforcement, LastKnown, LimitParams, Mode, Outcome,
    Outcomes, Permit, StoreError, TimeDelta, Timestamp, UnitReturn,
};

/// Maximum bytes of the values of a key that is leased; a longer one is decided by the store each time.
const MAX_LEASED_KEY: usize = 512;

/// A store with leases in front of it.
///
/// `S` decides charges that are not leased; `A` is the authority that grants leases: the same counters, without a deny
/// cache in between.
pub struct LeasedStore<S, A, C> {
    inner: S,
    authority: A,
    clock: C,
    hasher: KeyHasher,
    config: LeaseConfig,
    table: Table,
    hot: Option<HotKeys>,
    hot_list: HotList,
    /// Counters of this node only, for rules with local counters.
    local: Option<MemoryStore<C>>,
    /// Refunds under way, one for each key.
    refunding: RefundLocks,
    counts: Counts,
}

/// Result of deciding a request locally.
#[derive(Default)]
struct LocalOutcomes {
    /// One outcome per charge; `None` for charges that the store must decide.
    per_charge: SmallVec<[Option<Outcome>; 4]>,
    /// Units spent: counter name and receipt.
    spent: SmallVec<[(u64, SpendReceipt); 4]>,
    /// A required charge was denied.
    is_denied: bool,
    /// Indices of the charges applied to this node's local counters.
    local: SmallVec<[usize; 4]>,
}

impl LocalOutcomes {
    /// Returns when leased units were spent, by the authority's clock or a little earlier; `None` if none were.
    #[inline]
    fn taken_at(&self) -> Option<Timestamp> {
        self.spent.iter().map(|(_, receipt)| receipt.taken_at).min()
    }
}

impl<S: CounterStore, A: CounterStore, C: Clock + Clone> LeasedStore<S, A, C> {
    /// Puts leases granted by `authority` in front of `inner`, timed by this node's monotonic clock.
    pub fn new(inner: S, authority: A, clock: C, config: LeaseConfig) -> Self {
        Self {
            inner,
            authority,
            clock,
            hasher: KeyHasher::of_process(),
            hot: config.hot.map(HotKeys::new),
            hot_list: HotList::default(),
            table: Table::new(config.max_keys),
            config,
            local: None,
            refunding: RefundLocks::default(),
            counts: Counts::default(),
        }
    }

    /// Adds counters of this node only, for rules with local counters.
    #[must_use]
    pub fn with_local(mut self, counters: MemoryStore<C>) -> Self {
        self.local = Some(counters);
        self
    }

    /// Returns the inner store.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Returns the lease settings.
    pub const fn config(&self) -> &LeaseConfig {
        &self.config
    }

    /// Returns lease statistics. Visits every lease, so it must not be called for every request.
    pub fn stats(&self) -> LeaseStats {
        self.counts.with_present(self.table.stats(self.clock.now()))
    }

    /// Returns the keys with the most traffic at this node, hottest first.
    pub fn hot_keys(&self, most: usize) -> Vec<HotKey> {
        self.table.hottest(most, self.config.hot.unwrap_or(1_000), self.clock.now())
    }

    /// Names counters for the processes that exchange which of them are hot. Call it once, before the first charge.
    pub fn share_hot_keys(&self, namer: CounterNamer) {
        self.hot_list.set_namer(namer);
    }

    /// Returns the counters that are hot by the traffic of this process, hottest first; none before
    /// [`LeasedStore::share_hot_keys`].
    pub fn hot_counters(&self, max: usize) -> Vec<HotCounter> {
        self.config.hot.map_or_else(Vec::new, |hot| self.table.hot_counters(max, hot, self.clock.now()))
    }

    /// Replaces the list of counters that are hot in other processes. Each is leased from its next charge on, if its rule
    /// allows that, until the list no longer has it or `lifetime` has passed.
    pub fn set_hot_list(&self, names: impl IntoIterator<Item = u64>, lifetime: TimeDelta) {
        self.hot_list.replace(names.into_iter().collect(), self.clock.now() + lifetime);
    }

    /// Returns whether a charge may be paid from a lease.
    fn is_leasable(charge: &Charge<'_>) -> bool {
        matches!(charge.mode, Mode::Leased | Mode::Adaptive)
            && charge.enforcement != Enforcement::Alternative
            && !charge.cost.is_refund()
            && !charge.cost.is_peek()
    }

    /// Decides the charges that can be decided locally. With `only_whole`, gives up at the first charge that cannot.
    #[inline]
    fn decide_locally(
        &self,
        charges: &[Charge<'_>],
        only_whole: bool,
        now: Timestamp,
    ) -> Option<LocalOutcomes> {
        let mut near = LocalOutcomes {
            per_charge: SmallVec::from_elem(None, charges.len()),
            ..LocalOutcomes::default()
        };
        if charges.iter().any(is_local) {
            self.charge_local_counters(charges, &mut near);
        }
        for (at, charge) in charges.iter().enumerate() {
            if near.is_denied && charge.enforcement != Enforcement::Independent
                || near.per_charge[at].is_some()
            {
                continue;
            }
            let spent = if Self::is_leasable(charge) {
                let name = self.hasher.name(&charge.key);
                (name, self.table.spend(name, charge, now))
            } else {
                (0, SpendResult::Empty)
            };
            match spent {
                (name, SpendResult::Spent(outcome, receipt)) => {
                    near.per_charge[at] = Some(outcome);
                    near.spent.push((name, receipt));
                }
                (_, SpendResult::Denied(outcome)) => {
                    near.per_charge[at] = Some(outcome);
                    near.is_denied |= charge.enforcement == Enforcement::Required;
                }
                (_, SpendResult::Empty) if only_whole => {
                    self.undo(charges, &mut near);
                    return None;
                }
                (_, SpendResult::Empty) => {}
            }
        }
        Some(near)
    }

    /// Charges this node's local counters, all or none.
    #[cold]
    fn charge_local_counters(&self, charges: &[Charge<'_>], near: &mut LocalOutcomes) {
        let Some(local) = &self.local else { return };
        let here: SmallVec<[usize; 4]> = (0..charges.len()).filter(|at| is_local(&charges[*at])).collect();
        let own: SmallVec<[Charge<'_>; 4]> = here.iter().map(|at| charges[*at]).collect();
        let outcomes = local.apply(&own);
        near.is_denied |= outcomes.admission == Admission::Denied;
        for (at, outcome) in here.into_iter().zip(outcomes.per_charge) {
            near.per_charge[at] = Some(outcome);
            let bound = charges[at].enforcement != Enforcement::Independent;
            if bound && outcomes.admission == Admission::Admitted && outcome.verdict.is_allowed() {
                near.local.push(at);
            }
        }
    }

    /// Undoes what a denied request took locally, and updates the outcomes to what remains without it.
    #[cold]
    fn undo(&self, charges: &[Charge<'_>], near: &mut LocalOutcomes) {
        if !near.spent.is_empty() {
            let now = self.clock.now();
            near.spent.iter().for_each(|(name, receipt)| self.table.unspend(*name, *receipt, now));
        }
        let Some(local) = &self.local else { return };
        let alone = |at: usize, cost| Charge { enforcement: Enforcement::Independent, cost, ..charges[at] };
        for at in near.local.iter().rev() {
            let _ = local.apply(&[alone(*at, charges[*at].cost.negated())]);
        }
        for at in near.local.drain(..) {
            let left = local.apply(&[alone(at, Cost::PEEK)]).per_charge[0];
            if let Some(outcome) = &mut near.per_charge[at] {
                *outcome = Outcome { verdict: outcome.verdict, ..left };
            }
        }
    }

    /// Returns the outcomes of a request, undoing local charges if it is denied.
    #[inline]
    fn finish_locally(&self, charges: &[Charge<'_>], mut near: LocalOutcomes, now: Timestamp) -> Outcomes {
        if near.is_denied {
            self.undo(charges, &mut near);
        }
        let admission = if near.is_denied { Admission::Denied } else { Admission::Admitted };
        let undecided = |charge| match near.is_denied {
            true => LastKnown::repeated(&self.inner, charge),
            false => Outcome::UNKNOWN,
        };
        let outcomes = charges.iter().zip(&near.per_charge);
        let each = outcomes.map(|(charge, own)| own.unwrap_or_else(|| undecided(charge))).collect();
        Outcomes { admission, at: near.taken_at().unwrap_or(now), per_charge: each }
    }

    /// Charges the store for the remaining charges, and merges the outcomes.
    async fn charge_rest(
        &self,
        charges: &[Charge<'_>],
        mut near: LocalOutcomes,
        now: Timestamp,
    ) -> Result<Outcomes, StoreError> {
        // After a denial nothing more is taken; independent charges still count.
        let asked = |at: &usize| {
            near.per_charge[*at].is_none()
                && (!near.is_denied || charges[*at].enforcement == Enforcement::Independent)
        };
        let rest: SmallVec<[usize; 4]> = (0..charges.len()).filter(asked).collect();
        if rest.is_empty() {
            return Ok(self.finish_locally(charges, near, now));
        }
        let wanted: SmallVec<[Charge<'_>; 4]> = rest.iter().map(|at| charges[*at]).collect();
        add(&self.counts.central, rest.len() as u64);
        let outcomes = match self.inner.charge(&wanted).await {
            Ok(outcomes) => outcomes,
            Err(error) => {
                self.undo(charges, &mut near);
                return Err(remap_error(error, &rest, charges.len()));
            }
        };
        let received_at = self.clock.now();
        for (charge, outcome) in wanted.iter().zip(&outcomes.per_charge) {
            if Self::is_leasable(charge) {
                self.record_outcome(charge, outcome, now, received_at);
            }
        }
        let mut whole = near;
        for (at, outcome) in rest.into_iter().zip(outcomes.per_charge) {
            whole.per_charge[at] = Some(outcome);
        }
        whole.is_denied |= outcomes.admission == Admission::Denied;
        let at = whole.taken_at().map_or(outcomes.at, |taken_at| taken_at.min(outcomes.at));
        let local = self.finish_locally(charges, whole, now);
        Ok(Outcomes { at, ..local })
    }

    /// Records an outcome of the store, and requests a lease if one is due.
    fn record_outcome(&self, charge: &Charge<'_>, outcome: &Outcome, asked: Timestamp, now: Timestamp) {
        let name = self.hasher.name(&charge.key);
        let units = charge.cost.units();
        let promotes = charge.mode == Mode::Adaptive;
        let is_hot = promotes && self.hot.as_ref().is_some_and(|hot| hot.count(name, units, now));
        let is_listed = promotes && !is_hot && self.hot.is_some() && self.hot_list.contains(&charge.key, now);
        let due = if promotes {
            is_hot || is_listed
        } else {
            self.table.was_seen(name, now, self.config.max_gap(charge.limit))
        };
        // A lease keeps its key. Keys with long values are few, or a client invents them.
        let due = due && charge.key.value_bytes() <= MAX_LEASED_KEY;
        let key = || LeaseKey::from_charge(charge, &self.config, self.hot_list.name(&charge.key));
        if self.table.record_outcome(name, charge, outcome, asked, due.then_some(key), now) && promotes {
            add(&self.counts.promoted, 1);
            add(&self.counts.listed, u64::from(is_listed));
        }
    }
}

/// Returns whether a charge is decided by this node's local counters. Alternatives, of which one must fit, are always
/// decided by the store.
fn is_local(charge: &Charge<'_>) -> bool {
    charge.mode == Mode::Local && charge.enforcement != Enforcement::Alternative
}

/// Returns whether a charge refunds a bucket that may be leased: that is possible only while no lease of it is
/// outstanding.
fn is_guarded(charge: &Charge<'_>) -> bool {
    charge.cost.is_refund()
        && matches!(charge.mode, Mode::Leased | Mode::Adaptive)
        && matches!(charge.limit.params(), LimitParams::Bucket { .. })
}

/// Returns whether a charge leaves nothing of its counter used.
fn is_reset(charge: &Charge<'_>) -> bool {
    charge.cost.is_refund() && charge.cost.units() >= charge.limit.refill_cost()
}

/// Maps an error about the charges in `rest` to an error about the whole request.
fn remap_error(error: StoreError, rest: &[usize], all: usize) -> StoreError {
    match error {
        StoreError::Partial { failed, cause: why } => {
            let failed = failed.into_iter().filter_map(|at| rest.get(at).copied()).collect();
            StoreError::Partial { failed, cause: why }
        }
        error if rest.len() < all => StoreError::Partial { failed: rest.to_vec(), cause: Box::new(error) },
        error => error,
    }
}

impl<S: CounterStore, A: CounterStore, C: Clock + Clone> CounterStore for LeasedStore<S, A, C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        if charges.iter().any(is_guarded) {
            return self.charge_and_refund(charges).await;
        }
        let now = self.clock.now();
        match self.decide_locally(charges, false, now) {
            Some(near) => self.charge_rest(charges, near, now).await,
            None => self.inner.charge(charges).await,
        }
    }

    #[inline]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        // The common request: one charge, nothing to merge and nothing to undo.
        if let [charge] = charges
            && Self::is_leasable(charge)
        {
            let now = self.clock.now();
            let (outcome, denied, at) = match self.table.spend(self.hasher.name(&charge.key), charge, now) {
                SpendResult::Spent(outcome, receipt) => (outcome, false, receipt.taken_at),
                SpendResult::Denied(outcome) => (outcome, charge.enforcement == Enforcement::Required, now),
                SpendResult::Empty => return false,
            };
            outcomes.admission = if denied { Admission::Denied } else { Admission::Admitted };
            outcomes.at = at;
            outcomes.per_charge.push(outcome);
            return true;
        }
        let near = |charge: &Charge<'_>| match charge.mode {
            Mode::Central => false,
            Mode::Local => self.local.is_some() && is_local(charge),
            Mode::Adaptive | Mode::Leased => true,
        };
        if !charges.iter().all(near) {
            return self.inner.try_charge(charges, outcomes);
        }
        let now = self.clock.now();
        let Some(near) = self.decide_locally(charges, true, now) else { return false };
        *outcomes = self.finish_locally(charges, near, now);
        true
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let asked = self.clock.now();
        let (mut here, mut refunds, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (at, charge) in charges.iter().enumerate() {
            match self.local.is_some() && is_local(charge) {
                true => here.push(at),
                false if is_guarded(charge) => refunds.push(at),
                false => others.push(at),
            }
        }
        let some = |places: &[usize]| -> Vec<Charge<'_>> { places.iter().map(|at| charges[*at]).collect() };
        // A part that fails keeps none of the others from being debited, and the error names it.
        let mut errors = Vec::new();
        if let Some(local) = self.local.as_ref().filter(|_| !here.is_empty())
            && let Err(error) = local.debit(&some(&here)).await
        {
            errors.push((here, error));
        }
        if !others.is_empty() {
            // A reset gives back what is leased too: spent afterwards, it would be counted nowhere.
            for charge in others.iter().map(|at| &charges[*at]).filter(|charge| is_reset(charge)) {
                self.table.reset(self.hasher.name(&charge.key));
            }
            if let Err(error) = self.inner.debit(&some(&others)).await {
                errors.push((others.clone(), error));
            }
            for at in others.into_iter().filter(|at| charges[*at].cost.is_refund()) {
                self.table.refunded(self.hasher.name(&charges[at].key));
            }
        }
        for at in refunds {
            if let Err(error) = self.refund(&charges[at], asked).await {
                errors.push((vec![at], error));
            }
        }
        StoreError::of_debits(errors, charges.len())
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        if let Some(local) = &self.local {
            local.release(permits).await?;
        }
        self.inner.release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.inner.return_units(back).await
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        self.inner.last_known(charge)
    }

    fn is_down(&self) -> bool {
        self.inner.is_down()
    }

    fn leased_units(&self, charge: &Charge<'_>) -> u64 {
        self.table.available(self.hasher.name(&charge.key), self.clock.now())
    }
}
