//! Debits that the cell's store did not make, and said so only after its deadline.
//!
//! A debit without an answer counts as made: sent again, it could count twice. The store may refuse it later (it is full, or a
//! replica by now), or never have sent it. Then it is kept here, and made in the next tick, by the limit it came with and for as
//! long as its units count. What will never be known counts as made. The memory is bounded: what has no room is dropped
//! and counted.

use crate::charge_codec::{SentCharge, as_charge, cost, signed};
use crate::ledger::{LimitNumbers, limit_numbers};
use crate::lost_units::counts_until;
use crate::owner::Transport;
use crate::regional::RegionalStore;
use crate::unanswered::{self, Ending};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Charge, Clock, CounterId, CounterStore, KeyPart, LateCharge, OwnedKeyPart, StoreError, Timestamp,
};

/// Maximum bytes of what is without an answer and of what is to be made again.
const MAX_BYTES: usize = 16 << 20;
/// Bytes of a debit beside its values.
const DEBIT_BYTES: usize = 512;
/// Debits that are made in one call of the store.
const CHUNK: usize = 1_024;

/// Who took the units of a debit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TakenBy {
    /// Callers of another cell, of a limit that cells share.
    OtherCell,
    /// Callers of a counter that this cell owns.
    Owned,
}

/// A debit to be made again.
struct LateDebit {
    id: CounterId,
    charge: SentCharge,
    taken_by: TakenBy,
    /// Until when its units count.
    until: Timestamp,
}

impl LateDebit {
    fn bytes(&self) -> usize {
        let text = |part: &OwnedKeyPart| match part {
            OwnedKeyPart::Text(text) | OwnedKeyPart::Secret(text) => text.len(),
            OwnedKeyPart::Network { .. } => 0,
        };
        DEBIT_BYTES + self.charge.parts.iter().map(text).sum::<usize>()
    }
}

type Name = (CounterId, LimitNumbers, TakenBy);

#[derive(Default)]
struct Table {
    debits: Mutex<HashMap<Name, LateDebit>>,
    /// Number of debits in the table.
    count: AtomicUsize,
    /// Bytes of these, and of debits without an answer.
    bytes: AtomicUsize,
    dropped: AtomicU64,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, LateDebit>> {
        self.debits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a debit whose bytes are counted.
    fn add(&self, debit: LateDebit) {
        let mut all = self.lock();
        let name = (debit.id, limit_numbers(&debit.charge.counter.limit), debit.taken_by);
        match all.get_mut(&name) {
            Some(known) => {
                let units = signed(known.charge.cost).saturating_add(signed(debit.charge.cost));
                known.charge.cost = cost(units);
                known.until = known.until.max(debit.until);
                self.bytes.fetch_sub(debit.bytes(), Ordering::Relaxed);
            }
            None => drop(all.insert(name, debit)),
        }
        self.count.store(all.len(), Ordering::Relaxed);
    }

    fn forget(&self, debit: &LateDebit) {
        self.bytes.fetch_sub(debit.bytes(), Ordering::Relaxed);
    }
}

/// Debits that the store refused after its deadline.
#[derive(Default)]
pub(crate) struct LateDebits(Arc<Table>);

impl LateDebits {
    fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the units that were refused and not kept, because there was no room.
    pub(crate) fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// Keeps late debits, to be made again if they are refused.
    fn keep(&self, charges: &[Charge<'_>], late: &[LateCharge], taken_by: TakenBy, now: Timestamp) {
        let debit = |charge: &Charge<'_>| {
            let id = charge.key.id();
            (
                id,
                LateDebit {
                    id,
                    charge: SentCharge::new(charge),
                    taken_by,
                    until: counts_until(charge, id, now),
                },
            )
        };
        let debits: Vec<(CounterId, LateDebit)> = charges.iter().map(debit).collect();
        let bytes = debits.iter().map(|(_, debit)| debit.bytes()).sum();
        let table = Arc::clone(&self.0);
        if table.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > MAX_BYTES {
            table.bytes.fetch_sub(bytes, Ordering::Relaxed);
            let units = debits.into_iter().map(|(id, debit)| (id, debit.charge.cost.units())).collect();
            return unanswered::keep(late, units, move |units, ending| {
                if ending == Ending::NotMade {
                    table.dropped.fetch_add(units, Ordering::Relaxed);
                }
            });
        }
        unanswered::keep(late, debits, move |debit, ending| match ending {
            Ending::NotMade => table.add(debit),
            Ending::Made | Ending::Unknown => table.forget(&debit),
        });
    }

