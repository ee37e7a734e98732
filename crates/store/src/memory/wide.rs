//! Wide counters: state that does not fit a table slot (logs, permits, strict windows, wide buckets).
//!
//! Shards of a map, each under a mutex. A request locks all shards it needs, in order, before it charges any: its wide
//! charges are taken together or not at all under those locks. Bytes are counted over all shards and bounded.
//!
//! When memory is short, a new key evicts expired entries, or the least used of a few that it inspects, with the same
//! protection threshold as in the table; otherwise it is charged on a state shared with the other new keys of its scope
//! in its shard. When a state would have to grow (a log) and nothing can be evicted, the charge is denied: the memory
//! bound comes before anything else.

use super::packed_counters::{ChargeKind, PROTECTED_PRESSURE};
use super::stats::{Counts, Event};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Cost, Limit, Outcome, PermitId, State, TimeDelta, Timestamp, Verdict};

pub(super) use undo::Undo;

mod undo;

const SHARDS: usize = 64;
/// Bytes of an entry besides what its state points to: itself, its index entry, and their spare capacity.
const ENTRY: usize = 2 * (size_of::<WideEntry>() + size_of::<(u128, u32)>() + 8);
/// How many entries a new key inspects in search of room.
const PROBES: usize = 8;
/// How many entries a new key inspects in any case, so that expired entries are removed.
const SWEEP: usize = 2;

pub(super) struct WideCounters {
    shards: Box<[Mutex<WideShard>]>,
    bytes: AtomicUsize,
    entries: AtomicUsize,
    budget: usize,
    /// Whether a limit was charged here whose counter another limit, with smaller numbers, may charge in the table.
    packable: AtomicBool,
}

/// One charge of a wide counter.
#[derive(Clone, Copy)]
pub(super) struct WideCharge<'a> {
    pub(super) name: u128,
    /// Name of the shared state, for use if there is no memory for an own one.
    pub(super) shared: u128,
    pub(super) limit: &'a Limit,
    pub(super) cost: Cost,
    pub(super) now: Timestamp,
    /// `now` shifted into the windows of this key.
    pub(super) moment: Timestamp,
    pub(super) id: PermitId,
}

impl WideCharge<'_> {
    fn shard(&self) -> usize {
        self.name as usize % SHARDS
    }

    fn apply(&self, state: &mut State, manner: ChargeKind) -> Outcome {
        if manner == ChargeKind::Debit && !self.cost.is_refund() {
            self.limit.debit(self.id, state, self.moment, self.cost.units());
            return self.limit.step(state, self.moment, Cost::PEEK);
        }
        self.limit.step_with_permit(self.id, state, self.moment, self.cost)
    }

    /// Returns a denial for lack of memory, until the existing entries have expired at the latest.
    fn no_memory(&self) -> Outcome {
        let wait: TimeDelta = self.limit.rate().period.length();
        let verdict = Verdict::Denied { retry_after: Some(wait) };
        Outcome { verdict, remaining: 0, next_after: wait, reset_after: wait }
    }
}

#[derive(Default)]
struct WideShard {
    index: HashMap<u128, u32, foldhash::fast::RandomState>,
    entries: Vec<WideEntry>,
    cursor: usize,
}

struct WideEntry {
    name: u128,
    state: State,
    expires: Timestamp,
    pressure: u8,
    bytes: usize,
}

