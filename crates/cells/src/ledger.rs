//! Ledger: what this cell has admitted since the last tick, by counter, for limits that cells share.
//!
//! The request path adds to it. Each thread has a table of its own (`hot_counts`): an addition is a hash, a load and a store
//! where a counter is there already. What has no place there is under a short lock on one of many stripes: refunds, long
//! values, counters whose part of the table is full, threads beyond the first 64. A tick adds up the tables and the stripes
//! and fills the outboxes. It is bounded: beyond the cap the smallest of a few counters in a stripe gives way and is counted
//! as dropped. What is in a table is never dropped.

use crate::charge_codec::{SentCounter, signed};
use crate::hot_counts::{Home, HotCounts};
use crate::key_values::KeyValues;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tollgate_core::{Admission, Charge, CounterKey, Enforcement, Outcome, Outcomes, Period, ThreadIndex};
use tollgate_store::KeyHasher;

const STRIPES: usize = 64;
/// Number of counters compared when one must give way.
const SAMPLE: usize = 8;
/// Bytes that the values of a counter may have, on average: a bound of counters is also one of bytes.
pub(crate) const BYTES_EACH: usize = 512;
/// Set in the length of a limit by which units of a log are refunded, and how many bits of their time are not there.
const REFUND: u64 = 1 << 63;
const REFUND_BITS: u32 = 17;
/// Number of counters from which on threads have tables.
const MIN_HOT: usize = 4_096;
/// Counters in the tables of all threads, beside the number of counters of the ledger: a counter is in those of all threads
/// that charge it.
const HOT_EACH: usize = 4;
/// Scopes and limits that are remembered, so that counters share them.
const MAX_SHARED: usize = 32;

/// Returns whether a charge was applied.
#[inline(always)]
pub(crate) fn is_applied(charge: &Charge<'_>, outcome: &Outcome, admission: Admission) -> bool {
    outcome.verdict.is_allowed()
        && (admission == Admission::Admitted || charge.enforcement == Enforcement::Independent)
}

/// Consumption of one counter.
#[derive(Clone, Debug, PartialEq)]
pub struct Consumed {
    /// Scope and limit.
    pub counter: Arc<SentCounter>,
    /// Values of the key.
    pub values: KeyValues,
    /// Units since the last tick; negative if more was refunded.
    pub units: i64,
}

impl Consumed {
    #[inline]
    fn is_of(&self, charge: &Charge<'_>) -> bool {
        let SentCounter { scope, limit } = &*self.counter;
        scope.id() == charge.key.scope.id()
            && limit_numbers(limit) == limit_numbers(charge.limit)
            && self.values.is_of(charge.key.parts)
    }

    fn is_same_counter(&self, other: &Self) -> bool {
        self.counter.scope.id() == other.counter.scope.id()
            && limit_numbers(&self.counter.limit) == limit_numbers(&other.counter.limit)
            && self.values == other.values
    }
}

/// What distinguishes the limits of one counter: count, capacity, and the length of a period in microseconds. A caller of
/// the Redis protocol chooses all three with each request. The refund of a log has when its units were taken instead of the
/// length, to an eighth of a second: it takes those off the logs of others too.
pub(crate) type LimitNumbers = (u64, u64, u64);

/// Returns what distinguishes limits of one counter.
#[inline]
pub(crate) fn limit_numbers(limit: &tollgate_core::Limit) -> LimitNumbers {
    let rate = limit.rate();
    let length = match (limit.refunds_of(), &rate.period) {
        (Some(taken), _) => REFUND | taken.as_micros() >> REFUND_BITS,
        (None, Period::Rolling(length)) => length.as_micros(),
        // A rule has one calendar.
        (None, Period::Calendar(_)) => 0,
    };
    (rate.count, limit.capacity(), length)
}

