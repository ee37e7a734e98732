//! A store whose answers come after the request was decided without it: whatever the answer, what was admitted counts
//! once, and what was denied counts not at all. And what a decision without the store begins from.

use crate::rig::{check, rules};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterId, CounterKey, CounterStore, KeyPart, LastKnown, LateAnswer,
    LateCharge, LateResponder, Limit, ManualClock, Outcomes, OwnedKeyPart, Permit, Scope, StoreError,
    TimeDelta, Timestamp,
};
use tollgate_engine::{Limiter, Origin};
use tollgate_store::{MemoryConfig, MemoryStore};

/// One charge that has not been answered.
struct Unanswered {
    scope: Scope,
    parts: Vec<OwnedKeyPart>,
    limit: Limit,
    cost: Cost,
    id: CounterId,
    responder: LateResponder,
}

/// Counters that answer late on command.
struct LateStore {
    counters: Arc<MemoryStore<Arc<ManualClock>>>,
    is_late: AtomicBool,
    unanswered: Mutex<Vec<Unanswered>>,
    known: Mutex<Option<LastKnown>>,
}

impl LateStore {
    /// Answers everything; `arrived` is whether the server got it at all.
    fn answer(&self, arrived: bool) {
        for one in std::mem::take(&mut *self.unanswered.lock().expect("a list")) {
            let parts: Vec<KeyPart<'_>> = one.parts.iter().map(OwnedKeyPart::as_part).collect();
            let key = CounterKey { scope: &one.scope, parts: &parts };
            let charge = Charge::new(key, &one.limit, one.cost);
            let outcomes =
                arrived.then(|| pollster::block_on(self.counters.charge(&[charge])).expect("memory"));
            let charged = outcomes.is_some_and(|outcomes| outcomes.admission == Admission::Admitted);
            let answer = if charged { LateAnswer::Charged(vec![one.id]) } else { LateAnswer::NotCharged };
            let (counters, limit) = (Arc::clone(&self.counters), one.limit.clone());
            let (scope, owned, cost) = (one.scope.clone(), one.parts.clone(), one.cost);
            one.responder.answer(answer, move || {
                let parts: Vec<KeyPart<'_>> = owned.iter().map(OwnedKeyPart::as_part).collect();
                let key = CounterKey { scope: &scope, parts: &parts };
                let back = Charge::new(key, &limit, cost.negated());
                pollster::block_on(counters.debit(&[back])).expect("memory");
            });
        }
    }

    fn late(&self, charges: &[Charge<'_>]) -> StoreError {
        let (late, responder) = LateCharge::new();
        let [charge] = charges else { panic!("one limit") };
        self.unanswered.lock().expect("a list").push(Unanswered {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedKeyPart::from).collect(),
            limit: charge.limit.clone(),
            cost: charge.cost,
            id: charge.key.id(),
            responder,
        });
        StoreError::Late(late)
    }
}

impl CounterStore for LateStore {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        if self.is_late.load(Ordering::Relaxed) {
            return Err(self.late(charges));
        }
        self.counters.charge(charges).await
    }
    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        if self.is_late.load(Ordering::Relaxed) {
            return Err(self.late(charges));
        }
        self.counters.debit(charges).await
    }
    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.counters.release(permits).await
    }
    fn last_known(&self, _charge: &Charge<'_>) -> Option<LastKnown> {
        *self.known.lock().expect("a value")
    }
}

struct Slow(Limiter<LateStore>);

