//! The fleet's hot list: a key that another process has found hot is leased from its next charge on, and forgotten when the
//! list no longer has it.

use std::sync::Arc;
use tollgate_core::conformance::{ReferenceStore, block_on};
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, ManualClock, Mode,
    PermitId, Rate, Scope, TimeDelta, Timestamp, nonzero,
};
use tollgate_store::{HotCounter, LeaseConfig, LeaseStats, LeasedStore};

type Reference = Arc<ReferenceStore<Arc<ManualClock>>>;

struct Node {
    clock: Arc<ManualClock>,
    leases: LeasedStore<Reference, Reference, Arc<ManualClock>>,
    limit: Limit,
    scope: Scope,
    tasks: std::cell::Cell<u128>,
}

const LIFETIME: TimeDelta = TimeDelta::from_secs(10);

fn node(config: LeaseConfig) -> Node {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let store = Arc::new(ReferenceStore::new(Arc::clone(&clock)));
    let leases = LeasedStore::new(Arc::clone(&store), store, Arc::clone(&clock), config);
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10_000)));
    let limit = limit.build().expect("a limit");
    Node { clock, leases, limit, scope: Scope::new("hot"), tasks: std::cell::Cell::new(0) }
}

/// The name of a caller's counter.
fn name_of(caller: &str) -> u64 {
    caller.len() as u64
}

impl Node {
    fn charge(&self, caller: &str, mode: Mode) {
        let parts = [KeyPart::Text(caller)];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        let charge = Charge { mode, ..Charge::new(key, &self.limit, Cost::ONE) };
        block_on(self.leases.charge(&[charge])).expect("it answers");
        self.work();
    }

    fn work(&self) {
        for task in self.leases.due_tasks() {
            self.tasks.set(self.tasks.get() + 1);
            block_on(self.leases.run_task(task, PermitId(self.tasks.get())));
        }
    }

    fn share(&self) {
        self.leases.share_hot_keys(Arc::new(|key| match key.parts {
            [KeyPart::Text(caller)] => name_of(caller),
            _ => 0,
        }));
    }

    fn stats(&self) -> LeaseStats {
        self.leases.stats()
    }
}

/// The first requests of a key that is hot elsewhere would otherwise all go to the store.
#[test]
fn a_listed_key_is_leased_at_its_first_charge_and_others_are_not() {
    let node = node(LeaseConfig::default());
    node.share();
    node.charge("ann", Mode::Adaptive);
    assert_eq!(node.stats().leases, 0, "nobody has found it hot");
    node.leases.set_hot_list([name_of("ann")], LIFETIME);
    node.charge("ann", Mode::Adaptive);
    node.charge("barbara", Mode::Adaptive);
    node.charge("eve", Mode::Central);
    let stats = node.stats();
    assert_eq!((stats.leases, stats.promoted, stats.listed), (1, 1, 1));
    assert!(stats.available > 0, "its units have arrived");
    node.charge("ann", Mode::Adaptive);
    assert_eq!(node.stats().local, 1, "decided here");
}

/// Two processes must not keep a key hot by telling each other of it: only own traffic is reported.
#[test]
fn what_the_list_made_hot_is_not_reported() {
    let node = node(LeaseConfig::default());
    node.share();
    node.leases.set_hot_list([name_of("ann")], LIFETIME);
    for _ in 0..20 {
        node.charge("ann", Mode::Adaptive);
        node.clock.advance(TimeDelta::from_millis(100));
    }
    assert_eq!(node.stats().leases, 1);
    assert!(node.leases.hot_counters(10).is_empty());
    for _ in 0..2_000 {
        node.charge("barbara", Mode::Adaptive);
        node.clock.advance(TimeDelta::from_micros(500));
    }
    let hot = node.leases.hot_counters(10);
    assert!(matches!(hot[..], [HotCounter { name: 7, rate: 1_000.. }]), "{hot:?}");
    assert!(node.leases.hot_counters(0).is_empty());
}

/// A lease that is never given up keeps units from the rest of the fleet.
#[test]
fn a_key_is_forgotten_when_the_list_ends() {
    let node = node(LeaseConfig::default());
    node.share();
    node.leases.set_hot_list([name_of("ann")], LIFETIME);
    let pass = |millis: u64| {
        for _ in 0..millis / 200 {
            node.charge("ann", Mode::Adaptive);
            node.clock.advance(TimeDelta::from_millis(200));
        }
    };
    pass(9_600);
    assert_eq!((node.stats().leases, node.stats().demoted), (1, 0), "slow here, hot elsewhere");
    pass(6_000);
    assert_eq!((node.stats().leases, node.stats().demoted), (0, 1), "the list has expired");
    node.charge("ann", Mode::Adaptive);
    assert_eq!(node.stats().promoted, 1);

    // Idle keys are returned however hot they are elsewhere.
    node.leases.set_hot_list([name_of("ann")], LIFETIME);
    node.charge("ann", Mode::Adaptive);
    assert_eq!(node.stats().leases, 1);
    node.clock.advance(TimeDelta::from_secs(3));
    node.work();
    assert_eq!((node.stats().leases, node.stats().available), (0, 0));
    // And an empty list ends it at once.
    node.leases.set_hot_list([], LIFETIME);
    node.charge("ann", Mode::Adaptive);
    assert_eq!(node.stats().leases, 0);
}

/// `--hot-per-second 0` is an operator's decision, and without names there is nothing to compare.
#[test]
fn a_node_that_never_leases_by_itself_takes_no_advice() {
    let never = node(LeaseConfig { hot: None, ..LeaseConfig::default() });
    never.share();
    let unnamed = node(LeaseConfig::default());
    for node in [never, unnamed] {
        node.leases.set_hot_list([name_of("ann")], LIFETIME);
        node.charge("ann", Mode::Adaptive);
        assert_eq!(node.stats().leases, 0);
        assert!(node.leases.hot_counters(10).is_empty());
    }
}
