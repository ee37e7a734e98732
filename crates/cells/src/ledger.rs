//! Ledger: what this cell has admitted since the last tick, by counter, for limits that cells share.
//!
//! The request path adds to it: an addition is a hash and one atomic step where a counter is there already
//! (`hot_counts`), and a short lock on one of many stripes elsewhere. A tick empties it into the outboxes. It is bounded:
//! beyond the cap the smallest of a few counters gives way and is counted as dropped.

use crate::charge_codec::{SentCounter, signed};
use crate::hot_counts::HotCounts;
use crate::key_values::KeyValues;
use foldhash::quality::RandomState;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{Admission, Charge, Enforcement, KeyPart, Outcomes, StoreError};

const STRIPES: usize = 64;
/// Number of counters compared when one must give way.
const SAMPLE: usize = 8;
/// Bytes that the values of a counter may have, on average: a bound of counters is also one of bytes.
pub(crate) const BYTES_EACH: usize = 512;
/// Number of counters from which on some are counted without a lock.
const MIN_HOT: usize = 4_096;
/// Scopes and limits that a stripe remembers, so that its counters share them.
const MAX_SHARED: usize = 32;

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
}

/// Returns what distinguishes limits of one counter.
#[inline]
pub(crate) fn limit_numbers(limit: &tollgate_core::Limit) -> (u64, u64) {
    (limit.rate().count, limit.capacity())
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
    shared: Vec<Arc<SentCounter>>,
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

    /// Returns the scope and limit of a charge, shared with other counters.
    fn shared(&mut self, charge: &Charge<'_>) -> Arc<SentCounter> {
        let (scope, limit) = (charge.key.scope, charge.limit);
        let is_same = |known: &&Arc<SentCounter>| {
            known.scope.id() == scope.id()
                && known.scope.is_durable() == scope.is_durable()
                && known.limit == *limit
        };
        if let Some(known) = self.shared.iter().find(is_same) {
            return Arc::clone(known);
        }
        if self.shared.len() >= MAX_SHARED {
            self.shared.clear();
        }
        let counter = Arc::new(SentCounter { scope: scope.clone(), limit: limit.clone() });
        self.shared.push(Arc::clone(&counter));
        counter
    }
}

/// Consumption by counter.
pub struct Ledger {
    hasher: RandomState,
    hot: HotCounts,
    stripes: Box<[Stripe]>,
    most: usize,
    /// Units of counters that gave way.
    dropped: AtomicU64,
    /// Number of counters in the last tick.
    last_drained: AtomicUsize,
}

impl Ledger {
    /// Creates a ledger of at most about this many counters, of 512 bytes on average; hot ones are short, and half as many
    /// others may be beside them.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            hasher: RandomState::default(),
            hot: HotCounts::new(if most < MIN_HOT { 0 } else { most }),
            stripes: (0..STRIPES).map(|_| Stripe::default()).collect(),
            most: (if most < MIN_HOT { most } else { most / 2 } / STRIPES).max(1),
            dropped: AtomicU64::new(0),
            last_drained: AtomicUsize::new(0),
        }
    }

    #[inline]
    fn name(&self, charge: &Charge<'_>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(charge.key.scope.id());
        for part in charge.key.parts {
            match part {
                KeyPart::Text(text) | KeyPart::Secret(text) => {
                    hasher.write_u64(text.len() as u64);
                    hasher.write(text.as_bytes());
                }
                KeyPart::Network { address, prefix } => hasher.write_u128(*address ^ u128::from(*prefix)),
            }
        }
        let (count, capacity) = limit_numbers(charge.limit);
        hasher.write_u64(capacity ^ count.rotate_left(32));
        hasher.finish()
    }

    #[inline]
    fn stripe(&self, name: u64) -> MutexGuard<'_, Active> {
        // Other bits than those by which a map finds its entries.
        let stripe = &self.stripes[(name >> 40) as usize % STRIPES];
        stripe.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what a charge has taken.
    #[inline]
    pub fn record(&self, charge: &Charge<'_>) {
        let (name, units) = (self.name(charge), signed(charge.cost));
        if !self.hot.add(name, units) {
            self.record_elsewhere(name, charge, units);
        }
    }

    /// Adds what a charge has taken whose counter is new, or not among the hot ones.
    #[inline(never)]
    fn record_elsewhere(&self, name: u64, charge: &Charge<'_>, units: i64) {
        let mut stripe = self.stripe(name);
        let Err(free) = stripe.add(name, charge, units) else { return };
        let (counter, values) = (stripe.shared(charge), KeyValues::new(charge.key.parts));
        let owner = || Consumed { counter: Arc::clone(&counter), values: values.clone(), units: 0 };
        if !values.is_short() || !self.hot.insert(name, units, owner) {
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
            let is_applied = outcome.verdict.is_allowed()
                && (outcomes.admission == Admission::Admitted
                    || charge.enforcement == Enforcement::Independent);
            if is_applied && is_wanted(charge) {
                self.record(charge);
            }
        }
    }

    /// Adds what a debit has taken, of the charges that `is_wanted`.
    pub fn record_debited(
        &self,
        charges: &[Charge<'_>],
        result: &Result<(), StoreError>,
        is_wanted: impl Fn(&Charge<'_>) -> bool,
    ) {
        let is_done = |at: usize| match result {
            Ok(()) => true,
            // The store may apply it yet, and a caller that keeps it relies on that.
            Err(error) if !error.late().is_empty() => true,
            Err(StoreError::Partial { failed, .. }) => !failed.contains(&at),
            Err(_) => false,
        };
        for (at, charge) in charges.iter().enumerate() {
            if is_wanted(charge) && is_done(at) {
                self.record(charge);
            }
        }
    }

    /// Takes what was consumed since the last call: each counter once for each limit, or twice if it
    /// was not hot from the beginning.
    #[must_use]
    pub fn drain(&self) -> Vec<Consumed> {
        let mut all = Vec::with_capacity(self.last_drained.load(Ordering::Relaxed) / 8 * 9);
        self.hot.drain_into(&mut all);
        for stripe in &self.stripes {
            let mut stripe = stripe.0.lock().unwrap_or_else(PoisonError::into_inner);
            stripe.bytes = 0;
            let consumed = stripe.entries.drain().map(|(_, consumed)| consumed);
            all.extend(consumed.filter(|consumed| consumed.units != 0));
        }
        self.last_drained.store(all.len(), Ordering::Relaxed);
        all
    }

    /// Returns the units that were not reported because the ledger was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}
