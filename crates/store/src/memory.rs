//! In-memory store: counters of this process, in a fixed amount of memory.
//!
//! | module | contents |
//! |---|---|
//! | `config` | memory settings and errors |
//! | `hash` | counter keys as secret 64-bit names |
//! | `slot`, `cache_lines` | 16 bytes of state, and the memory they lie in (the unsafe code) |
//! | `table` | lock-free table of slots; eviction from a full window |
//! | `packed_counters` | one charge; shared counters for keys that find no slot |
//! | `multi_charge` | several charges, all or none |
//! | `batch` | many requests at one instant |
//! | `wide` | state that does not fit a slot |
//! | `huge_pages` | when to use huge pages |
//! | `stats` | statistics |
//! | `loom_model` (tests) | the table under loom |
//!
//! `docs/memory-store.md` has the bytes, the policy under a flood, the races and the costs.

mod batch;
mod cache_lines;
mod config;
mod hash;
mod huge_pages;
#[cfg(test)]
mod loom_model;
mod multi_charge;
mod packed_counters;
mod slot;
mod stats;
mod table;
mod wide;

use cache_lines::{LINE, MmapLines};
use huge_pages::Pages;
use multi_charge::PreparedCharge;
use packed_counters::{ChargeKind, PackedCharge, PackedCounters};
use slot::SlotValue;
use smallvec::{SmallVec, smallvec};
use stats::{Counts, Event};
use std::sync::LazyLock;
use table::{Insertion, Table, WINDOW};
use tollgate_core::{
    Admission, Algorithm, Charge, Charged, Clock, Cost, CounterKey, CounterStore, Enforcement, Limit,
    LimitSpec, Outcome, Outcomes, Permit, Rate, State, StoreError, TimeDelta, Timestamp, UnitReturn, Verdict,
    nonzero,
};
use wide::{LockedShards, WideCharge, WideCounters};

pub use cache_lines::prefetch;
pub use config::{MemoryConfig, MemoryError};
pub use hash::KeyHasher;
pub use huge_pages::HugePages;
pub use stats::MemoryStats;

/// Counters in memory.
///
/// ```
/// use tollgate_core::{Algorithm, Charge, Cost, CounterKey, LimitSpec, ManualClock, KeyPart, Rate, Scope, nonzero};
/// use tollgate_core::{Admission, Timestamp};
/// use tollgate_store::{MemoryConfig, MemoryStore};
///
/// let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), ManualClock::at(Timestamp::from_secs(1_000)))?;
/// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(2))).build()?;
/// let scope = Scope::new("api/user");
/// let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
/// let charges = [Charge::new(key, &limit, Cost::ONE)];
/// assert_eq!(store.apply(&charges).admission, Admission::Admitted);
/// assert_eq!(store.apply(&charges).per_charge[0].remaining, 0);
/// assert_eq!(store.apply(&charges).admission, Admission::Denied);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MemoryStore<C> {
    clock: C,
    hasher: KeyHasher,
    counters: PackedCounters<MmapLines>,
    wide: WideCounters,
    pages: Pages,
    bytes: usize,
}

impl<C: Clock> MemoryStore<C> {
    /// Reserves the memory. Nothing is touched yet.
    ///
    /// # Errors
    /// Returns a [`MemoryError`] if the configuration is invalid, or the system cannot provide the memory.
    pub fn new(config: &MemoryConfig, clock: C) -> Result<Self, MemoryError> {
        let bytes = config.bytes;
        if bytes < MemoryConfig::MIN_BYTES {
            return Err(MemoryError::TooSmall { given: bytes });
        }
        let wide = config.wide_bytes.unwrap_or(bytes / 8);
        if wide > bytes / 2 {
            return Err(MemoryError::WideTooLarge { wide, bytes });
        }
        // 64Ki shared counters, or a thirty-second of a small store.
        let shared = (bytes / 32).min(1 << 20);
        let table = |bytes: usize, mark: u16| {
            let lines = (bytes / LINE).max(WINDOW);
            let mapped = MmapLines::new(lines).map_err(|source| MemoryError::Map { bytes, source })?;
            Ok(Table::new(mapped, lines, mark))
        };
        let keys = table(
            (bytes - wide - shared).saturating_sub(config.other_bytes),
            packed_counters::PROTECTED_PRESSURE,
        )?;
        let pages = Pages::new(config.huge_pages, keys.lines());
        Ok(Self {
            clock,
            hasher: KeyHasher::of_process(),
            counters: PackedCounters {
                keys,
                shared: table(shared, packed_counters::NO_PROTECTION)?,
                counts: Counts::default(),
                shared_counts: Counts::default(),
            },
            wide: WideCounters::new(wide),
            pages,
            bytes,
        })
    }

