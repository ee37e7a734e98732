//! Deny cache: repeats a store's denial on this node until the denial ends, without calling the store.
//!
//! Most of the traffic that a limiter sees in a flood is over its limit, and each such request would cost the store a
//! round trip for the same result. Until its end only a refund or a raised limit can change a denial, so the cached
//! outcome is exact; those two are seen within [`DenyCache::MAX_AGE`], because no denial is cached for longer without
//! consulting the store. The end is counted from the moment of the call, so it is never later than the store's own.
//!
//! A cached denial belongs to a counter, not to a request: every request that charges the counter is denied, whatever
//! else it charges. Of its other limits, the store's last outcomes are repeated, and those that it has not read lately are
//! unknown. Independent charges (shadow rules, candidates)
//! still count, and denials of limits that count attempts are not cached. Memory is fixed: sets of four, in which the denial that ends soonest is replaced. Caching allowed
//! outcomes was rejected: that would overshoot.

use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, LastKnown,
    Limit, Outcome, Outcomes, Permit, StoreError, TimeDelta, Timestamp, UnitReturn, Verdict,
};

const WAYS: usize = 4;

/// A store with a cache of its denials.
pub struct DenyCache<S, C> {
    inner: S,
    clock: C,
    seed: [foldhash::fast::RandomState; 2],
    sets: Box<[Mutex<[CachedDenialSlot; WAYS]>]>,
    /// Requests denied from the cache, in several counters, so that threads rarely contend.
    hits: [HitCounter; 16],
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct HitCounter(AtomicU64);

/// One cached denial; a name of zero is an empty slot.
#[derive(Clone, Copy, Debug, Default)]
struct CachedDenialSlot {
    name: u128,
    /// When the store must be consulted again.
    valid_until: Timestamp,
    /// End of the denial.
    denied_until: Timestamp,
    /// When a unit is there again.
    next: Timestamp,
    reset: Timestamp,
    /// Cost that was denied; a smaller one might fit.
    units: u64,
    /// Units that remained, which were not enough.
    remaining: u64,
}

impl<S, C: Clock> DenyCache<S, C> {
    /// Longest time that a denial is cached without consulting the store.
    pub const MAX_AGE: TimeDelta = TimeDelta::from_millis(900);

    /// Creates a cache of up to `entries` denials of `inner`, 64 bytes each.
    #[must_use]
    pub fn new(inner: S, clock: C, entries: usize) -> Self {
        let sets = entries.div_ceil(WAYS).next_power_of_two();
        Self {
            inner,
            clock,
            seed: [foldhash::fast::RandomState::default(), foldhash::fast::RandomState::default()],
            sets: (0..sets).map(|_| Mutex::default()).collect(),
            hits: Default::default(),
        }
    }

    /// Returns the number of requests denied from the cache, without calling the store.
    pub fn hits(&self) -> u64 {
        self.hits.iter().map(|answered| answered.0.load(Ordering::Relaxed)).sum()
    }

    /// Returns the inner store.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Returns a 128-bit hash, so that two counters never share a denial. It includes the limit's numbers, so that a
    /// raised limit has another name, and its period, because the counter of an inline limit is named without it.
    fn name(&self, key: &CounterKey<'_>, limit: &Limit) -> u128 {
        let half = |seed: &foldhash::fast::RandomState| {
            let mut hasher = seed.build_hasher();
            hasher.write_u64(key.scope.id());
            hasher.write_u64(limit.capacity());
            hasher.write_u64(limit.rate().count);
            hasher.write_u64(limit.rate().period.length().as_micros());
            for part in key.parts {
                match part {
                    KeyPart::Text(text) | KeyPart::Secret(text) => {
                        hasher.write_u64(text.len() as u64);
                        hasher.write(text.as_bytes());
                    }
                    KeyPart::Network { address, prefix } => {
                        hasher.write_u128(*address);
                        hasher.write_u8(*prefix);
                    }
                }
            }
            u128::from(hasher.finish())
        };
        (half(&self.seed[0]) << 64 | half(&self.seed[1])).max(1)
    }