fn slow(rule: &str) -> Slow {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = Arc::new(MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store"));
    let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
    let store = LateStore {
        counters,
        is_late: AtomicBool::new(false),
        unanswered: Mutex::default(),
        known: Mutex::default(),
    };
    let text = format!("{{domain: d, descriptors: [{{key: user, name: u, {rule}}}]}}");
    Slow(Limiter::new(rules(&text), store, time).with_fallback(fallback))
}

impl Slow {
    fn set_late(&self, is_late: bool) {
        self.0.store().is_late.store(is_late, Ordering::Relaxed);
    }

    /// Sets what the store last said of a limit of 30, in time.
    fn set_known(&self, remaining: u64, age_secs: u64) {
        self.set_known_late(remaining, age_secs, Some(age_secs));
    }

    /// Sets what the store last said of a limit of 30, and when it last did in time.
    fn set_known_late(&self, remaining: u64, age_secs: u64, in_time_secs: Option<u64>) {
        let (secs, in_time) = (TimeDelta::from_secs, in_time_secs.map(TimeDelta::from_secs));
        let (used, reset_after, age) = (30 - remaining, secs(3_000), secs(age_secs));
        let known = LastKnown { used, reset_after, age, in_time };
        *self.0.store().known.lock().expect("a value") = Some(known);
    }

    fn passed(&self, tries: usize) -> (usize, Origin) {
        let decisions: Vec<_> = (0..tries).map(|_| check(&self.0, &[("user", "x")], Cost::ONE)).collect();
        (decisions.iter().filter(|decision| decision.is_allowed()).count(), decisions[0].origin)
    }

    /// How many pass when the store is in time again and everything is reconciled.
    fn left(&self) -> usize {
        self.set_late(false);
        pollster::block_on(self.0.reconcile());
        self.passed(30).0
    }
}

/// What was admitted without the store must count once: not twice where the store charged it later, and not never where
/// it did not.
#[test]
fn a_late_charge_counts_once() {
    for arrived in [true, false] {
        for answered_first in [true, false] {
            let slow = slow("limit: 10/hour");
            slow.set_late(true);
            assert_eq!(slow.passed(4), (4, Origin::Local));
            assert!(!pollster::block_on(slow.0.reconcile()), "nothing is certain yet");
            if answered_first {
                slow.0.store().answer(arrived);
                assert_eq!(slow.left(), 6, "arrived: {arrived}");
            } else {
                // A check that overtakes the answers finds what they will be charged for, or not.
                slow.set_late(false);
                slow.0.store().answer(arrived);
                assert_eq!(slow.left(), 6, "arrived: {arrived}");
            }
        }
    }
}

/// A request that was denied must not have used anything, although the store charged it later.
#[test]
fn what_was_denied_is_given_back() {
    let slow = slow("limit: 10/hour, on_error: closed");
    slow.set_late(true);
    assert_eq!(slow.passed(4), (0, Origin::FailClosed));
    slow.0.store().answer(true);
    assert_eq!(slow.left(), 10);
}

/// A request that passed because its rule fails open keeps what the store charged for it.
#[test]
fn what_failed_open_keeps_its_late_charge() {
    let slow = slow("limit: 10/hour, on_error: open");
    slow.set_late(true);
    assert_eq!(slow.passed(4), (4, Origin::FailOpen));
    slow.0.store().answer(true);
    assert_eq!(slow.left(), 6);
}

/// A charge for an outage that is itself late must not be sent twice, nor be lost.
#[test]
fn a_late_reconciliation_counts_once() {
    for arrived in [true, false] {
        let slow = slow("limit: 10/hour");
        slow.set_late(true);
        assert_eq!(slow.passed(4).0, 4);
        slow.0.store().answer(false);
        assert!(pollster::block_on(slow.0.reconcile()), "late");
        assert!(!pollster::block_on(slow.0.reconcile()), "it is not sent again");
        slow.0.store().answer(arrived);
        assert_eq!(slow.left(), 6, "arrived: {arrived}");
    }
}

/// A caller with nothing left must not get the limit anew because the store is late, and nodes share what is left.
#[test]
fn a_decision_without_the_store_begins_from_its_last_reply() {
    let slow = slow("limit: 30/hour, algorithm: fixed_window");
    slow.set_late(true);
    slow.set_known(0, 10);
    assert_eq!(slow.passed(5), (0, Origin::Local));
    slow.0.set_live_nodes(3);
    // The store has answered since.
    slow.set_known(12, 5);
    assert_eq!(slow.passed(30).0, 4, "a third of twelve");
    assert_eq!(slow.passed(30).0, 0, "once");
    // Four are in doubt: the store may not have counted them when it said this.
    slow.set_known(24, 1);
    assert_eq!(slow.passed(30).0, 4, "a third of 24, less four");
    slow.set_known(0, 1);
    slow.set_known(0, 0);
    assert_eq!(slow.passed(30).0, 0);
}

/// Without it a limit that is asked for more than it gives admits nothing while the store is late: what its late answers
/// count is taken by requests that are denied, and a node's share is given anew with every answer.
#[test]
fn a_counter_without_the_store_goes_on_by_itself_while_answers_are_late() {
    let slow = slow("limit: 30/hour, algorithm: fixed_window");
    slow.set_late(true);
    slow.0.set_live_nodes(3);
    slow.set_known_late(24, 10, None);
    assert_eq!(slow.passed(3).0, 3, "the first answer, although it was late");
    for (remaining, age) in [(0, 5), (30, 4), (0, 3)] {
        slow.set_known_late(remaining, age, None);
        assert_eq!(slow.passed(1).0, 1, "{remaining}");
    }
    slow.set_known_late(30, 2, None);
    assert_eq!(slow.passed(30).0, 2, "a third of 24 in all");
    // It has answered in time since, and says less now: what it says now counts.
    slow.set_known_late(27, 0, Some(1));
    assert_eq!(slow.passed(30).0, 1, "a third of 27, less the eight in doubt");
    slow.set_known_late(30, 0, Some(1));
    assert_eq!(slow.passed(30).0, 0, "once");
}