    /// Charges one request at the current time, without waiting. The clock is read once.
    #[inline]
    pub fn apply(&self, charges: &[Charge<'_>]) -> Outcomes {
        self.charge_when(|| self.clock.now(), charges)
    }

    /// Charges one request at `now`.
    #[inline]
    pub fn charge_at(&self, now: Timestamp, charges: &[Charge<'_>]) -> Outcomes {
        self.charge_when(|| now, charges)
    }

    #[inline(always)]
    fn charge_when(&self, now: impl FnOnce() -> Timestamp, charges: &[Charge<'_>]) -> Outcomes {
        let [charge] = charges else { return self.charge_list(now, charges) };
        let name = self.hasher.name(&charge.key);
        self.counters.keys.prefetch(name);
        let at = now();
        let outcomes = |outcome| {
            let admission = Outcomes::admission(std::iter::once((charge.enforcement, &outcome)));
            Outcomes { admission, at, per_charge: smallvec![outcome] }
        };
        let ask = self.packed_charge_by_name(charge, name, at);
        // Both paths have their own list: an outcome that they share would go through memory.
        match ask.as_ref().and_then(|ask| self.counters.charge_known(ask)) {
            Some(outcome) => outcomes(outcome),
            None => outcomes(self.charge_elsewhere(ask.as_ref(), charge, at)),
        }
    }

    /// Charges a counter that is not packed, or not on the fast path.
    #[cold]
    #[inline(never)]
    fn charge_elsewhere(
        &self,
        ask: Option<&PackedCharge<'_>>,
        charge: &Charge<'_>,
        now: Timestamp,
    ) -> Outcome {
        match ask {
            Some(ask) => self.charge_slowly(ask, charge),
            None => self.charge_wide(now, charge),
        }
    }

    /// Charges a request of several limits.
    #[inline(always)]
    fn charge_list(&self, now: impl FnOnce() -> Timestamp, charges: &[Charge<'_>]) -> Outcomes {
        let mut names: SmallVec<[u64; 8]> = SmallVec::new();
        for charge in charges {
            let name = self.hasher.name(&charge.key);
            self.counters.keys.prefetch(name);
            names.push(name);
        }
        let now = now();
        let ask = |i: usize| self.packed_charge_by_name(&charges[i], names[i], now);
        let known = multi_charge::charge_known(&self.counters, &names, ask, |i| {
            self.refund_moved(now, &charges[i]);
        });
        match known {
            Some(each) => Outcomes { admission: Admission::Admitted, at: now, per_charge: each },
            None => self.charge_many(now, charges, &names),
        }
    }

    /// Applies one packed charge on the general path.
    #[cold]
    #[inline(never)]
    fn charge_slowly(&self, ask: &PackedCharge<'_>, charge: &Charge<'_>) -> Outcome {
        self.charge_packed(ask, charge, ChargeKind::Charge)
    }

    /// Charges a counter of a packed limit, wherever its state is. Under the lock it cannot move.
    fn charge_packed(&self, ask: &PackedCharge<'_>, charge: &Charge<'_>, kind: ChargeKind) -> Outcome {
        if !self.wide.may_hold_packable() {
            return self.charge_in_table(ask, kind);
        }
        let asks = [self.wide_charge(charge, ask.now)];
        let mut locked = self.wide.lock(&asks, &self.counters.counts);
        if locked.holds(&asks[0]) {
            let (outcome, _) = locked.charge(&asks[0], kind);
            self.move_to_table(ask, &mut locked, &asks[0], &outcome);
            return outcome;
        }
        self.charge_in_table(ask, kind)
    }

    fn charge_in_table(&self, ask: &PackedCharge<'_>, kind: ChargeKind) -> Outcome {
        let (outcome, receipt) = self.counters.charge(ask, kind);
        if receipt.before.meta == 0 {
            self.pages.grown(&self.counters);
        }
        outcome
    }

    /// Refunds a charge of this moment whose counter has moved to the wide ones since.
    #[cold]
    fn refund_moved(&self, now: Timestamp, charge: &Charge<'_>) {
        if self.wide.may_hold_packable() {
            let back = Charge { cost: charge.cost.negated(), ..*charge };
            self.debit_at(now, &[back]);
        }
    }

    /// Moves a state that fits a slot again, once its limit has changed it, back where charges need no lock.
    fn move_to_table(
        &self,
        ask: &PackedCharge<'_>,
        locked: &mut LockedShards<'_>,
        wide: &WideCharge<'_>,
        outcome: &Outcome,
    ) {
        if outcome.verdict.is_denied() || ask.cost.is_peek() {
            return;
        }
        let Some((word, layout)) = locked.state(wide).and_then(|state| ask.limit.pack(state, outcome)) else {
            return;
        };
        let slot = SlotValue::new(ask.name, layout, word);
        let inserted = self.counters.keys.insert(ask.name, ask.now, slot, &self.counters.counts);
        if let Insertion::Filled(_) = inserted {
            locked.remove(wide);
        }
    }

    #[inline(never)]
    fn charge_wide(&self, now: Timestamp, charge: &Charge<'_>) -> Outcome {
        self.charge_wide_as(now, charge, ChargeKind::Charge)
    }

    fn charge_wide_as(&self, now: Timestamp, charge: &Charge<'_>, kind: ChargeKind) -> Outcome {
        let asks = [self.wide_charge(charge, now)];
        self.wide.note_limit(charge.limit);
        let mut locked = self.wide.lock(&asks, &self.counters.counts);
        match self.move_to_wide(&asks[0], &mut locked) {
            Some(denied) => denied,
            None => locked.charge(&asks[0], kind).0,
        }
    }

    /// Moves the state of a counter that a limit with other numbers left in the table to where this limit's states are.
    /// Where there is no memory for it, it stays in the table: if it denies the charge, that outcome is returned,
    /// otherwise the charge goes where those of new keys go.
    fn move_to_wide(&self, ask: &WideCharge<'_>, locked: &mut LockedShards<'_>) -> Option<Outcome> {
        if !ask.limit.may_be_packed() || locked.holds(ask) {
            return None;
        }
        // The lower half of the long name is the name in the table.
        while let Some((at, seen)) = self.counters.keys.find(ask.name as u64) {
            let mut state = ask.limit.unpack(seen.layout(), seen.word, ask.moment);
            if seen.is_free(ask.now) {
                // It would be found before what is now counted elsewhere.
                if self.counters.keys.replace(at, seen, SlotValue::EMPTY) {
                    return None;
                }
                continue;
            }
            if state == State::Unused {
                // Of another algorithm, which has its own counters.
                return None;
            }
            if !locked.has_room_for(ask, &state) {
                let outcome = ask.limit.step(&mut state, ask.moment, ask.cost);
                return outcome.verdict.is_denied().then_some(outcome);
            }
            if self.counters.keys.replace(at, seen, SlotValue::EMPTY) {
                locked.take_over(ask, state);
                return None;
            }
        }
        None
    }

    #[inline(never)]
    fn charge_many(&self, now: Timestamp, charges: &[Charge<'_>], names: &[u64]) -> Outcomes {
        let mut items: SmallVec<[PreparedCharge<'_>; 8]> = SmallVec::new();
        let mut packed = true;
        for (charge, name) in charges.iter().zip(names) {
            let ask = self.packed_charge_by_name(charge, *name, now);
            if ask.is_none() {
                packed = false;
                self.wide.note_limit(charge.limit);
            }
            items.push(PreparedCharge::new(ask, charge.enforcement, PENDING_OUTCOME));
        }
        let admission = if packed && !self.wide.may_hold_packable() {
            multi_charge::charge_all(&self.counters, &mut items)
        } else {
            self.charge_mixed(now, charges, names, &mut items)
        };
        if items.iter().any(PreparedCharge::is_new_key) {
            self.pages.grown(&self.counters);
        }
        Outcomes { admission, at: now, per_charge: items.iter().map(|item| item.outcome).collect() }
    }

    /// Charges wide counters first, under their locks; then the packed ones; if denied, undoes the former. All counters
    /// are locked if any of them may move between the tables.
    fn charge_mixed(
        &self,
        now: Timestamp,
        charges: &[Charge<'_>],
        names: &[u64],
        items: &mut [PreparedCharge<'_>],
    ) -> Admission {
        let moves = self.wide.may_hold_packable();
        let asks: SmallVec<[WideCharge<'_>; 8]> =
            charges.iter().map(|charge| self.wide_charge(charge, now)).collect();
        let wanted: SmallVec<[usize; 8]> =
            (0..items.len()).filter(|i| moves || items[*i].charge.is_none()).collect();
        let mut locked = self.wide.lock_some(wanted.iter().map(|i| &asks[*i]), &self.counters.counts);
        // A counter is charged in one place, also by a request that meets it with several limits.
        let wide_limits: SmallVec<[u64; 8]> =
            (0..items.len()).filter(|i| items[*i].charge.is_none()).map(|i| names[i]).collect();
        let mut settled: SmallVec<[usize; 8]> = SmallVec::new();
        for i in 0..items.len() {
            if items[i].charge.is_none() {
                if let Some(denied) = self.move_to_wide(&asks[i], &mut locked) {
                    items[i].outcome = denied;
                    settled.push(i);
                }
            } else if moves && (wide_limits.contains(&names[i]) || locked.holds(&asks[i])) {
                items[i].charge = None;
            }
        }
        let aside_at: SmallVec<[usize; 8]> =
            (0..items.len()).filter(|i| items[*i].charge.is_none() && !settled.contains(i)).collect();
        let mut undos: SmallVec<[(usize, wide::Undo); 8]> = SmallVec::new();
        // Independent ones first, as in `multi_charge`.
        for independent in [true, false] {
            for i in &aside_at {
                if items[*i].is_independent() == independent {
                    let (outcome, undo) = locked.charge(&asks[*i], ChargeKind::Charge);
                    items[*i].outcome = outcome;
                    if !independent {
                        undos.push((*i, undo));
                    }
                }
            }
        }
        let admission = multi_charge::charge_all(&self.counters, items);
        if admission == Admission::Denied {
            for (i, undo) in undos.into_iter().rev() {
                locked.undo(&asks[i], undo);
            }
            for i in aside_at {
                let item = &mut items[i];
                if !item.is_independent() && item.outcome.verdict.is_allowed() {
                    item.outcome = Outcome { verdict: item.outcome.verdict, ..locked.peek(&asks[i]) };
                }
            }
        }
        admission
    }

    /// Returns statistics of the store. Takes some microseconds, so it must not be called for every request.
    pub fn stats(&self) -> MemoryStats {
        const SAMPLE: usize = 1 << 14;
        let PackedCounters { keys, counts, shared_counts, .. } = &self.counters;
        let sample = SAMPLE.min(keys.slots());
        let live = keys.sample_live(sample, self.clock.now());
        MemoryStats {
            bytes_cap: self.bytes as u64,
            slots: keys.slots() as u64,
            live: (live as u128 * keys.slots() as u128 / sample as u128) as u64,
            inserted: counts.total(Event::Inserted),
            reused: counts.total(Event::Reused),
            evicted: counts.total(Event::Evicted),
            overflowed: counts.total(Event::Overflowed),
            overflow_evicted: shared_counts.total(Event::Evicted),
            wide: self.wide.entries() as u64,
            wide_bytes: self.wide.bytes() as u64,
            wide_evicted: counts.total(Event::WideEvicted),
            wide_overflowed: counts.total(Event::WideOverflowed),
            wide_denied: counts.total(Event::WideDenied),
        }
    }

    /// Converts to a charge of a packed counter with this name. Returns `None` if the counter is wide.
    #[inline(always)]
    fn packed_charge_by_name<'a>(
        &self,
        charge: &Charge<'a>,
        name: u64,
        now: Timestamp,
    ) -> Option<PackedCharge<'a>> {
        let tag = charge.limit.packed()?.tag;
        Some(PackedCharge {
            name,
            shared: self.hasher.shared_name(&charge.key, name),
            limit: charge.limit,
            tag,
            cost: charge.cost,
            now,
            moment: now + phase(charge),
        })
    }

    fn wide_charge<'a>(&self, charge: &Charge<'a>, now: Timestamp) -> WideCharge<'a> {
        let name = self.hasher.name(&charge.key);
        WideCharge {
            name: self.hasher.long_name(&charge.key, name),
            shared: u128::from(self.hasher.shared_name(&charge.key, 0)),
            limit: charge.limit,
            cost: charge.cost,
            now,
            moment: now + phase(charge),
            id: charge.permit,
        }
    }
}

/// One per minute: as long as a duplicate message might be in flight.
static ONCE: LazyLock<Limit> = LazyLock::new(|| {
    let spec = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(1)));
    spec.build().unwrap_or_else(|_| unreachable!("one a minute is a limit"))
});

/// Placeholder in an item until it is charged.
const PENDING_OUTCOME: Outcome = Outcome { verdict: Verdict::ALLOWED, ..Outcome::UNKNOWN };

#[inline]
fn phase(charge: &Charge<'_>) -> TimeDelta {
    if charge.limit.is_jittered() { charge.limit.phase(charge.key.stable_hash()) } else { TimeDelta::ZERO }
}

impl<C: Clock> CounterStore for MemoryStore<C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        Ok(self.apply(charges))
    }

    #[inline(always)]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        match charges {
            [charge] => {
                let name = self.hasher.name(&charge.key);
                self.counters.keys.prefetch(name);
                let charged = self.try_charge_named(charge, name);
                charged.is_some_and(|charged| {
                    charged.write_to(charge, outcomes);
                    true
                })
            }
            _ => {
                *outcomes = self.charge_list(|| self.clock.now(), charges);
                true
            }
        }
    }

    #[inline(always)]
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        let name = self.hasher.name(key);
        self.counters.keys.prefetch(name);
        Some(name)
    }

    /// The caller has prefetched the counter's line; the clock is read while that is on its way.
    #[inline(always)]
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        let at = self.clock.now();
        let ask = self.packed_charge_by_name(charge, name, at);
        // Two results, as above: one that both paths share would go through memory.
        match ask.as_ref().and_then(|ask| self.counters.charge_known(ask)) {
            Some(outcome) => Some(Charged { at, outcome }),
            None => Some(Charged { at, outcome: self.charge_elsewhere(ask.as_ref(), charge, at) }),
        }
    }

    #[inline]
    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        self.charge_each(self.clock.now(), charges, outcomes);
        true
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.debit_at(self.clock.now(), charges);
        Ok(())
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        let now = self.clock.now();
        for permit in permits {
            let charge = Charge {
                enforcement: Enforcement::Independent,
                permit: permit.id,
                ..Charge::new(permit.key, permit.limit, Cost::PEEK)
            };
            let asks = [self.wide_charge(&charge, now)];
            self.wide.lock(&asks, &self.counters.counts).release(&asks[0]);
        }
        Ok(())
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let now = self.clock.now();
        // A counter that allows one charge: it denies a second return of the same units.
        let scope = back.key.scope.sibling(&format!("|back|{:x}", back.id.0));
        let once = Charge::new(CounterKey { scope: &scope, ..back.key }, &ONCE, Cost::ONE);
        let phase = back.limit.phase(back.key.stable_hash());
        let units = back.limit.refundable(back.units, back.taken_at + phase, now + phase);
        let look = self.charge_at(now, &[Charge::new(back.key, back.limit, Cost::PEEK)]).per_charge[0];
        let last = back.limit.can_return(back.full_at, now, look.reset_after);
        if self.charge_at(now, &[once]).admission == Admission::Admitted && units > 0 && last {
            self.debit_at(now, &[Charge::new(back.key, back.limit, Cost::refund(units))]);
        }
        Ok(())
    }
}
