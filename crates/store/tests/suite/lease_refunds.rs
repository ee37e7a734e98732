//! What callers give back to a bucket of which leases are out: never more than slots that others hold can be exchanged for, or
//! those could be spent twice; and all of it where none are.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use tollgate_core::conformance::{
    Fault, FaultyStore, ReferenceStore, SplitMix64, StoreCall, block_on, yield_once,
};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit,
    LimitSpec, ManualClock, Mode, Outcomes, PermitId, Rate, Scope, State, TimeDelta, Timestamp, nonzero,
};
use tollgate_store::{DenyCache, LeaseConfig, LeasedStore};

type Store = Arc<ReferenceStore<Arc<ManualClock>>>;

/// A node's clock: that of the store, some time ahead.
#[derive(Clone)]
struct NodeClock(Arc<ManualClock>, TimeDelta);

impl Clock for NodeClock {
    fn now(&self) -> Timestamp {
        self.0.now() + self.1
    }
}

type Node = LeasedStore<DenyCache<Store, NodeClock>, Store, NodeClock>;

/// A store and nodes with leases in front of it, and the clock of all.
struct Fleet {
    clock: Arc<ManualClock>,
    store: Store,
    nodes: Vec<Node>,
    tasks: u128,
    scope: Scope,
    limit: Limit,
}

/// An admitted request: when by the store's clock, and its units that are not canceled.
#[derive(Clone, Copy)]
struct Admitted {
    at: Timestamp,
    taken_at: Timestamp,
    units: u64,
    used: u64,
}

impl Fleet {
    fn new(count: u32, limit: LimitSpec, config: &LeaseConfig) -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let store = Arc::new(ReferenceStore::new(Arc::clone(&clock)));
        let config = LeaseConfig { nodes: count, ..config.clone() };
        let node = |number: u32| {
            let clock = NodeClock(Arc::clone(&clock), TimeDelta::from_secs(u64::from(number) * 1_000));
            let cached = DenyCache::new(Arc::clone(&store), clock.clone(), 64);
            LeasedStore::new(cached, Arc::clone(&store), clock, config.clone())
        };
        let nodes = (0..count).map(node).collect();
        let limit = limit.build().expect("a limit");
        Self { clock, store, nodes, tasks: 0, scope: Scope::new("refunds"), limit }
    }

    fn with_charge<T>(&self, limit: &Limit, cost: Cost, with: impl FnOnce(&[Charge<'_>]) -> T) -> T {
        let parts = [KeyPart::Text("alice")];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        with(&[Charge { mode: Mode::Leased, ..Charge::new(key, limit, cost) }])
    }

    /// Charges on a node, and runs the tasks of its leases.
    fn charge(&mut self, node: usize, units: u64) -> Option<Admitted> {
        let outcomes = self.with_charge(&self.limit, Cost::new(units), |charges| {
            let (node, mut outcomes) = (&self.nodes[node], Outcomes::default());
            if !node.try_charge(charges, &mut outcomes) {
                outcomes = block_on(node.charge(charges)).expect("it answers");
            }
            outcomes
        });
        self.run_tasks(node);
        let taken_at = outcomes.at;
        let admitted = Admitted { at: self.clock.now(), taken_at, units, used: units };
        (outcomes.admission == Admission::Admitted).then_some(admitted)
    }

    fn run_tasks(&mut self, node: usize) {
        for task in self.nodes[node].due_tasks() {
            self.tasks += 1;
            block_on(self.nodes[node].run_task(task, PermitId(self.tasks)));
        }
    }

    /// Gives back what a request has not used, as the engine does.
    fn settle(&self, node: usize, request: &mut Admitted, used: u64) {
        let unused = request.used - used;
        request.used = used;
        let refund = self.limit.refund(request.units, unused, request.taken_at, self.clock.now());
        if let Some((limit, cost)) = refund {
            self.with_charge(&limit, cost, |charges| {
                block_on(self.nodes[node].debit(charges)).expect("it answers");
            });
        }
    }

    fn remaining(&self) -> u64 {
        let outcomes = self.with_charge(&self.limit, Cost::PEEK, |look| block_on(self.store.charge(look)));
        outcomes.expect("it answers").per_charge[0].remaining
    }
}

#[test]
fn a_refund_waits_for_time_where_leases_are_out_and_only_there() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let store = Arc::new(ReferenceStore::new(Arc::clone(&clock)));
    let node = LeasedStore::new(Arc::clone(&store), Arc::clone(&store), clock, LeaseConfig::default());
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(100))).build().expect("a limit");
    let scope = Scope::new("refunds");
    for (caller, mode, leased) in [("alice", Mode::Leased, true), ("bob", Mode::Adaptive, false)] {
        let parts = [KeyPart::Text(caller)];
        let key = CounterKey { scope: &scope, parts: &parts };
        let charge = |cost| Charge { mode, ..Charge::new(key, &limit, cost) };
        let remaining = || {
            let look = [Charge::new(key, &limit, Cost::PEEK)];
            block_on(store.charge(&look)).expect("it answers").per_charge[0].remaining
        };
        for _ in 0..10 {
            block_on(node.charge(&[charge(Cost::ONE)])).expect("it answers");
        }
        for (n, task) in (1..).zip(node.due_tasks()) {
            block_on(node.run_task(task, PermitId(n)));
        }
        assert!(node.stats().available > 0, "alice has a lease throughout");
        let before = remaining();
        for enforcement in [Enforcement::Required, Enforcement::Independent] {
            let back = [Charge { enforcement, ..charge(Cost::refund(2)) }];
            block_on(node.charge(&back)).expect("it answers");
            block_on(node.debit(&back)).expect("it answers");
        }
        assert_eq!(remaining(), if leased { before } else { before + 8 }, "{caller}");
    }
    // What says nothing of when it was taken; the rest is alice's lease's.
    assert_eq!(node.stats().unrefunded, 4);
}