/// Hash of what distinguishes the limits of one counter: it makes the key's name that of a line.
///
/// Two multiplications of secret numbers, which do not wait for the key's hash. Numbers that were combined first could be
/// chosen so that two limits have one name.
struct LimitHasher([u64; 4]);

impl LimitHasher {
    fn random() -> Self {
        let system = RandomState::new();
        Self([1_u8, 2, 3, 4].map(|at| system.hash_one(at)))
    }

    #[inline(always)]
    fn hash(&self, (count, capacity, length): LimitNumbers) -> u64 {
        let [one, two, three, four] = self.0;
        folded(count ^ one, capacity ^ two) ^ folded(length ^ three, four)
    }
}

/// Returns the product of two numbers with both halves combined.
#[inline(always)]
const fn folded(one: u64, other: u64) -> u64 {
    let product = one as u128 * other as u128;
    product as u64 ^ (product >> 64) as u64
}

/// Hasher that passes names through: they are already hashes.
#[derive(Clone, Copy, Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }
    #[inline]
    fn write_u64(&mut self, name: u64) {
        self.0 = name;
    }
}

/// Stripes of different threads lie in different cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Stripe(Mutex<Active>);

#[derive(Default)]
struct Active {
    entries: HashMap<u64, Consumed, BuildHasherDefault<NameHasher>>,
    /// Scopes and limits that its counters share.
    shared: SharedCounters,
    /// Bytes of the entries' values.
    bytes: usize,
}

impl Active {
    /// Adds units to a counter that is there. Otherwise returns the name that it would have.
    #[inline]
    fn add(&mut self, mut name: u64, charge: &Charge<'_>, units: i64) -> Result<(), u64> {
        while let Some(known) = self.entries.get_mut(&name) {
            if known.is_of(charge) {
                known.units = known.units.saturating_add(units);
                return Ok(());
            }
            // Another counter of the same name.
            name = name.wrapping_add(1);
        }
        Err(name)
    }
}

/// Scopes and limits that counters share.
#[derive(Default)]
pub(crate) struct SharedCounters(Vec<Arc<SentCounter>>);

impl SharedCounters {
    /// Returns the scope and limit of a charge.
    pub(crate) fn of(&mut self, charge: &Charge<'_>) -> Arc<SentCounter> {
        let (scope, limit) = (charge.key.scope, charge.limit);
        let is_same = |known: &&Arc<SentCounter>| {
            known.scope.id() == scope.id()
                && known.scope.is_durable() == scope.is_durable()
                && known.limit == *limit
        };
        if let Some(known) = self.0.iter().find(is_same) {
            return Arc::clone(known);
        }
        if self.0.len() >= MAX_SHARED {
            self.0.clear();
        }
        let counter = Arc::new(SentCounter { scope: scope.clone(), limit: limit.clone() });
        self.0.push(Arc::clone(&counter));
        counter
    }
}

/// Where a charge is recorded.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    name: u64,
    /// Where the table of this thread has it unless its group is too full.
    home: Option<Home<'a>>,
    /// Not for another thread.
    thread: PhantomData<*const ()>,
}

/// Consumption by counter.
pub struct Ledger {
    hasher: KeyHasher,
    limits: LimitHasher,
    /// The tables of threads, by their index; none if the ledger is small.
    hot: Box<[OnceLock<HotCounts>]>,
    /// Number of counters that a table has room for.
    most_hot: usize,
    /// Number of counters that may still be added to all tables.
    hot_room: AtomicUsize,
    stripes: Box<[Stripe]>,
    /// Maximum number of counters in a stripe.
    most: usize,
    /// Units of counters that gave way.
    dropped: AtomicU64,
    /// Number of counters in the last tick.
    last_drained: AtomicUsize,
    /// Number of debits that are recorded once they are answered.
    pub(crate) unanswered: AtomicUsize,
}

