//! Closing a reservation while a part of the store fails: a client repeats what is answered with an error, and each counter
//! is moved once.

use crate::rig::rules;
use std::sync::{Arc, Mutex, MutexGuard};
use tollgate_core::{
    Charge, Clock, Cost, CounterId, CounterKey, CounterStore, LateAnswer, LateCharge, LateResponder,
    ManualClock, Outcomes, Permit, StoreError, TimeDelta, Timestamp,
};
use tollgate_engine::{Check, Limiter, ReservationId, SettleError, Settlement};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/hour, algorithm: fixed_window}
  - {key: slot, name: slots, concurrency: 2}
  - {key: team, name: team, limit: 1000/hour, algorithm: fixed_window}
";
const ALL: [(&str, &str); 3] = [("user", "u"), ("slot", "u"), ("team", "u")];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Nothing is sent.
    Down,
    /// It is applied, and the answer is late.
    Late,
    /// It is not applied, and the answer that says so is late.
    LateRefusal,
    /// It is applied, and the connection is lost before the answer.
    Lost,
}

#[derive(Default)]
struct Faults {
    of_rules: Vec<(&'static str, Fault)>,
    late: Vec<(CounterId, Fault, LateResponder)>,
}

/// A store of a shard for each rule, some of which have a fault.
#[derive(Clone)]
struct Shards(Arc<(MemoryStore<Arc<ManualClock>>, Mutex<Faults>)>);

impl Shards {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.0.1.lock().expect("one thread")
    }

    fn set(&self, of_rules: &[(&'static str, Fault)]) {
        self.faults().of_rules = of_rules.to_vec();
    }

    fn fail(&self, rules: &[&'static str]) {
        self.set(&rules.iter().map(|rule| (*rule, Fault::Down)).collect::<Vec<_>>());
    }

    fn fault(&self, key: &CounterKey<'_>) -> Option<Fault> {
        let faults = self.faults();
        faults.of_rules.iter().find(|(rule, _)| key.scope.label().contains(rule)).map(|(_, fault)| *fault)
    }

    /// Sends the late answers; returns how many there were.
    fn answer(&self) -> usize {
        let late = std::mem::take(&mut self.faults().late);
        let count = late.len();
        for (id, fault, responder) in late {
            let is_applied = fault == Fault::Late;
            let answer = if is_applied { LateAnswer::Charged(vec![id]) } else { LateAnswer::NotCharged };
            responder.answer(answer, || panic!("a reservation keeps its debits"));
        }
        count
    }

    async fn debit_one(&self, charge: &Charge<'_>) -> Result<(), StoreError> {
        let fault = self.fault(&charge.key);
        if !matches!(fault, Some(Fault::Down | Fault::LateRefusal)) {
            self.0.0.debit(&[*charge]).await?;
        }
        match fault {
            None => Ok(()),
            Some(Fault::Down) => Err(down()),
            Some(Fault::Lost) => Err(StoreError::Lost("a shard".to_owned())),
            Some(fault) => {
                let (late, responder) = LateCharge::new();
                self.faults().late.push((charge.key.id(), fault, responder));
                Err(StoreError::Late(late))
            }
        }
    }
}

fn down() -> StoreError {
    StoreError::Unavailable("a shard".to_owned())
}

impl CounterStore for Shards {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.0.0.charge(charges).await
    }
    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let mut errors = Vec::new();
        for (at, charge) in charges.iter().enumerate() {
            errors.extend(self.debit_one(charge).await.err().map(|error| (vec![at], error)));
        }
        StoreError::of_debits(errors, charges.len())
    }
    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        if permits.iter().any(|permit| self.fault(&permit.key).is_some()) {
            return Err(down());
        }
        self.0.0.release(permits).await
    }
}

fn node() -> (Shards, Limiter<Shards>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock));
    let shards = Shards(Arc::new((memory.expect("a small store"), Mutex::default())));
    let time: Arc<dyn Clock> = clock as _;
    (shards.clone(), Limiter::new(rules(RULES), shards, time))
}

fn reserve(node: &Limiter<Shards>, cost: u64) -> ReservationId {
    let check = Check::attributes("d", &ALL).with_cost(Cost::new(cost));
    let made = pollster::block_on(node.reserve(&check, TimeDelta::from_secs(60), None));
    made.expect("stored").id.expect("allowed")
}

/// Returns what remains of the tokens, the slots and the team's tokens.
fn left(node: &Limiter<Shards>) -> [u64; 3] {
    let look = pollster::block_on(node.check(&Check::attributes("d", &ALL).with_cost(Cost::PEEK)));
    ["tokens", "slots", "team"].map(|rule| {
        let limit = look.limits.iter().find(|limit| look.limit_name(limit) == rule);
        limit.expect("a limit of each rule").outcome.remaining
    })
}

