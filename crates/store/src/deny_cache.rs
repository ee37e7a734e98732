//! Deny cache: repeats a store's denial on this node until the denial ends, without calling the store.
//!
//! A flood over its limit is the traffic that a limiter sees most of, and each such request would cost the store a round
//! trip to hear the same answer. Until T nothing but a refund or a raised limit can change it, so the answer is exact;
//! those two are seen within [`DenyCache::MAX_AGE`], because no denial is remembered for longer without asking again. T is
//! counted from the moment of asking, so it never lies past the store's own.
//!
//! What is remembered is a counter, not a request: every request that meets it is refused, whatever else it meets. Its
//! other limits are then unanswered. Independent charges (shadow rules, candidates) still count. Memory is fixed: sets of
//! four, the soonest to end gives way. Caching what is allowed was rejected: that would overshoot.

use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit,
    Outcome, Outcomes, Permit, StoreError, TimeDelta, Timestamp, UnitReturn, Verdict,
};

const WAYS: usize = 4;

/// A store whose denials are remembered.
pub struct DenyCache<S, C> {
    inner: S,
    clock: C,
    seed: [foldhash::fast::RandomState; 2],
    sets: Box<[Mutex<[CachedDenialSlot; WAYS]>]>,
    /// Requests that were answered from memory, in several places, so that threads seldom meet.
    hits: [HitCounter; 16],
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct HitCounter(AtomicU64);

/// One remembered denial; a name of zero is none.
#[derive(Clone, Copy, Debug, Default)]
struct CachedDenialSlot {
    name: u128,
    /// Asked again from then on.
    valid_until: Timestamp,
    /// The end of the denial.
    denied_until: Timestamp,
    reset: Timestamp,
    /// The cost that was denied; a smaller one might fit.
    units: u64,
    /// What was left then, which was not enough.
    remaining: u64,
}

impl<S, C: Clock> DenyCache<S, C> {
    /// The longest that a denial is believed without asking.
    pub const MAX_AGE: TimeDelta = TimeDelta::from_millis(900);

    /// Remembers up to `entries` denials of `inner`, 64 bytes each.
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

    /// Requests that were denied by what is remembered, without asking.
    pub fn hits(&self) -> u64 {
        self.hits.iter().map(|answered| answered.0.load(Ordering::Relaxed)).sum()
    }

    /// The store behind it.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// 128 bits, so that two counters never share a denial. The limit's numbers are part of it: a raised limit is another.
    /// So is its period, for a limit that a caller brings names its counter without it.
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

    /// What is remembered of a charge.
    fn get(&self, charge: &Charge<'_>, now: Timestamp) -> Option<Outcome> {
        if charge.cost.is_refund() || charge.cost.is_peek() || charge.enforcement != Enforcement::Required {
            return None;
        }
        let name = self.name(&charge.key, charge.limit);
        let set = self.set(name);
        let entry = set.iter().find(|entry| entry.name == name)?;
        if now >= entry.valid_until || charge.cost.units() < entry.units {
            return None;
        }
        let verdict = Verdict::Denied { retry_after: Some(entry.denied_until.since(now)) };
        Some(Outcome { verdict, remaining: entry.remaining, reset_after: entry.reset.since(now) })
    }

    /// Remembers a denial. Permits come back at any time: theirs are not worth remembering.
    fn insert(&self, charge: &Charge<'_>, outcome: &Outcome, asked: Timestamp) {
        let Verdict::Denied { retry_after: Some(wait) } = outcome.verdict else { return };
        if charge.limit.algorithm() == Algorithm::Concurrency || charge.enforcement != Enforcement::Required {
            return;
        }
        let name = self.name(&charge.key, charge.limit);
        let until = asked + wait;
        let entry = CachedDenialSlot {
            name,
            valid_until: until.min(asked + Self::MAX_AGE),
            denied_until: until,
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
        let mut each: smallvec::SmallVec<[Outcome; 4]> =
            recalled.into_iter().map(|outcome| outcome.unwrap_or(Outcome::UNKNOWN)).collect();
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
}