impl Ledger {
    /// Creates a ledger of at most about this many counters, of 512 bytes on average; four times as many may be in the
    /// tables of threads beside them, of at most 46 bytes each.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            hasher: KeyHasher::of_process(),
            limits: LimitHasher::random(),
            hot: (0..if most < MIN_HOT { 0 } else { ThreadIndex::MAX }).map(|_| OnceLock::new()).collect(),
            most_hot: most,
            hot_room: AtomicUsize::new(most.saturating_mul(HOT_EACH)),
            stripes: (0..STRIPES).map(|_| Stripe::default()).collect(),
            most: (most / STRIPES).max(1),
            dropped: AtomicU64::new(0),
            last_drained: AtomicUsize::new(0),
            unanswered: AtomicUsize::new(0),
        }
    }

    /// Returns the hash of a counter's key, which a store in memory needs too.
    #[inline(always)]
    pub(crate) fn key_name(&self, key: &CounterKey<'_>) -> u64 {
        self.hasher.name(key)
    }

    #[inline]
    fn stripe(&self, name: u64) -> MutexGuard<'_, Active> {
        // Other bits than those by which a map finds its entries.
        let stripe = &self.stripes[(name >> 40) as usize % STRIPES];
        stripe.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the place of this thread's table; `None` if it has none.
    #[inline(always)]
    fn own_table(&self) -> Option<&OnceLock<HotCounts>> {
        self.hot.get(ThreadIndex::current()?)
    }

    /// Returns where a charge of this thread is recorded. Called before the charge is decided: what is read here arrives
    /// while the store reads its own.
    #[inline(always)]
    pub(crate) fn find(&self, charge: &Charge<'_>, key_name: u64) -> Place<'_> {
        let name = key_name ^ self.limits.hash(limit_numbers(charge.limit));
        let table = self.own_table().and_then(OnceLock::get);
        let home = match table {
            Some(hot) if !charge.cost.is_refund() => Some(hot.home(name)),
            _ => None,
        };
        Place { name, home, thread: PhantomData }
    }

    /// Adds what a charge has taken, at its place.
    #[inline(always)]
    pub(crate) fn record_at(&self, place: Place<'_>, charge: &Charge<'_>) {
        let Place { name, home, .. } = place;
        match home {
            Some(home) if home.add(name, charge.cost.units()) => {}
            _ => self.record_elsewhere(name, charge),
        }
    }

    /// Adds what a charge has taken.
    #[inline]
    pub fn record(&self, charge: &Charge<'_>) {
        self.record_at(self.find(charge, self.key_name(&charge.key)), charge);
    }

    /// Adds what a charge has taken whose counter is not in its own slot, is new to this thread, or not for its table.
    #[inline(never)]
    fn record_elsewhere(&self, name: u64, charge: &Charge<'_>) {
        let units = signed(charge.cost);
        let table = self.own_table().filter(|_| units > 0);
        if table.and_then(OnceLock::get).is_some_and(|hot| hot.add(name, units.unsigned_abs())) {
            return;
        }
        let values = KeyValues::new(charge.key.parts);
        if let Some(table) = table.filter(|_| values.is_short()) {
            let hot = table.get_or_init(|| HotCounts::new(self.most_hot));
            let new = || Consumed { counter: hot.shared(charge), values: values.clone(), units: 0 };
            if hot.insert(name, units.unsigned_abs(), &self.hot_room, new) {
                return;
            }
        }
        let mut stripe = self.stripe(name);
        if let Err(free) = stripe.add(name, charge, units) {
            let counter = stripe.shared.of(charge);
            self.insert(&mut stripe, free, Consumed { counter, values, units });
        }
    }

    /// Adds a counter to a stripe.
    fn insert(&self, stripe: &mut Active, name: u64, consumed: Consumed) {
        let Consumed { values, units, .. } = &consumed;
        let (more, max_bytes) = (values.len(), self.most.saturating_mul(BYTES_EACH));
        let Active { entries, bytes, .. } = stripe;
        while entries.len() >= self.most || *bytes + more > max_bytes && !entries.is_empty() {
            let smallest = entries.iter().take(SAMPLE).min_by_key(|(_, known)| known.units.unsigned_abs());
            match smallest.map(|(name, known)| (*name, known.units)) {
                Some((other, less)) if less.unsigned_abs() < units.unsigned_abs() => {
                    let removed = entries.remove(&other);
                    *bytes -= removed.map_or(0, |removed| removed.values.len());
                    self.dropped.fetch_add(less.unsigned_abs(), Ordering::Relaxed);
                }
                _ => {
                    self.dropped.fetch_add(units.unsigned_abs(), Ordering::Relaxed);
                    return;
                }
            }
        }
        *bytes += more;
        entries.insert(name, consumed);
    }

    /// Adds what a decided request has taken, of the charges that `is_wanted`.
    #[inline]
    pub fn record_applied(
        &self,
        charges: &[Charge<'_>],
        outcomes: &Outcomes,
        is_wanted: impl Fn(&Charge<'_>) -> bool,
    ) {
        for (charge, outcome) in charges.iter().zip(&outcomes.per_charge) {
            if is_applied(charge, outcome, outcomes.admission) && is_wanted(charge) {
                self.record(charge);
            }
        }
    }

    /// Takes what was consumed since the last call: each counter once for each limit, with what was refunded taken off.
    /// Apart, a charge could be cut to the limit by its receiver, and the refund of it not.
    #[must_use]
    pub fn drain(&self) -> Vec<Consumed> {
        let mut all = Vec::new();
        self.drain_into(&mut all);
        all
    }

    /// The same, into the list of an earlier call: its memory is used again.
    pub(crate) fn drain_into(&self, all: &mut Vec<Consumed>) {
        let about = self.last_drained.load(Ordering::Relaxed) / 8 * 9;
        all.clear();
        if all.capacity() > 8 * about.max(MIN_HOT) {
            *all = Vec::new();
        }
        all.reserve(about);
        let tables: Vec<&HotCounts> = self.hot.iter().filter_map(OnceLock::get).collect();
        let mut elsewhere: Vec<(u64, Consumed)> = Vec::new();
        for stripe in &self.stripes {
            let mut stripe = stripe.0.lock().unwrap_or_else(PoisonError::into_inner);
            stripe.bytes = 0;
            elsewhere.extend(stripe.entries.drain());
        }
        // Where in the list those counters of the tables are that are elsewhere too.
        let mut places: HashMap<u64, Option<usize>, BuildHasherDefault<NameHasher>> =
            elsewhere.iter().map(|(name, _)| (*name, None)).collect();
        // The counters of the last group, which are the last in the list.
        let (mut last_group, mut names) = (usize::MAX, Vec::new());
        HotCounts::drain(&tables, |group, name, consumed, units| {
            if group != last_group {
                last_group = group;
                names.clear();
            }
            let first = all.len() - names.len();
            if let Some(known) = names.iter().position(|known| *known == name) {
                let known = &mut all[first + known].units;
                *known = known.saturating_add(units);
                return;
            }
            if let Some(place) = (!places.is_empty()).then(|| places.get_mut(&name)).flatten() {
                *place = Some(all.len());
            }
            names.push(name);
            all.push(Consumed { units, ..consumed.clone() });
        });
        let may_be_none = !elsewhere.is_empty();
        for (name, consumed) in elsewhere {
            match places.get(&name).copied().flatten().map(|place| &mut all[place]) {
                Some(known) if known.is_same_counter(&consumed) => {
                    known.units = known.units.saturating_add(consumed.units);
                }
                _ => all.push(consumed),
            }
        }
        if may_be_none {
            all.retain(|consumed| consumed.units != 0);
        }
        self.last_drained.store(all.len(), Ordering::Relaxed);
    }

    /// Returns the units that were not reported because the ledger was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}