/// Otherwise a caller that reserves and cancels uses up what all others share, and pays nothing.
#[test]
fn who_reserves_and_cancels_uses_nothing_up() {
    for (count, period) in [(200, 3_600), (1_000, 60)] {
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(period)));
        let mut fleet = Fleet::new(2, limit, &LeaseConfig::default());
        for turn in 0..2 * count {
            let mut request = fleet.charge(0, 1).unwrap_or_else(|| panic!("{count}/{period}s: {turn}"));
            fleet.clock.advance(TimeDelta::from_millis(5));
            fleet.settle(0, &mut request, 0);
        }
        let others = (0..count).filter(|_| fleet.charge(1, 1).is_some()).count() as u64;
        // What a node keeps for itself is at most a quarter.
        assert!(others >= count * 7 / 10, "{count}/{period}s: others got {others}");
    }
}

/// Reservations of many tokens that need few: what was not used must come back while leases are out, on any node.
#[test]
fn what_is_settled_for_less_can_be_used_again() {
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(10_000, TimeDelta::from_secs(3_600)));
    let mut fleet = Fleet::new(2, limit, &LeaseConfig::default());
    let mut open = std::collections::VecDeque::new();
    let mut used = 0;
    for turn in 0..900 {
        fleet.clock.advance(TimeDelta::from_millis(20));
        let Some(request) = fleet.charge(turn % 2, 100) else { panic!("denied after {used} of 10000") };
        open.push_back(request);
        if open.len() > 5 {
            let mut request = open.pop_front().expect("six");
            // The other node settles every second one.
            fleet.settle(turn / 2 % 2, &mut request, 10);
            used += 10;
        }
    }
    assert!(used > 8_900, "{used}");
}