/// The locked shards of a request.
pub(super) struct LockedShards<'a> {
    wide: &'a WideCounters,
    counts: &'a Counts,
    shards: SmallVec<[(usize, MutexGuard<'a, WideShard>); 2]>,
}

impl WideCounters {
    pub(super) fn new(budget: usize) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self {
            shards,
            bytes: AtomicUsize::new(0),
            entries: AtomicUsize::new(0),
            budget,
            packable: AtomicBool::new(false),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Notes that a limit is charged here, before its counter is looked up in the table. From then on a new key of the
    /// table is inserted under the lock of its shard, so that no counter is in both places. (A key that another thread
    /// is inserting at that moment, once in the life of the store, may be.)
    pub(super) fn note_limit(&self, limit: &Limit) {
        if limit.may_be_packed() && !self.may_hold_packable() {
            self.packable.store(true, Ordering::SeqCst);
        }
    }

    /// Returns whether counters may be here that a packed limit charges.
    #[inline]
    pub(super) fn may_hold_packable(&self) -> bool {
        self.packable.load(Ordering::SeqCst)
    }

    pub(super) fn lock<'a>(&'a self, asks: &[WideCharge<'_>], counts: &'a Counts) -> LockedShards<'a> {
        self.lock_some(asks.iter(), counts)
    }

    /// Locks the shards that these charges need, lowest first, so that requests cannot deadlock.
    pub(super) fn lock_some<'a, 'b>(
        &'a self,
        asks: impl Iterator<Item = &'b WideCharge<'b>>,
        counts: &'a Counts,
    ) -> LockedShards<'a> {
        let mut wanted: SmallVec<[usize; 8]> = asks.map(WideCharge::shard).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let lock = |shard: usize| self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        LockedShards {
            wide: self,
            counts,
            shards: wanted.into_iter().map(|shard| (shard, lock(shard))).collect(),
        }
    }

    /// Returns whether a new key fits; an eighth of the budget is reserved for existing keys.
    fn has_room(&self, bytes: usize) -> bool {
        self.bytes() + bytes <= self.budget - self.budget / 8
    }

    fn account(&self, before: usize, after: usize) {
        self.bytes.fetch_add(after, Ordering::Relaxed);
        self.bytes.fetch_sub(before, Ordering::Relaxed);
    }
}

impl LockedShards<'_> {
    fn shard(&mut self, ask: &WideCharge<'_>) -> (&WideCounters, &Counts, &mut WideShard) {
        let wanted = ask.shard();
        let at =
            self.shards.iter().position(|(shard, _)| *shard == wanted).expect("locked before it is charged");
        (self.wide, self.counts, &mut self.shards[at].1)
    }

    /// Returns whether the counter has a state here.
    pub(super) fn holds(&mut self, ask: &WideCharge<'_>) -> bool {
        self.state(ask).is_some()
    }

    /// Returns the counter's own state.
    pub(super) fn state(&mut self, ask: &WideCharge<'_>) -> Option<&State> {
        let (_, _, shard) = self.shard(ask);
        shard.find(ask.name).map(|at| &shard.entries[at].state)
    }

    /// Removes the counter's own state.
    pub(super) fn remove(&mut self, ask: &WideCharge<'_>) {
        let (wide, _, shard) = self.shard(ask);
        if let Some(at) = shard.find(ask.name) {
            shard.remove(at, wide);
        }
    }

    /// Returns whether there is room for a state from the table, after evicting what may be evicted.
    pub(super) fn has_room_for(&mut self, ask: &WideCharge<'_>, state: &State) -> bool {
        let (wide, counts, shard) = self.shard(ask);
        let bytes = ENTRY + heap_bytes(state);
        wide.has_room(bytes) || shard.make_room(bytes, ask, wide, counts)
    }

    /// Takes a state over from the table.
    pub(super) fn take_over(&mut self, ask: &WideCharge<'_>, state: State) {
        let (wide, _, shard) = self.shard(ask);
        let outcome = ask.limit.step(&mut state.clone(), ask.moment, Cost::PEEK);
        shard.put(ask.name, state, ask, &outcome, wide);
    }

    /// Charges one counter. Returns the outcome and how to undo it.
    pub(super) fn charge(&mut self, ask: &WideCharge<'_>, manner: ChargeKind) -> (Outcome, Undo) {
        let (wide, counts, shard) = self.shard(ask);
        if let Some(at) = shard.find(ask.name) {
            return shard.charge(at, ask, manner, wide, counts);
        }
        let mut state = State::default();
        let outcome = ask.apply(&mut state, manner);
        if outcome.verdict.is_denied() || ask.cost.is_peek() || ask.cost.is_refund() {
            return (outcome, Undo::Nothing);
        }
        shard.sweep(SWEEP, ask.now, wide);
        let bytes = ENTRY + heap_bytes(&state);
        if wide.has_room(bytes) || shard.make_room(bytes, ask, wide, counts) {
            shard.put(ask.name, state, ask, &outcome, wide);
            return (outcome, Undo::Remove(ask.name));
        }
        counts.record(ask.name as u64, Event::WideOverflowed);
        if let Some(at) = shard.find(ask.shared) {
            return shard.charge(at, ask, manner, wide, counts);
        }
        if wide.bytes() + bytes > wide.budget {
            counts.record(ask.name as u64, Event::WideDenied);
            return (ask.no_memory(), Undo::Nothing);
        }
        shard.put(ask.shared, state, ask, &outcome, wide);
        (outcome, Undo::Remove(ask.shared))
    }

    /// Returns the outcome of the counter without any charge.
    pub(super) fn peek(&mut self, ask: &WideCharge<'_>) -> Outcome {
        let (_, _, shard) = self.shard(ask);
        match shard.find(ask.name).or_else(|| shard.find(ask.shared)) {
            Some(at) if ask.limit.reads(&shard.entries[at].state) => {
                ask.limit.step(&mut shard.entries[at].state, ask.moment, Cost::PEEK)
            }
            _ => ask.limit.step(&mut State::default(), ask.moment, Cost::PEEK),
        }
    }

    /// Undoes what [`LockedShards::charge`] did under the same locks.
    pub(super) fn undo(&mut self, ask: &WideCharge<'_>, undo: Undo) {
        let (wide, _, shard) = self.shard(ask);
        match undo {
            Undo::Nothing => {}
            Undo::Remove(name) => {
                if let Some(at) = shard.find(name) {
                    shard.remove(at, wide);
                }
            }
            Undo::Step(name, step) => match (shard.find(name), step) {
                (Some(at), step) => {
                    step.revert(ask, &mut shard.entries[at].state);
                    shard.measure(at, ask, wide);
                }
                // A refund had emptied the entry, and another charge of this request has swept it away since.
                (None, undo::Step::Whole(mut before)) => {
                    let outcome = ask.limit.step(&mut before, ask.moment, Cost::PEEK);
                    shard.put(name, before, ask, &outcome, wide);
                }
                (None, _) => {}
            },
        }
    }

    /// Releases the permits of a holder.
    pub(super) fn release(&mut self, ask: &WideCharge<'_>) {
        let (wide, _, shard) = self.shard(ask);
        for name in [ask.name, ask.shared] {
            if let Some(at) = shard.find(name) {
                ask.limit.release(ask.id, &mut shard.entries[at].state);
                shard.measure(at, ask, wide);
            }
        }
    }
}

