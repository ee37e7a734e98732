//! Reservations while the store is unavailable: they follow their rules' fail policy as checks do, count once, and are
//! every node's when the store answers again.

use crate::rig::{self, Memory, rules};
use std::sync::Arc;
use tollgate_core::conformance::{Fault, FaultyStore, MemoryRecords};
use tollgate_core::{Clock, Cost, ManualClock, RecordStore, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter, Origin, Reservation, ReserveError, SettleError, Settlement};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/hour, algorithm: fixed_window}
  - {key: bucket, name: bucket, limit: 1000/day}
  - {key: login, name: login, limit: 1000/hour, class: security}
  - {key: open, name: open, limit: 1000/hour, on_error: open}
";

/// Counters and records of one store, which fail on demand.
struct Shared {
    counters: Arc<FaultyStore<Memory>>,
    records: Arc<MemoryRecords<Arc<ManualClock>>>,
}

impl Shared {
    fn set(&self, counters: Service, records: Service) {
        match counters {
            Service::Up => self.counters.clear_fault(),
            Service::Down => self.counters.set_fault(|_, _| Fault::timeout()),
        }
        match records {
            Service::Up => self.records.clear_fault(),
            Service::Down => self.records.fail_after(0),
        }
    }
}

#[derive(Clone, Copy)]
enum Service {
    Up,
    Down,
}

type Node = Limiter<Arc<FaultyStore<Memory>>>;

fn nodes() -> (Shared, [Node; 2]) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store");
    let store = Shared {
        counters: Arc::new(FaultyStore::new(counters)),
        records: Arc::new(MemoryRecords::new(Arc::clone(&clock))),
    };
    let node = || {
        let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
        Limiter::new(rules(RULES), Arc::clone(&store.counters), time)
            .with_fallback(fallback)
            .with_shared_reservations(Arc::clone(&store.records) as Arc<dyn RecordStore>)
    };
    let nodes = [node(), node()];
    (store, nodes)
}

fn reserve(
    node: &Node,
    caller: &[(&str, &str)],
    cost: u64,
    key: Option<&str>,
) -> Result<Reservation, ReserveError> {
    let check = Check::attributes("d", caller).with_cost(Cost::new(cost));
    pollster::block_on(node.reserve(&check, TimeDelta::from_secs(60), key))
}

fn left(node: &Node, caller: &[(&str, &str)]) -> u64 {
    rig::check(node, caller, Cost::PEEK).limits[0].outcome.remaining
}

/// A rule that admits checks during an outage admits reservations too, and what is settled in the end counts once.
#[test]
fn a_comfort_rule_reserves_locally_and_counts_what_was_settled() {
    for caller in [[("user", "u")], [("bucket", "u")]] {
        let (store, [node, _]) = nodes();
        store.set(Service::Down, Service::Down);
        let first = reserve(&node, &caller, 300, Some("k")).expect("made");
        assert_eq!((first.decision.is_allowed(), first.decision.origin), (true, Origin::Local));
        let id = first.id.expect("it holds units");
        assert_eq!(reserve(&node, &caller, 300, Some("k")).expect("replayed").id, Some(id), "one charge");
        assert_eq!(
            reserve(&node, &caller, 301, Some("k")).expect_err("refused"),
            ReserveError::OtherContents
        );
        let second = reserve(&node, &caller, 300, None).expect("made").id.expect("it holds units");
        let third = reserve(&node, &caller, 300, None).expect("made").id.expect("it holds units");
        // During the outage, one less and one more than was reserved.
        let settled = pollster::block_on(node.settle(id, 100)).expect("settled");
        assert_eq!(settled.settlement, Settlement::Settled(100));
        assert_eq!(pollster::block_on(node.cancel(id)), Err(SettleError::Ended(Settlement::Settled(100))));
        pollster::block_on(node.settle(second, 350)).expect("settled");
        let fourth = reserve(&node, &caller, 250, None).expect("made");
        assert!(fourth.id.is_some(), "what was not used is free again: {:?}", fourth.decision);
        let none = reserve(&node, &caller, 300, None).expect("made");
        assert_eq!((none.id, none.decision.origin), (None, Origin::Local), "and the limit holds");
        // After it, on counters that the store has.
        store.set(Service::Up, Service::Up);
        assert_eq!(
            pollster::block_on(node.cancel(third)).expect("canceled").settlement,
            Settlement::Canceled
        );
        assert_eq!(left(&node, &caller), 1_000 - 100 - 350 - 250, "{caller:?}");
    }
}

/// A limit that guards something is closed for reservations as for checks; one without local counters holds nothing.
#[test]
fn a_security_rule_stays_closed_and_an_open_one_holds_nothing() {
    let (store, [node, _]) = nodes();
    store.set(Service::Down, Service::Down);
    let closed = reserve(&node, &[("login", "u")], 1, Some("k")).expect("decided");
    assert_eq!((closed.id, closed.decision.origin), (None, Origin::FailClosed));
    assert!(closed.decision.retry_after().is_some());
    let open = reserve(&node, &[("open", "u")], 1, None).expect("decided");
    assert_eq!((open.id, open.decision.is_allowed()), (None, true));
    store.set(Service::Up, Service::Up);
    let served = reserve(&node, &[("login", "u")], 1, Some("k")).expect("decided");
    assert!(served.id.is_some(), "the key is free again");
}

/// When the store is back, whichever node the client reaches must find the reservation.
#[test]
fn reservations_of_an_outage_are_handed_over() {
    let (store, [one, other]) = nodes();
    let caller = [("user", "u")];
    store.set(Service::Down, Service::Down);
    let id = reserve(&one, &caller, 300, Some("k")).expect("made").id.expect("it holds units");
    assert!(pollster::block_on(one.reconcile()), "not yet");
    store.set(Service::Up, Service::Up);
    assert_eq!(pollster::block_on(other.settle(id, 1)), Err(SettleError::Unknown));
    assert!(!pollster::block_on(one.reconcile()));
    assert_eq!(one.unreconciled(), (0, 0));
    assert_eq!(reserve(&other, &caller, 300, Some("k")).expect("replayed").id, Some(id));
    pollster::block_on(other.settle(id, 100)).expect("settled");
    assert_eq!(left(&one, &caller), 900);
    assert_eq!(pollster::block_on(one.cancel(id)), Err(SettleError::Ended(Settlement::Settled(100))));
}

/// A charge that the store has made must not stay because the record could not be stored.
#[test]
fn a_reservation_whose_record_fails_is_kept_by_its_node() {
    let (store, [one, other]) = nodes();
    let caller = [("login", "u")];
    store.set(Service::Up, Service::Down);
    let made = reserve(&one, &caller, 300, Some("k")).expect("made");
    assert_eq!(made.decision.origin, Origin::Store);
    let id = made.id.expect("it holds units");
    store.set(Service::Up, Service::Up);
    assert!(!pollster::block_on(one.reconcile()));
    pollster::block_on(other.cancel(id)).expect("canceled");
    assert_eq!(left(&one, &caller), 1_000);
}