/// A bucket with room that no lease is taken of by the node that settles: what it cannot give back there recovers with time, and
/// what is deep enough in use it can.
#[test]
fn a_store_that_is_used_enough_is_refunded_beside_leases() {
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(1_000, TimeDelta::from_secs(3_600)));
    let mut fleet = Fleet::new(2, limit, &LeaseConfig::default());
    (0..3).for_each(|_| assert!(fleet.charge(0, 1).is_some()));
    assert!(fleet.nodes[0].stats().available > 0, "a lease is out");
    let leased = fleet.with_charge(&fleet.limit, Cost::ONE, |charges| {
        [0, 1].map(|node: usize| fleet.nodes[node].leased_units(&charges[0]))
    });
    assert_eq!(leased, [fleet.nodes[0].stats().available, 0]);
    let mut small = fleet.charge(1, 100).expect("room");
    fleet.settle(1, &mut small, 0);
    assert_eq!(fleet.nodes[1].stats().unrefunded, 100, "hardly anything is used");
    let mut large = fleet.charge(1, 700).expect("room");
    let before = fleet.remaining();
    fleet.settle(1, &mut large, 0);
    let refunded = fleet.remaining() - before;
    assert!((300..600).contains(&refunded), "{refunded} of 700: not those that outstanding leases may need");
}

/// Otherwise leases and refunds together admit more than burst + rate * t, in some order of events.
#[test]
fn refunds_beside_leases_never_admit_more_than_the_limit() {
    let limits = [
        (200, 3_600_000, 200),
        (1_000, 60_000, 1_000),
        (50, 1_000, 400),
        (1_000, 1_000, 1_000),
        (40, 10_000, 40),
        (99_991, 60_000, 900),
    ];
    let (mut refunded, mut local) = (0, 0);
    for seed in 0..400 {
        let mut rng = SplitMix64::new(seed);
        let (count, period, burst) = *rng.pick(&limits);
        let limit =
            LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_millis(period))).burst(burst);
        let config = LeaseConfig {
            ttl: TimeDelta::from_millis(*rng.pick(&[10_000, 1_000, 300])),
            idle: TimeDelta::from_millis(*rng.pick(&[2_000, 300, 50])),
            share: *rng.pick(&[0.25, 0.25, 0.05, 0.5]),
            ..LeaseConfig::default()
        };
        let count_of_nodes = u32::try_from(rng.between(1, 4)).expect("few");
        let mut fleet = Fleet::new(count_of_nodes, limit, &config);
        let mut requests: Vec<Admitted> = Vec::new();
        let pace = *rng.pick(&[1, 20, 300]) * 1_000;
        for _ in 0..400 {
            fleet.clock.advance(TimeDelta::from_micros(rng.below(pace)));
            let node = |rng: &mut SplitMix64| rng.below(u64::from(count_of_nodes)) as usize;
            let at = node(&mut rng);
            match rng.below(10) {
                0..=5 => {
                    let units = rng.between(1, (burst / 10).max(1));
                    requests.extend(fleet.charge(at, units));
                }
                6..=8 if !requests.is_empty() => {
                    // Mostly the latest: old ones have nothing to give back.
                    let back = rng.below(10.min(requests.len() as u64)) as usize;
                    let place = requests.len() - 1 - back;
                    let mut request = requests[place];
                    // Settled once.
                    if request.used == request.units {
                        let used = rng.below(request.units);
                        fleet.settle(at, &mut request, used);
                        (requests[place], refunded) = (request, refunded + request.units - used);
                    }
                }
                _ => fleet.run_tasks(at),
            }
        }
        // All that is left anywhere, at once.
        for node in 0..count_of_nodes as usize {
            for units in [burst / 4, burst / 20, 1] {
                while units > 0
                    && let Some(request) = fleet.charge(node, units)
                {
                    requests.push(request);
                }
            }
        }
        let mut state = State::default();
        for request in requests.iter().filter(|request| request.used > 0) {
            let outcome = fleet.limit.step(&mut state, request.at, Cost::new(request.used));
            assert!(outcome.verdict.is_allowed(), "seed {seed}: {} over {}", request.used, fleet.limit);
        }
        local += fleet.nodes.iter().map(|node| node.stats().local).sum::<u64>();
    }
    assert!(refunded > 10_000 && local > 5_000, "{refunded} units, {local} local decisions");
}

