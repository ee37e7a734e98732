//! A store whose answers come after the request was decided without it: whatever the answer, what was admitted counts
//! once, and what was denied counts not at all. And what a decision without the store begins from.

use crate::rig::{Memory, check, rules};
use std::sync::Arc;
use tollgate_core::conformance::{Fault, FaultyStore};
use tollgate_core::{Clock, Cost, LastKnown, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Limiter, Origin};
use tollgate_store::{MemoryConfig, MemoryStore};

struct Slow(Limiter<FaultyStore<Memory>>);

fn slow(rule: &str) -> Slow {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store");
    let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
    let text = format!("{{domain: d, descriptors: [{{key: user, name: u, {rule}}}]}}");
    Slow(Limiter::new(rules(&text), FaultyStore::new(counters), time).with_fallback(fallback))
}

impl Slow {
    fn set_late(&self) {
        self.0.store().set_fault(|_, _| Fault::Late);
    }

    /// Answers everything; `arrived` is whether the server got it at all.
    fn answer(&self, arrived: bool) {
        match arrived {
            true => pollster::block_on(self.0.store().answer_late()),
            false => self.0.store().refuse_late(),
        }
    }

    /// Sets what the store last said of a limit of 30, in time.
    fn set_known(&self, remaining: u64, age_secs: u64) {
        self.set_known_late(remaining, age_secs, Some(age_secs));
    }

    /// Sets what the store last said of a limit of 30, and when it last did in time.
    fn set_known_late(&self, remaining: u64, age_secs: u64, in_time_secs: Option<u64>) {
        let (secs, in_time) = (TimeDelta::from_secs, in_time_secs.map(TimeDelta::from_secs));
        let (used, reset_after, age) = (30 - remaining, secs(3_000), secs(age_secs));
        let known = LastKnown { used, reset_after, age, in_time, is_assumed: false };
        self.0.store().set_last_known(known);
    }

    fn passed(&self, tries: usize) -> (usize, Origin) {
        let decisions: Vec<_> = (0..tries).map(|_| check(&self.0, &[("user", "x")], Cost::ONE)).collect();
        (decisions.iter().filter(|decision| decision.is_allowed()).count(), decisions[0].origin)
    }

    /// How many pass when the store is in time again and everything is reconciled.
    fn left(&self) -> usize {
        self.0.store().clear_fault();
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
            slow.set_late();
            assert_eq!(slow.passed(4), (4, Origin::Local));
            assert!(!pollster::block_on(slow.0.reconcile()), "nothing is certain yet");
            if answered_first {
                slow.answer(arrived);
                assert_eq!(slow.left(), 6, "arrived: {arrived}");
            } else {
                // A check that overtakes the answers finds what they will be charged for, or not.
                slow.0.store().clear_fault();
                slow.answer(arrived);
                assert_eq!(slow.left(), 6, "arrived: {arrived}");
            }
        }
    }
}

/// A request that was denied must not have used anything, although the store charged it later.
#[test]
fn what_was_denied_is_given_back() {
    let slow = slow("limit: 10/hour, on_error: closed");
    slow.set_late();
    assert_eq!(slow.passed(4), (0, Origin::FailClosed));
    slow.answer(true);
    assert_eq!(slow.left(), 10);
}

/// A request that passed because its rule fails open keeps what the store charged for it.
#[test]
fn what_failed_open_keeps_its_late_charge() {
    let slow = slow("limit: 10/hour, on_error: open");
    slow.set_late();
    assert_eq!(slow.passed(4), (4, Origin::FailOpen));
    slow.answer(true);
    assert_eq!(slow.left(), 6);
}

/// A charge for an outage that is itself late must not be sent twice, nor be lost.
#[test]
fn a_late_reconciliation_counts_once() {
    for arrived in [true, false] {
        let slow = slow("limit: 10/hour");
        slow.set_late();
        assert_eq!(slow.passed(4).0, 4);
        slow.answer(false);
        assert!(pollster::block_on(slow.0.reconcile()), "late");
        assert!(!pollster::block_on(slow.0.reconcile()), "it is not sent again");
        slow.answer(arrived);
        assert_eq!(slow.left(), 6, "arrived: {arrived}");
    }
}

/// A caller with nothing left must not get the limit anew because the store is late, and nodes share what is left.
#[test]
fn a_decision_without_the_store_begins_from_its_last_reply() {
    let slow = slow("limit: 30/hour, algorithm: fixed_window");
    slow.set_late();
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
    slow.set_late();
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
