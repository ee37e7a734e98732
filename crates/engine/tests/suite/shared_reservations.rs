//! Reservations that several nodes share: made on one, closed on another, also when one of them dies.

use crate::rig::{self, rules};
use std::sync::Arc;
use tollgate_core::conformance::MemoryRecords;
use tollgate_core::{Clock, Cost, CounterStore, ManualClock, RecordStore, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter, ReservationId, ReserveError, SettleError, Settlement};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/hour, algorithm: fixed_window}
  - {key: slot, name: slots, concurrency: 2}
";
const WHO: [(&str, &str); 2] = [("user", "u"), ("slot", "u")];

type Shared = MemoryRecords<Arc<ManualClock>>;
type Node = Limiter<Arc<MemoryStore<Arc<ManualClock>>>>;

fn nodes() -> (Arc<ManualClock>, Arc<Shared>, [Node; 2]) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store =
        MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a small store");
    let (store, shared) = (Arc::new(store), Arc::new(MemoryRecords::new(Arc::clone(&clock))));
    let node = || {
        let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
        Limiter::new(rules(RULES), Arc::clone(&store), time)
            .with_shared_reservations(Arc::clone(&shared) as Arc<dyn RecordStore>)
    };
    let nodes = [node(), node()];
    (clock, shared, nodes)
}

fn reserve(node: &Node, cost: u64, key: Option<&str>) -> Result<Option<ReservationId>, ReserveError> {
    let check = Check::attributes("d", &WHO).with_cost(Cost::new(cost));
    pollster::block_on(node.reserve(&check, TimeDelta::from_secs(60), key)).map(|made| made.id)
}

fn left<S: CounterStore>(node: &Limiter<S>, rule: &str) -> u64 {
    let look = rig::check(node, &WHO, Cost::PEEK);
    let limit = look.limits.iter().find(|limit| look.limit_name(limit) == rule);
    limit.expect("a limit of that name").outcome.remaining
}

#[test]
fn what_one_node_reserves_another_settles_or_cancels() {
    let (_, _, [one, other]) = nodes();
    let first = reserve(&one, 300, Some("k")).unwrap().expect("allowed");
    assert_eq!(reserve(&other, 300, Some("k")), Ok(Some(first)), "a retry that reaches another node");
    assert_eq!(reserve(&other, 301, Some("k")), Err(ReserveError::OtherContents));
    let second = reserve(&one, 300, None).unwrap().expect("allowed");
    assert_eq!((left(&one, "tokens"), left(&one, "slots")), (400, 0));
    let settled = pollster::block_on(other.settle(first, 100)).map(|closed| closed.settlement);
    assert_eq!(settled, Ok(Settlement::Settled(100)));
    let late = pollster::block_on(one.cancel(first)).map(|closed| closed.settlement);
    assert_eq!(late, Err(SettleError::Ended(Settlement::Settled(100))));
    assert_eq!(reserve(&one, 300, Some("k")), Err(ReserveError::Ended(Settlement::Settled(100))));
    let canceled = pollster::block_on(other.cancel(second)).map(|closed| closed.settlement);
    assert_eq!(canceled, Ok(Settlement::Canceled));
    assert_eq!((left(&one, "tokens"), left(&one, "slots")), (900, 2));
}

/// A node that dies while it settles must not leave units to be given back twice.
#[test]
fn a_node_that_dies_while_settling_is_believed_to_have_settled() {
    let (clock, shared, [one, other]) = nodes();
    let id = reserve(&one, 300, None).unwrap().expect("allowed");
    // It reads, claims and moves the counters; then it is gone.
    shared.fail_after(2);
    let _ = pollster::block_on(one.settle(id, 100));
    shared.clear_fault();
    let settle = || pollster::block_on(other.settle(id, 100)).map(|closed| closed.settlement);
    assert_eq!(settle(), Err(SettleError::InProgress));
    clock.advance(TimeDelta::from_secs(10));
    assert_eq!(settle(), Ok(Settlement::Settled(100)));
    let cancel = pollster::block_on(other.cancel(id)).map(|closed| closed.settlement);
    assert_eq!(cancel, Err(SettleError::Ended(Settlement::Settled(100))));
    assert_eq!(left(&other, "tokens"), 900);
}

/// A reservation whose record could not be stored must not stay charged: its caller has an ID to close it by.
#[test]
fn what_could_not_be_stored_is_kept_by_its_node() {
    let (_, shared, [one, other]) = nodes();
    shared.fail_after(0);
    let first = reserve(&one, 300, None).unwrap().expect("allowed");
    shared.fail_after(1);
    let second = reserve(&one, 300, Some("k")).unwrap().expect("allowed");
    assert_eq!(reserve(&one, 300, Some("k")), Ok(Some(second)), "a retry is charged once");
    shared.clear_fault();
    assert_eq!((left(&one, "tokens"), left(&one, "slots")), (400, 0));
    assert!(pollster::block_on(one.cancel(first)).is_ok());
    assert!(!pollster::block_on(one.reconcile()), "handed over");
    assert_eq!(reserve(&other, 300, Some("k")), Ok(Some(second)));
    assert!(pollster::block_on(other.cancel(second)).is_ok());
    assert_eq!((left(&one, "tokens"), left(&one, "slots")), (1_000, 2));
}

/// The key of a node that died before it had stored its reservation is free again after a while, and not before.
#[test]
fn a_claim_of_a_dead_node_is_taken_over() {
    let (clock, shared, [one, other]) = nodes();
    shared.fail_after(1);
    let _ = reserve(&one, 300, Some("k"));
    drop(one);
    shared.clear_fault();
    assert_eq!(reserve(&other, 300, Some("k")), Err(ReserveError::InProgress));
    clock.advance(TimeDelta::from_secs(10));
    let id = reserve(&other, 300, Some("k")).unwrap().expect("allowed");
    assert_eq!(reserve(&other, 300, Some("k")), Ok(Some(id)));
    assert_eq!(left(&other, "tokens"), 400, "what the dead node had charged stays, as after a deadline");
}

/// A stored reservation must reveal neither its caller nor how to close it.
#[test]
fn records_are_not_readable_in_the_store() {
    let (_, shared, [one, _]) = nodes();
    let id = reserve(&one, 300, Some("a-key")).unwrap().expect("allowed");
    for (name, bytes) in shared.all() {
        assert_ne!(name.0, id.0.to_le_bytes());
        for secret in [b"tokens".as_slice(), b"user", b"a-key", &id.0.to_le_bytes(), &id.0.to_be_bytes()] {
            assert!(!bytes.windows(secret.len()).any(|window| window == secret), "{secret:?}");
        }
    }
}