impl WideShard {
    fn find(&self, name: u128) -> Option<usize> {
        self.index.get(&name).map(|at| *at as usize)
    }

    fn charge(
        &mut self,
        at: usize,
        ask: &WideCharge<'_>,
        manner: ChargeKind,
        wide: &WideCounters,
        counts: &Counts,
    ) -> (Outcome, Undo) {
        let growth = growth(&self.entries[at].state);
        let name = self.entries[at].name;
        let takes = !ask.cost.is_peek() && !ask.cost.is_refund();
        if takes && growth > 0 && wide.bytes() + growth > wide.budget {
            counts.record(ask.name as u64, Event::WideDenied);
            return (ask.no_memory(), Undo::Nothing);
        }
        let entry = &mut self.entries[at];
        let mut undo = undo::Step::before(ask, &entry.state);
        let outcome = if ask.limit.reads(&entry.state) {
            ask.apply(&mut entry.state, manner)
        } else {
            // Another kind of limit left it: only what is taken replaces it.
            let mut state = State::default();
            let outcome = ask.apply(&mut state, manner);
            if outcome.verdict.is_denied() || ask.cost.is_peek() {
                return (outcome, Undo::Nothing);
            }
            undo = undo::Step::Whole(std::mem::replace(&mut entry.state, state));
            outcome
        };
        // What a denial or a peek changes is what reading changes: a window that has turned, units that have expired.
        if takes && outcome.verdict.is_allowed() || ask.cost.is_refund() {
            entry.pressure = pressure(ask.limit, &outcome);
        }
        self.measure(at, ask, wide);
        let undo = if outcome.verdict.is_allowed() { Undo::Step(name, undo) } else { Undo::Nothing };
        (outcome, undo)
    }

