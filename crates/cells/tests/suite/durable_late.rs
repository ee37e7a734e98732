//! Durable counters of a store that answers late, fails or is charged by others while they are restored: what was lost is debited
//! once, and not forgotten before.

use crate::durable::{Clock, Table, charge, counters, month, node, write};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tollgate_cells::durable::{ReadBack, SavedSlot};
use tollgate_core::{
    Charge, Cost, CounterStore, LateAnswer, LateCharge, LateResponder, ManualClock, Outcomes, Permit,
    StoreError, TimeDelta, Timestamp,
};
use tollgate_store::MemoryStore;

/// How a store takes a charge.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Takes {
    InTime,
    /// It applies the charge, and says so too late.
    AppliesLate,
    /// It says too late that it has applied nothing.
    RefusesLate,
    /// It applies the charge, and its connection is lost after the deadline.
    AppliesUnanswered,
    Fails,
    /// Another node takes a unit first.
    AfterAnother,
}

/// A store that takes the next charges in given ways, and then in time.
struct Faulty {
    own: Arc<MemoryStore<Clock>>,
    next: Mutex<VecDeque<Takes>>,
    asked: Mutex<Vec<(LateResponder, LateAnswer)>>,
    undone: Arc<AtomicUsize>,
}

impl Faulty {
    fn new(clock: &Clock, next: &[Takes]) -> Arc<Self> {
        let next = Mutex::new(next.iter().copied().collect());
        Arc::new(Self { own: counters(clock), next, asked: Mutex::default(), undone: Arc::default() })
    }

    /// Gives all late answers.
    fn answer(&self) {
        for (responder, answer) in self.asked.lock().expect("answers").drain(..) {
            let undone = Arc::clone(&self.undone);
            responder.answer(answer, move || {
                undone.fetch_add(1, Ordering::Relaxed);
            });
        }
    }
}

impl CounterStore for Faulty {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let takes = self.next.lock().expect("ways").pop_front().unwrap_or(Takes::InTime);
        let answer = match takes {
            Takes::InTime => return self.own.charge(charges).await,
            Takes::Fails => return Err(StoreError::Unavailable("a server".to_owned())),
            Takes::AfterAnother => {
                let one = charges.last().map(|charge| Charge { cost: Cost::ONE, ..*charge });
                self.own.charge(&one.into_iter().collect::<Vec<_>>()).await?;
                return self.own.charge(charges).await;
            }
            Takes::RefusesLate => LateAnswer::NotCharged,
            Takes::AppliesLate | Takes::AppliesUnanswered => {
                self.own.charge(charges).await?;
                let charged = charges.iter().filter(|charge| !charge.cost.is_peek());
                let ids: Vec<_> = charged.map(|charge| charge.key.id()).collect();
                match takes {
                    Takes::AppliesUnanswered => LateAnswer::Unknown,
                    _ if ids.is_empty() => LateAnswer::NotCharged,
                    _ => LateAnswer::Charged(ids),
                }
            }
        };
        let (late, responder) = LateCharge::new();
        self.asked.lock().expect("answers").push((responder, answer));
        Err(StoreError::Late(late))
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.own.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.own.release(permits).await
    }
}

fn clock() -> Clock {
    Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)))
}

/// Returns the record of a caller `a` that has used so much of the month.
fn used(units: u64, clock: &Clock) -> Vec<SavedSlot> {
    let (old, mut table) = (node(&counters(clock), "old", clock), Table::default());
    charge(&old, &month(), "a", Cost::new(units));
    write(&mut table, 0, &old);
    table.saved()
}

/// A Redis that has come back empty is slow for a while. If one late answer made its record forgotten, callers could consume
/// their months again.
#[test]
fn a_store_that_fails_once_is_restored_by_the_next_request() {
    use Takes::{AppliesLate, AppliesUnanswered, Fails, InTime, RefusesLate};
    // Of the look, and of the debit after it.
    let looks = [vec![AppliesLate], vec![RefusesLate], vec![Fails]];
    let debits = [AppliesLate, RefusesLate, AppliesUnanswered, Fails].map(|takes| vec![InTime, takes]);
    for ways in looks.into_iter().chain(debits) {
        for after in [ReadBack::Start, ReadBack::Loss] {
            for is_answered_first in [true, false] {
                let (clock, limit) = (clock(), month());
                let store = Faulty::new(&clock, &ways);
                let node = node(&store, "new", &clock);
                let durable = node.durable().expect("a record");
                durable.install(used(900, &clock), after);
                charge(&node, &limit, "a", Cost::PEEK);
                assert_eq!(durable.stats().restore_failures, 1, "{ways:?}");
                if is_answered_first {
                    store.answer();
                }
                assert_eq!(charge(&node, &limit, "a", Cost::ONE), 99, "{ways:?}, {after:?}");
                store.answer();
                assert_eq!(charge(&node, &limit, "a", Cost::ONE), 98, "{ways:?}, {after:?}");
                assert_eq!(durable.stats().saved_counters, 0);
                assert_eq!(store.undone.load(Ordering::Relaxed), 0, "{ways:?}: what is restored stays");
                let restored = if ways.contains(&AppliesUnanswered) { 0 } else { 900 };
                assert_eq!(durable.stats().restored_units, restored, "{ways:?}");
            }
        }
    }
}

/// Without it a node that takes a unit at the wrong moment gives a caller the whole month again.
#[test]
fn a_counter_that_is_charged_while_it_is_restored_is_looked_at_again() {
    let (clock, limit) = (clock(), month());
    let store = Faulty::new(&clock, &[Takes::InTime, Takes::AfterAnother]);
    let node = node(&store, "new", &clock);
    node.durable().expect("a record").install(used(1_000, &clock), ReadBack::Loss);
    assert_eq!(charge(&node, &limit, "a", Cost::PEEK), 0);
    assert_eq!(node.durable().expect("a record").stats().restored_units, 999);
}

/// Without it a Redis that is emptied just before its nodes are restarted gives busy callers their months again: what they have
/// used since hides the loss from the new processes.
#[test]
fn a_process_that_starts_knows_whether_the_store_was_emptied() {
    let (clock, limit) = (clock(), month());
    let store = counters(&clock);
    let is_new = |process: &str| {
        let node = node(&store, process, &clock);
        let is_new = pollster::block_on(node.is_new()).expect("an answer");
        pollster::block_on(node.write_canaries()).expect("written");
        is_new
    };
    assert!(is_new("first") && is_new("second"), "those that start together all know");
    clock.advance(TimeDelta::from_secs(61));
    assert!(!is_new("third"), "nothing was lost since");
    // In half a day all renew.
    clock.advance(TimeDelta::from_secs(43_200));
    assert!(!is_new("third"));
    clock.advance(TimeDelta::from_secs(80_000));
    assert!(!is_new("fourth"));

    // Emptied, and touched before anybody noticed.
    let (empty, saved) = (counters(&clock), used(900, &clock));
    let old = node(&empty, "fourth", &clock);
    assert_eq!(charge(&old, &limit, "a", Cost::ONE), 999);
    let restarted = node(&empty, "fifth", &clock);
    assert!(pollster::block_on(restarted.is_new()).expect("an answer"));
    restarted.durable().expect("a record").install(saved, ReadBack::Loss);
    assert_eq!(charge(&restarted, &limit, "a", Cost::PEEK), 100);
}