    fn set(&self, name: u128) -> MutexGuard<'_, [CachedDenialSlot; WAYS]> {
        let at = name as usize & (self.sets.len() - 1);
        self.sets[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cached denial of a charge.
    fn get(&self, charge: &Charge<'_>, now: Timestamp) -> Option<Outcome> {
        if charge.cost.is_refund() || charge.cost.is_peek() || charge.enforcement != Enforcement::Required {
            return None;
        }
        // Such a charge never fits: it is not to wait for what a smaller one waits for.
        if charge.cost.units() > charge.limit.capacity() {
            return None;
        }
        let name = self.name(&charge.key, charge.limit);
        let set = self.set(name);
        let entry = set.iter().find(|entry| entry.name == name)?;
        if now >= entry.valid_until || charge.cost.units() < entry.units {
            return None;
        }
        let verdict = Verdict::Denied { retry_after: Some(entry.denied_until.since(now)) };
        Some(Outcome {
            verdict,
            remaining: entry.remaining,
            next_after: entry.next.since(now),
            reset_after: entry.reset.since(now),
        })
    }

    /// Caches a denial. Permits may be released at any time, and attempts are to be counted, so denials of such
    /// limits are not cached.
    fn insert(&self, charge: &Charge<'_>, outcome: &Outcome, asked: Timestamp) {
        let Verdict::Denied { retry_after: Some(wait) } = outcome.verdict else { return };
        let is_open = charge.limit.algorithm() == Algorithm::Concurrency || charge.limit.counts_denied();
        if is_open || charge.enforcement != Enforcement::Required {
            return;
        }
        let name = self.name(&charge.key, charge.limit);
        let until = asked + wait;
        let entry = CachedDenialSlot {
            name,
            valid_until: until.min(asked + Self::MAX_AGE),
            denied_until: until,
            next: asked + outcome.next_after,
            reset: asked + outcome.reset_after,
            units: charge.cost.units(),
            remaining: outcome.remaining,
        };
        let mut set = self.set(name);
        let known = set.iter().position(|other| other.name == name);
        let place = known.or_else(|| (0..WAYS).min_by_key(|at| set[*at].valid_until)).unwrap_or(0);
        set[place] = entry;
    }

    fn remove(&self, charge: &Charge<'_>) {
        let name = self.name(&charge.key, charge.limit);
        for entry in self.set(name).iter_mut().filter(|entry| entry.name == name) {
            *entry = CachedDenialSlot::default();
        }
    }
}

impl<S: CounterStore, C: Clock> CounterStore for DenyCache<S, C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let asked = self.clock.now();
        let recalled: smallvec::SmallVec<[Option<Outcome>; 4]> =
            charges.iter().map(|charge| self.get(charge, asked)).collect();
        if recalled.iter().all(Option::is_none) {
            let outcomes = self.inner.charge(charges).await?;
            for (charge, outcome) in charges.iter().zip(&outcomes.per_charge) {
                self.insert(charge, outcome, asked);
                if charge.cost.is_refund() {
                    self.remove(charge);
                }
            }
            return Ok(outcomes);
        }
        self.hits[asked.as_micros() as usize % self.hits.len()].0.fetch_add(1, Ordering::Relaxed);
        let repeated = |(charge, recalled): (&Charge<'_>, Option<Outcome>)| match recalled {
            Some(denied) => denied,
            None => LastKnown::repeated(&self.inner, charge),
        };
        let mut each: smallvec::SmallVec<[Outcome; 4]> = charges.iter().zip(recalled).map(repeated).collect();
        let counted = |charge: &&Charge<'_>| charge.enforcement == Enforcement::Independent;
        let independent: Vec<Charge<'_>> = charges.iter().filter(counted).copied().collect();
        if !independent.is_empty() {
            let mut answers = self.inner.charge(&independent).await?.per_charge.into_iter();
            for (charge, outcome) in charges.iter().zip(&mut each) {
                if charge.enforcement == Enforcement::Independent {
                    *outcome = answers.next().unwrap_or(Outcome::UNKNOWN);
                }
            }
        }
        Ok(Outcomes { admission: Admission::Denied, at: asked, per_charge: each })
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.inner.debit(charges).await?;
        charges.iter().filter(|charge| charge.cost.is_refund()).for_each(|charge| self.remove(charge));
        Ok(())
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.inner.release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.inner.return_units(back).await?;
        self.remove(&Charge::new(back.key, back.limit, Cost::PEEK));
        Ok(())
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        self.inner.last_known(charge)
    }

    fn is_down(&self) -> bool {
        self.inner.is_down()
    }
}