    /// Takes all out whose units still count.
    fn take(&self, now: Timestamp) -> Vec<LateDebit> {
        let mut table = self.0.lock();
        let all: Vec<LateDebit> = table.drain().map(|(_, debit)| debit).collect();
        self.0.count.store(0, Ordering::Relaxed);
        drop(table);
        let (counting, ended): (Vec<LateDebit>, Vec<LateDebit>) =
            all.into_iter().partition(|debit| debit.until > now && !debit.charge.cost.is_peek());
        ended.iter().for_each(|debit| self.0.forget(debit));
        counting
    }
}

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Keeps those debits of an error that the store may still make: they count as made, and are made again if it refuses them.
    pub(crate) fn keep_late(&self, charges: &[Charge<'_>], error: &StoreError, taken_by: TakenBy) {
        let now = self.clock.now();
        let some = |places: &[usize]| -> Vec<Charge<'_>> {
            places.iter().filter_map(|at| charges.get(*at).copied()).collect()
        };
        let late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
        if error.is_lost() {
            error.keep_late();
        } else if !late.is_empty() {
            self.late_debits.keep(&some(&error.failed_of(charges.len())), &late, taken_by, now);
        }
        for (places, late) in error.late_beside() {
            self.late_debits.keep(&some(places), late, taken_by, now);
        }
    }

    /// Makes debits that the store refused after its deadline. Called in each tick; one call at a time.
    pub async fn make_late_debits(&self) {
        if self.late_debits.is_empty() {
            return;
        }
        let mut left = self.late_debits.take(self.clock.now());
        left.sort_by_key(|debit| debit.taken_by == TakenBy::Owned);
        let mut has_failed = false;
        while !left.is_empty() {
            let owned = left.partition_point(|debit| debit.taken_by == TakenBy::OtherCell);
            let end = if owned == 0 { left.len() } else { owned }.min(CHUNK);
            let mut chunk: Vec<LateDebit> = left.drain(..end).collect();
            let failed = if has_failed { (0..chunk.len()).collect() } else { self.make(&chunk).await };
            has_failed |= !failed.is_empty();
            let mut at = 0;
            let made = chunk.extract_if(.., |_| {
                at += 1;
                !failed.contains(&(at - 1))
            });
            made.for_each(|debit| self.late_debits.0.forget(&debit));
            chunk.into_iter().for_each(|debit| self.late_debits.0.add(debit));
        }
    }

    /// Makes debits of one kind. Returns the positions of those that the store did not make.
    async fn make(&self, debits: &[LateDebit]) -> Vec<usize> {
        let parts: Vec<Vec<KeyPart<'_>>> = debits
            .iter()
            .map(|debit| debit.charge.parts.iter().map(OwnedKeyPart::as_part).collect())
            .collect();
        let charges: Vec<Charge<'_>> =
            debits.iter().zip(&parts).map(|(debit, parts)| as_charge(&debit.charge, parts)).collect();
        if debits.first().is_some_and(|debit| debit.taken_by == TakenBy::Owned) {
            return match self.debit_own(&charges).await {
                Ok(()) => Vec::new(),
                Err(error) => {
                    self.keep_late(&charges, &error, TakenBy::Owned);
                    if error.is_in_doubt() { Vec::new() } else { error.failed_of(charges.len()) }
                }
            };
        }
        let ids: Vec<CounterId> = debits.iter().map(|debit| debit.id).collect();
        let _locked = self.lock(&charges, &ids).await;
        match self.debit_shared(&charges, &ids).await {
            Err((failed, _)) => failed.into_iter().collect(),
            Ok(()) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{Algorithm, Cost, CounterKey, LimitSpec, Rate, Scope, TimeDelta};

    /// Without it a debit that is refused while others are taken out is not made until the next one is refused.
    #[test]
    fn a_debit_that_is_added_while_others_are_taken_is_counted() {
        let rate = Rate::per(10, TimeDelta::from_secs(86_400));
        let limit = LimitSpec::new(Algorithm::FixedWindow, rate).build().expect("a limit");
        let (scope, parts) = (Scope::new("api|caller"), [KeyPart::Text("a")]);
        let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE);
        let debit = || LateDebit {
            id: charge.key.id(),
            charge: SentCharge::new(&charge),
            taken_by: TakenBy::Owned,
            until: Timestamp::from_secs(1),
        };
        let debits = LateDebits::default();
        std::thread::scope(|threads| {
            let adding = threads.spawn(|| (0..200_000).for_each(|_| debits.0.add(debit())));
            while !adding.is_finished() {
                debits.take(Timestamp::ZERO);
                let table = debits.0.lock();
                assert_eq!(debits.is_empty(), table.is_empty());
            }
        });
    }
}
