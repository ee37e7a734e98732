//! Reservations while the store is unavailable: they follow their rules' fail policy as checks do, count once, and are
//! every node's when the store answers again.

use crate::rig::{self, rules};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tollgate_core::{
    Charge, Clock, Cost, CounterStore, Exchange, ManualClock, Outcomes, Permit, RecordFuture, RecordName,
    RecordStore, StoreError, TimeDelta, Timestamp,
};
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

type Memory = MemoryStore<Arc<ManualClock>>;

/// Counters and records of one store, which fail on demand.
struct Store {
    clock: Arc<ManualClock>,
    counters: Memory,
    records: Mutex<HashMap<RecordName, Vec<u8>>>,
    counters_fail: AtomicBool,
    records_fail: AtomicBool,
}

#[derive(Clone)]
struct Shared(Arc<Store>);

impl Shared {
    fn fault(&self, fails: &AtomicBool) -> Result<(), StoreError> {
        if fails.load(Ordering::Relaxed) { Err(StoreError::Timeout) } else { Ok(()) }
    }

    fn set(&self, counters: bool, records: bool) {
        self.0.counters_fail.store(!counters, Ordering::Relaxed);
        self.0.records_fail.store(!records, Ordering::Relaxed);
    }
}

impl CounterStore for Shared {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.fault(&self.0.counters_fail)?;
        self.0.counters.charge(charges).await
    }
    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.fault(&self.0.counters_fail)?;
        self.0.counters.debit(charges).await
    }
    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.fault(&self.0.counters_fail)?;
        self.0.counters.release(permits).await
    }
}

impl RecordStore for Shared {
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange> {
        Box::pin(async move {
            self.fault(&self.0.records_fail)?;
            let mut records = self.0.records.lock().expect("one thread");
            let record = records.get(&name).cloned();
            let new = new.filter(|_| record.as_deref() == expected);
            if let Some((bytes, _)) = new {
                records.insert(name, bytes.to_vec());
            }
            Ok(Exchange { is_stored: new.is_some(), record, at: self.0.clock.now() })
        })
    }

    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()> {
        Box::pin(async move {
            self.fault(&self.0.records_fail)?;
            self.0.records.lock().expect("one thread").remove(&name);
            Ok(())
        })
    }
}

type Node = Limiter<Shared>;

fn nodes() -> (Shared, [Node; 2]) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store");
    let store = Shared(Arc::new(Store {
        clock: Arc::clone(&clock),
        counters,
        records: Mutex::default(),
        counters_fail: AtomicBool::new(false),
        records_fail: AtomicBool::new(false),
    }));
    let node = || {
        let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
        Limiter::new(rules(RULES), store.clone(), time)
            .with_fallback(fallback)
            .with_shared_reservations(Arc::new(store.clone()))
    };
    (store.clone(), [node(), node()])
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
        store.set(false, false);
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
        store.set(true, true);
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
    store.set(false, false);
    let closed = reserve(&node, &[("login", "u")], 1, Some("k")).expect("decided");
    assert_eq!((closed.id, closed.decision.origin), (None, Origin::FailClosed));
    assert!(closed.decision.retry_after().is_some());
    let open = reserve(&node, &[("open", "u")], 1, None).expect("decided");
    assert_eq!((open.id, open.decision.is_allowed()), (None, true));
    store.set(true, true);
    let served = reserve(&node, &[("login", "u")], 1, Some("k")).expect("decided");
    assert!(served.id.is_some(), "the key is free again");
}

/// When the store is back, whichever node the client reaches must find the reservation.
#[test]
fn reservations_of_an_outage_are_handed_over() {
    let (store, [one, other]) = nodes();
    let caller = [("user", "u")];
    store.set(false, false);
    let id = reserve(&one, &caller, 300, Some("k")).expect("made").id.expect("it holds units");
    assert!(pollster::block_on(one.reconcile()), "not yet");
    store.set(true, true);
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
    store.set(true, false);
    let made = reserve(&one, &caller, 300, Some("k")).expect("made");
    assert_eq!(made.decision.origin, Origin::Store);
    let id = made.id.expect("it holds units");
    store.set(true, true);
    assert!(!pollster::block_on(one.reconcile()));
    pollster::block_on(other.cancel(id)).expect("canceled");
    assert_eq!(left(&one, &caller), 1_000);
}
