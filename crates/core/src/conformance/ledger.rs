//! Reference store: a map, used by one thread at a time. Its outcomes are what every store must return.
//!
//! Independent charges come first, each by itself. The others are then tried in order on a copy, where a counter that
//! occurs twice includes its first charge; the copy is kept if the request is admitted. If it is denied, the outcomes
//! of charges that would have fitted show what remains without the request.
//!
//! A peek changes nothing. Nor does a denial, except for what `Limit::step` corrects and counts; a state that another
//! kind of limit left stays.
//!
//! A required charge of a window that counts attempts is not specified: only independent ones are compared.

use crate::charge::{Admission, Charge, Enforcement, Outcomes, Permit, UnitReturn};
use crate::clock::Clock;
use crate::cost::Cost;
use crate::counter_key::{CounterKey, OwnedKeyPart};
use crate::outcome::Outcome;
use crate::state::State;
use crate::store::{CounterStore, StoreError};
use crate::time::Timestamp;
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A counter key with owned, separate parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OwnedKey {
    scope: String,
    parts: Vec<OwnedKeyPart>,
}

impl OwnedKey {
    fn from_key(key: CounterKey<'_>) -> Self {
        Self {
            scope: key.scope.label().to_owned(),
            parts: key.parts.iter().map(OwnedKeyPart::from).collect(),
        }
    }
}

/// Counters in a map.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    states: HashMap<OwnedKey, State>,
    /// Returns that have already been applied.
    returned: HashSet<u128>,
}

impl Ledger {
    /// Charges one request: see [`CounterStore::charge`].
    pub fn charge(&mut self, now: Timestamp, charges: &[Charge<'_>]) -> Outcomes {
        let mut each: SmallVec<[Outcome; 4]> =
            charges.iter().map(|charge| charge.limit.blocked(charge.cost)).collect();
        for (outcome, charge) in each.iter_mut().zip(charges).filter(|(_, charge)| is_independent(charge)) {
            *outcome = self.step(now, charge, charge.cost);
        }
        let mut tried = Self { states: self.states.clone(), returned: HashSet::new() };
        for (outcome, charge) in each.iter_mut().zip(charges).filter(|(_, charge)| !is_independent(charge)) {
            *outcome = tried.step(now, charge, charge.cost);
        }
        let admission = Outcomes::admission(charges.iter().map(|charge| charge.enforcement).zip(&each));
        match admission {
            Admission::Admitted => self.states = tried.states,
            Admission::Denied => {
                for (outcome, charge) in
                    each.iter_mut().zip(charges).filter(|(_, charge)| !is_independent(charge))
                {
                    let seen = self.correct(now, charge);
                    if outcome.verdict.is_allowed() {
                        *outcome = Outcome { verdict: outcome.verdict, ..seen };
                    }
                }
                let counts = |(outcome, charge): &(&Outcome, &Charge<'_>)| {
                    outcome.verdict.is_denied() && !is_independent(charge) && charge.limit.counts_denied()
                };
                for (_, charge) in each.iter().zip(charges).filter(counts) {
                    self.count_attempt(now, charge);
                }
            }
        }
        Outcomes { admission, at: now, per_charge: each }
    }

    /// Charges units that were already used; see [`CounterStore::debit`].
    pub fn debit(&mut self, now: Timestamp, charges: &[Charge<'_>]) {
        for charge in charges {
            if charge.cost.is_refund() {
                let _ = self.step(now, charge, charge.cost);
            } else {
                let moment = now + charge.limit.phase(charge.key.stable_hash());
                let state = self.states.entry(OwnedKey::from_key(charge.key)).or_default();
                charge.limit.debit(charge.permit, state, moment, charge.cost.units());
            }
        }
    }

    /// Releases permits; see [`CounterStore::release`].
    pub fn release(&mut self, permits: &[Permit<'_>]) {
        for permit in permits {
            permit.limit.release(permit.id, self.states.entry(OwnedKey::from_key(permit.key)).or_default());
        }
    }

    /// Returns unused units, once; see [`CounterStore::return_units`].
    pub fn return_units(&mut self, now: Timestamp, back: &UnitReturn<'_>) {
        let phase = back.limit.phase(back.key.stable_hash());
        let units = back.limit.refundable(back.units, back.taken_at + phase, now + phase);
        let look = self.step(now, &Charge::new(back.key, back.limit, Cost::PEEK), Cost::PEEK);
        let last = back.limit.can_return(back.full_at, now, look.reset_after);
        if self.returned.insert(back.id.0) && units > 0 && last {
            let _ = self.step(now, &Charge::new(back.key, back.limit, Cost::PEEK), Cost::refund(units));
        }
    }

    fn step(&mut self, now: Timestamp, charge: &Charge<'_>, cost: Cost) -> Outcome {
        let moment = now + charge.limit.phase(charge.key.stable_hash());
        let kept = self.states.entry(OwnedKey::from_key(charge.key)).or_default();
        let mut state = kept.clone();
        let outcome = charge.limit.step_with_permit(charge.permit, &mut state, moment, cost);
        let stays = outcome.verdict.is_denied() && !charge.limit.reads(kept) && !charge.limit.counts_denied();
        if !cost.is_peek() && !stays {
            *kept = state;
        }
        outcome
    }

    /// Counts a charge of a denied request, if its limit denies it.
    fn count_attempt(&mut self, now: Timestamp, charge: &Charge<'_>) {
        let before = self.states.clone();
        if self.step(now, charge, charge.cost).verdict.is_allowed() {
            self.states = before;
        }
    }

    /// Corrects a state that a clock error left in the future, which is done also when a request is denied, or it
    /// would lock the key. Returns what remains.
    fn correct(&mut self, now: Timestamp, charge: &Charge<'_>) -> Outcome {
        let moment = now + charge.limit.phase(charge.key.stable_hash());
        let kept = self.states.entry(OwnedKey::from_key(charge.key)).or_default();
        let mut state = kept.clone();
        let outcome = charge.limit.step_with_permit(charge.permit, &mut state, moment, Cost::PEEK);
        if charge.limit.reads(kept) {
            *kept = state;
        }
        outcome
    }
}

fn is_independent(charge: &Charge<'_>) -> bool {
    charge.enforcement == Enforcement::Independent
}

/// The [`Ledger`] as a store: slow, unbounded and correct. For tests and impact previews.
#[derive(Debug)]
pub struct ReferenceStore<C> {
    clock: C,
    ledger: Mutex<Ledger>,
}

impl<C: Clock> ReferenceStore<C> {
    /// Creates an empty store that reads this clock.
    pub fn new(clock: C) -> Self {
        Self { clock, ledger: Mutex::default() }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Clock> CounterStore for ReferenceStore<C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        Ok(self.ledger().charge(self.clock.now(), charges))
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.ledger().debit(self.clock.now(), charges);
        Ok(())
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.ledger().release(permits);
        Ok(())
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.ledger().return_units(self.clock.now(), back);
        Ok(())
    }
}