    fn put(
        &mut self,
        name: u128,
        state: State,
        ask: &WideCharge<'_>,
        outcome: &Outcome,
        wide: &WideCounters,
    ) {
        let at = self.entries.len();
        let pressure = pressure(ask.limit, outcome);
        self.entries.push(WideEntry { name, state, expires: Timestamp::ZERO, pressure, bytes: 0 });
        self.index.insert(name, u32::try_from(at).expect("fewer entries than bytes of the cap"));
        wide.entries.fetch_add(1, Ordering::Relaxed);
        self.measure(at, ask, wide);
    }

    fn remove(&mut self, at: usize, wide: &WideCounters) {
        let gone = self.entries.swap_remove(at);
        self.index.remove(&gone.name);
        if let Some(moved) = self.entries.get(at) {
            self.index.insert(moved.name, u32::try_from(at).expect("it was one before"));
        }
        wide.entries.fetch_sub(1, Ordering::Relaxed);
        wide.account(gone.bytes, 0);
    }

    fn measure(&mut self, at: usize, ask: &WideCharge<'_>, wide: &WideCounters) {
        let entry = &mut self.entries[at];
        entry.expires = ask.limit.expires(&entry.state);
        let bytes = ENTRY + heap_bytes(&entry.state);
        wide.account(std::mem::replace(&mut entry.bytes, bytes), bytes);
    }

    /// Removes expired entries among the next few. Returns the least used of the others.
    fn sweep(&mut self, probes: usize, now: Timestamp, wide: &WideCounters) -> Option<usize> {
        let mut least: Option<usize> = None;
        for _ in 0..probes.min(self.entries.len()) {
            self.cursor = if self.cursor < self.entries.len() { self.cursor } else { 0 };
            let Some(entry) = self.entries.get(self.cursor) else { break };
            if entry.expires <= now {
                self.remove(self.cursor, wide);
                // The last entry has moved here; it may have been the least used one.
                least = least.filter(|at| *at < self.entries.len());
                continue;
            }
            if least.is_none_or(|at| entry.pressure < self.entries[at].pressure) {
                least = Some(self.cursor);
            }
            self.cursor += 1;
        }
        least
    }

    /// Evicts until there is room for `bytes`. Returns false if only protected entries are left.
    fn make_room(
        &mut self,
        bytes: usize,
        ask: &WideCharge<'_>,
        wide: &WideCounters,
        counts: &Counts,
    ) -> bool {
        for _ in 0..PROBES {
            let least = self.sweep(PROBES, ask.now, wide);
            if wide.has_room(bytes) {
                return true;
            }
            let Some(at) = least.filter(|at| u16::from(self.entries[*at].pressure) < PROTECTED_PRESSURE)
            else {
                return false;
            };
            self.remove(at, wide);
            counts.record(ask.name as u64, Event::WideEvicted);
            if wide.has_room(bytes) {
                return true;
            }
        }
        false
    }
}

/// Returns the used units in 255ths of the limit.
fn pressure(limit: &Limit, outcome: &Outcome) -> u8 {
    let used = limit.capacity().saturating_sub(outcome.remaining);
    (u128::from(used) * 255 / u128::from(limit.capacity().max(1))).min(255) as u8
}

/// Returns the bytes that a state points to.
fn heap_bytes(state: &State) -> usize {
    match state {
        State::Strict(strict) => strict.counts.capacity() * size_of::<u64>(),
        State::Log(log) => log.entries.capacity() * size_of::<(Timestamp, u64)>(),
        State::Permits(permits) => permits.held.capacity() * size_of::<(PermitId, u64, Timestamp)>(),
        _ => 0,
    }
}

/// Returns the bytes that one more unit may add: a full vector doubles.
fn growth(state: &State) -> usize {
    let full = match state {
        State::Log(log) => log.entries.len() == log.entries.capacity(),
        State::Permits(permits) => permits.held.len() == permits.held.capacity(),
        _ => false,
    };
    if full { heap_bytes(state) } else { 0 }
}
