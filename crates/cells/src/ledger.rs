//! Ledger: what this cell has admitted since the last tick, by counter, for limits that cells share.
//!
//! The request path adds to it, so it is striped, and an addition is a hash and a short lock. A tick empties it into
//! the outboxes. It is bounded: beyond the cap the smallest of a few counters gives way and is counted as dropped.

use crate::charge_codec::{SentCounter, parts_bytes, signed};
use foldhash::quality::RandomState;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{Admission, Charge, Enforcement, Outcomes, OwnedKeyPart, StoreError};

const STRIPES: usize = 64;
/// Number of counters compared when one must give way.
const SAMPLE: usize = 8;
/// Bytes that the values of a counter may have, on average: a bound of counters is also one of bytes.
pub(crate) const BYTES_EACH: usize = 512;

/// Consumption of one counter.
#[derive(Clone, Debug, PartialEq)]
pub struct Consumed {
    /// Scope and limit.
    pub counter: Arc<SentCounter>,
    /// Values of the key.
    pub parts: Arc<[OwnedKeyPart]>,
    /// Units since the last tick; negative if more was refunded.
    pub units: i64,
}

impl Consumed {
    fn is_of(&self, charge: &Charge<'_>) -> bool {
        let SentCounter { scope, limit } = &*self.counter;
        scope.id() == charge.key.scope.id()
            && self.parts.len() == charge.key.parts.len()
            && self.parts.iter().zip(charge.key.parts).all(|(own, other)| own.as_part() == *other)
            && limit == charge.limit
    }
}

#[derive(Default)]
struct Active {
    counters: HashMap<u64, Consumed, foldhash::fast::FixedState>,
    /// Bytes of their values.
    bytes: usize,
}

type Stripe = Mutex<Active>;

/// Consumption by counter.
pub struct Ledger {
    hasher: RandomState,
    stripes: Box<[Stripe]>,
    most: usize,
    /// Units of counters that gave way.
    dropped: AtomicU64,
}

impl Ledger {
    /// Creates a ledger of at most about this many counters, of 512 bytes on average.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            hasher: RandomState::default(),
            stripes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            most: (most / STRIPES).max(1),
            dropped: AtomicU64::new(0),
        }
    }

    /// Adds what a charge has taken.
    pub fn record(&self, charge: &Charge<'_>) {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(charge.key.scope.id());
        charge.key.parts.hash(&mut hasher);
        hasher.write_u64(charge.limit.capacity() ^ charge.limit.rate().count.rotate_left(32));
        let mut name = hasher.finish();
        let units = signed(charge.cost);
        let stripe = &self.stripes[(name >> 58) as usize % STRIPES];
        let mut stripe = stripe.lock().unwrap_or_else(PoisonError::into_inner);
        let Active { counters, bytes } = &mut *stripe;
        loop {
            match counters.get_mut(&name) {
                Some(known) if known.is_of(charge) => {
                    known.units = known.units.saturating_add(units);
                    return;
                }
                // Another counter of the same name.
                Some(_) => name = name.wrapping_add(1),
                None => break,
            }
        }
        let parts: Arc<[OwnedKeyPart]> = charge.key.parts.iter().map(OwnedKeyPart::from).collect();
        let (more, max_bytes) = (parts_bytes(&parts), self.most.saturating_mul(BYTES_EACH));
        while counters.len() >= self.most || *bytes + more > max_bytes && !counters.is_empty() {
            let smallest = counters.iter().take(SAMPLE).min_by_key(|(_, known)| known.units.unsigned_abs());
            match smallest.map(|(name, known)| (*name, known.units)) {
                Some((other, less)) if less.unsigned_abs() < units.unsigned_abs() => {
                    let removed = counters.remove(&other);
                    *bytes -= removed.map_or(0, |removed| parts_bytes(&removed.parts));
                    self.dropped.fetch_add(less.unsigned_abs(), Ordering::Relaxed);
                }
                _ => {
                    self.dropped.fetch_add(units.unsigned_abs(), Ordering::Relaxed);
                    return;
                }
            }
        }
        *bytes += more;
        let counter = SentCounter { scope: charge.key.scope.clone(), limit: charge.limit.clone() };
        counters.insert(name, Consumed { counter: Arc::new(counter), parts, units });
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

    /// Takes what was consumed since the last call.
    #[must_use]
    pub fn drain(&self) -> Vec<Consumed> {
        let mut all = Vec::new();
        for stripe in &self.stripes {
            let mut stripe = stripe.lock().unwrap_or_else(PoisonError::into_inner);
            stripe.bytes = 0;
            all.extend(
                stripe.counters.drain().map(|(_, consumed)| consumed).filter(|consumed| consumed.units != 0),
            );
        }
        all
    }

    /// Returns the units that were not reported because the ledger was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}