/// A caller that repeats its cancel while a permit's shard is down must not get units that it never took.
#[test]
fn repeated_cancels_refund_once() {
    for failing in ["slot", "team"] {
        let (shards, node) = node();
        let (id, _other) = (reserve(&node, 100), reserve(&node, 500));
        assert_eq!(left(&node), [400, 0, 400]);
        shards.fail(&[failing]);
        for _ in 0..5 {
            let closed = pollster::block_on(node.cancel(id));
            assert!(matches!(closed, Err(SettleError::Store(_))), "{failing}: {closed:?}");
            assert_eq!(left(&node)[0], 500, "{failing}");
        }
        shards.fail(&[]);
        let closed = pollster::block_on(node.cancel(id)).map(|closed| closed.settlement);
        assert_eq!(closed, Ok(Settlement::Canceled), "it stayed open");
        assert_eq!(left(&node), [500, 1, 500], "{failing}");
    }
}

/// Work that cost more than estimated is charged once, and a client that changes its mind meanwhile gets what it asks for last.
#[test]
fn repeated_settlements_charge_once() {
    let (shards, node) = node();
    let id = reserve(&node, 100);
    shards.fail(&["team"]);
    for _ in 0..5 {
        assert!(pollster::block_on(node.settle(id, 300)).is_err());
        assert_eq!(left(&node)[0], 700);
    }
    shards.fail(&[]);
    assert!(pollster::block_on(node.settle(id, 40)).is_ok());
    assert_eq!(left(&node), [960, 2, 960]);
}

/// What a store may have applied is not sent again, whatever the client repeats: an answer may be late each time.
#[test]
fn a_cancel_whose_answer_is_late_or_lost_refunds_once() {
    for fault in [Fault::Late, Fault::Lost] {
        for failing in [vec![("team", fault)], vec![("user", fault), ("team", fault)]] {
            let (shards, node) = node();
            let (id, _other) = (reserve(&node, 100), reserve(&node, 500));
            shards.set(&failing);
            for _ in 0..5 {
                let closed = pollster::block_on(node.cancel(id)).map(|closed| closed.settlement);
                assert_eq!(closed, Ok(Settlement::Canceled), "{failing:?}");
                assert_eq!(left(&node), [500, 1, 500], "{failing:?}");
            }
            assert_eq!(shards.answer(), if fault == Fault::Late { failing.len() } else { 0 });
            shards.fail(&[]);
            assert!(!pollster::block_on(node.reconcile()));
            assert_eq!(left(&node), [500, 1, 500], "{failing:?}");
        }
    }
}

/// A settlement to more is charged once: by the store, or afterwards if the late answer is that it was not.
#[test]
fn a_settlement_whose_answer_is_late_or_lost_charges_once() {
    for fault in [Fault::Late, Fault::LateRefusal, Fault::Lost] {
        let (shards, node) = node();
        let id = reserve(&node, 100);
        shards.set(&[("user", fault), ("team", fault)]);
        for _ in 0..5 {
            let closed = pollster::block_on(node.settle(id, 300)).map(|closed| closed.settlement);
            assert_eq!(closed, Ok(Settlement::Settled(300)), "{fault:?}");
        }
        shards.fail(&[]);
        assert_eq!(shards.answer(), if fault == Fault::Lost { 0 } else { 2 });
        assert!(!pollster::block_on(node.reconcile()));
        assert_eq!(left(&node), [700, 2, 700], "{fault:?}");
    }
}

/// Beside a shard that is late, the one that is down has not been moved: the client repeats its call for that.
#[test]
fn what_is_down_is_moved_later_and_what_is_late_is_not_moved_again() {
    for fault in [Fault::Late, Fault::Lost] {
        let (shards, node) = node();
        let (id, _other) = (reserve(&node, 100), reserve(&node, 500));
        shards.set(&[("user", fault), ("team", Fault::Down)]);
        for _ in 0..3 {
            let closed = pollster::block_on(node.cancel(id));
            assert!(matches!(closed, Err(SettleError::Store(_))), "{closed:?}");
            assert_eq!(left(&node), [500, 1, 400], "{fault:?}");
        }
        shards.fail(&[]);
        assert!(pollster::block_on(node.cancel(id)).is_ok());
        assert_eq!(left(&node), [500, 1, 500], "{fault:?}");
    }
}

/// Without it what a late shard refuses is never charged if another one is down at the same time.
#[test]
fn a_settlement_that_one_shard_refuses_late_and_another_fails_charges_both_once() {
    for fault in [Fault::Late, Fault::LateRefusal] {
        let (shards, node) = node();
        let id = reserve(&node, 100);
        shards.set(&[("user", fault), ("team", Fault::Down)]);
        let closed = pollster::block_on(node.settle(id, 300));
        assert!(matches!(closed, Err(SettleError::Store(_))), "{closed:?}");
        shards.fail(&[]);
        assert_eq!(shards.answer(), 1);
        assert!(pollster::block_on(node.settle(id, 300)).is_ok());
        assert!(!pollster::block_on(node.reconcile()));
        assert_eq!(left(&node), [700, 2, 700], "{fault:?}");
    }
}