/// Without it a node spends units after a reset that the counter no longer has: of each reset a lease comes on top, and the record of a
/// durable limit keeps it for good.
#[test]
fn a_reset_drops_what_its_node_has_leased() {
    for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow] {
        for is_refilling in [false, true] {
            let day = Rate::per(30_000, TimeDelta::from_secs(86_400));
            let mut fleet = Fleet::new(1, LimitSpec::new(algorithm, day), &LeaseConfig::default());
            // A slot of a bucket's lease may have begun when it comes.
            let assert_counted = |fleet: &Fleet, leased: u64, used: u64| {
                let counted = 30_000 - fleet.remaining() - leased;
                let max = used + u64::from(algorithm == Algorithm::Gcra);
                assert!((used..=max).contains(&counted), "{algorithm:?}: {counted} of {used}");
            };
            let leased = |fleet: &Fleet| {
                fleet.with_charge(&fleet.limit, Cost::ONE, |charges| fleet.nodes[0].leased_units(&charges[0]))
            };
            for _ in 0..6 {
                while leased(&fleet) < 3 {
                    fleet.charge(0, 1).expect("admitted");
                }
                let reset = |fleet: &Fleet| {
                    fleet.with_charge(&fleet.limit, Cost::refund(u64::MAX), |charges| {
                        let reset = [Charge { mode: Mode::Central, ..charges[0] }];
                        block_on(fleet.nodes[0].debit(&reset)).expect("reset");
                    });
                };
                reset(&fleet);
                assert_eq!((fleet.remaining(), leased(&fleet)), (30_000, 0), "{algorithm:?}");
                if is_refilling {
                    // A request of the lease is queued when the counter is reset again.
                    for _ in 0..4 {
                        fleet.with_charge(&fleet.limit, Cost::ONE, |charges| {
                            block_on(fleet.nodes[0].charge(charges)).expect("it answers");
                        });
                    }
                    reset(&fleet);
                    fleet.run_tasks(0);
                    assert_counted(&fleet, leased(&fleet), 0);
                    reset(&fleet);
                }
                // All that is charged is counted.
                for _ in 0..10 {
                    fleet.charge(0, 1).expect("admitted");
                }
                assert_counted(&fleet, leased(&fleet), 10);
            }
        }
    }
}

/// Without it units that a reset has given back are spent as well.
#[test]
fn a_reset_drops_a_lease_that_is_on_its_way() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = Arc::new(ReferenceStore::new(Arc::clone(&clock)));
    let authority = FaultyStore::new(Arc::clone(&store));
    authority.set_fault(|call, _| match call {
        StoreCall::Charge => Fault::ApplyThenWait(Box::pin(yield_once())),
        _ => Fault::None,
    });
    let node = LeasedStore::new(Arc::clone(&store), authority, clock, LeaseConfig::default());
    let day = Rate::per(30_000, TimeDelta::from_secs(86_400));
    let limit = LimitSpec::new(Algorithm::FixedWindow, day).build().expect("a limit");
    let (scope, parts) = (Scope::new("refunds"), [KeyPart::Text("alice")]);
    let key = CounterKey { scope: &scope, parts: &parts };
    let charge = Charge { mode: Mode::Leased, ..Charge::new(key, &limit, Cost::ONE) };
    let remaining = || {
        let look = [Charge { cost: Cost::PEEK, ..charge }];
        block_on(store.charge(&look)).expect("it answers").per_charge[0].remaining
    };
    let mut tasks = Vec::new();
    while tasks.is_empty() {
        block_on(node.charge(&[charge])).expect("it answers");
        tasks = node.due_tasks();
    }
    let before = remaining();
    let mut refill = pin!(node.run_task(tasks.remove(0), PermitId(1)));
    assert!(refill.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(remaining() < before, "the store has charged it");
    let reset = Charge { mode: Mode::Central, cost: Cost::refund(u64::MAX), ..charge };
    block_on(node.debit(&[reset])).expect("reset");
    block_on(refill);
    assert_eq!((node.leased_units(&charge), remaining()), (0, 30_000));
}
