//! The fleet's shares while the store is late, or some of its counters cannot be charged: no place of a guarantee stays taken by a request
//! that has ended, and a guarantee holds as long as its own counters do.

use crate::rig::{Memory, rules};
use std::sync::Arc;
use tollgate_core::conformance::{Fault, FaultyStore};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, HeldPermits, Limiter, Origin};
use tollgate_store::{MemoryConfig, MemoryStore};

struct Fleet {
    clock: Arc<ManualClock>,
    limiter: Arc<Limiter<FaultyStore<Memory>>>,
}

fn fleet(text: &str) -> Fleet {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store");
    let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
    let store = FaultyStore::new(counters);
    Fleet { limiter: Arc::new(Limiter::new(rules(text), store, time).with_fallback(fallback)), clock }
}

impl Fleet {
    fn store(&self) -> &FaultyStore<Memory> {
        self.limiter.store()
    }

    /// Counters with this in their names cannot be charged from now on.
    fn lose(&self, name: &'static str) {
        self.store().set_fault(move |_, charges| {
            Fault::partial(charges, |charge| charge.key.scope.label().contains(name))
        });
    }

    fn admit(&self, attributes: &[(&str, &str)]) -> (Decision, Option<HeldPermits>) {
        pollster::block_on(self.limiter.admit(&Check::attributes("d", attributes)))
    }

    /// Admits as many as find room.
    fn fill(&self, attributes: &[(&str, &str)]) -> Vec<HeldPermits> {
        std::iter::from_fn(|| self.admit(attributes).1).take(1_000).collect()
    }

    fn release(&self, held: &[HeldPermits]) {
        held.iter().for_each(|held| pollster::block_on(self.limiter.release(held)).expect("memory"));
    }

    fn passed(&self, attributes: &[(&str, &str)], tries: usize) -> usize {
        (0..tries).filter(|_| self.admit(attributes).0.is_allowed()).count()
    }
}

const IN_FLIGHT: &str = "
domain: d
descriptors: [{key: path, name: by-path, limit: 1000/second}]
overload:
  fleet: {capacity: 10 in flight}
  fairness: {by: tenant, guarantees: {enterprise: 50% each}}
";
const PLAIN: &str = "{domain: d, algorithm: gcra, overload: {fleet: {capacity: 30/10s}}}";
const ACME: [(&str, &str); 2] = [("tenant", "acme"), ("tier", "enterprise")];

/// A store that stalls for a moment must not take a tenant's guarantee for the rest of the `ttl`: its requests have ended.
#[test]
fn a_late_answer_takes_no_place_of_a_guarantee_for_good() {
    for is_pressed in [false, true] {
        let fleet = fleet(IN_FLIGHT);
        let greedy = if is_pressed { fleet.fill(&[("tenant", "greedy")]) } else { Vec::new() };
        fleet.store().set_fault(|_, _| Fault::Late);
        let held: Vec<HeldPermits> = (0..4).filter_map(|_| fleet.admit(&ACME).1).collect();
        assert_eq!(held.len(), 4, "decided by this node");
        fleet.store().clear_fault();
        pollster::block_on(fleet.store().answer_late());
        fleet.release(&held);
        fleet.release(&greedy);
        let greedy = fleet.fill(&[("tenant", "greedy")]);
        assert_eq!(greedy.len(), 10, "nothing else is in flight");
        assert_eq!(fleet.fill(&ACME).len(), 5, "the whole guarantee, pressed: {is_pressed}");
    }
}

/// An outage of one rule's counters must not end guarantees whose own counters can be charged.
#[test]
fn a_guarantee_holds_while_other_counters_are_away() {
    for text in [IN_FLIGHT, &IN_FLIGHT.replace("10 in flight", "10/minute")] {
        let fleet = fleet(text);
        assert_eq!(fleet.passed(&[("tenant", "greedy")], 30), 10, "the capacity is in use");
        fleet.lose("path");
        let with_path = [("tenant", "acme"), ("tier", "enterprise"), ("path", "/a")];
        assert_eq!(fleet.passed(&with_path, 5), 5, "{text}");
        assert_eq!(fleet.passed(&with_path, 5), 0, "no more than the guarantee: {text}");
        assert_eq!(fleet.passed(&[("tenant", "other"), ("path", "/a")], 5), 0, "{text}");
    }
}

/// From calm times on: the first request that finds the capacity in use is tried by its guarantee, without the counters that are away.
#[test]
fn the_first_to_find_the_capacity_in_use_has_its_guarantee_while_others_are_away() {
    let fleet = fleet(&IN_FLIGHT.replace("10 in flight", "10/minute"));
    assert_eq!(fleet.passed(&[("tenant", "greedy")], 10), 10, "used up, and nobody has been denied");
    fleet.lose("path");
    assert_eq!(fleet.passed(&[("tenant", "acme"), ("tier", "enterprise"), ("path", "/a")], 8), 5);
}

/// With its own counter away, a guarantee admits nothing, and denies nothing.
#[test]
fn without_its_own_counter_a_guarantee_is_none() {
    let fleet = fleet(&IN_FLIGHT.replace("10 in flight", "10/minute"));
    fleet.lose("guarantee");
    assert_eq!(fleet.passed(&ACME, 8), 8, "there is room");
    assert_eq!(fleet.passed(&[("tenant", "greedy")], 8), 2);
    assert_eq!(fleet.passed(&ACME, 3), 0, "the capacity is in use");
}

/// A request that another rule denies without the store takes nothing of a guarantee.
#[test]
fn what_is_denied_without_the_store_gives_its_guarantee_back() {
    for text in [IN_FLIGHT, &IN_FLIGHT.replace("10 in flight", "10/minute")] {
        let text = text.replace("limit: 1000/second", "limit: 1000/second, on_error: closed");
        let fleet = fleet(&text);
        assert_eq!(fleet.passed(&[("tenant", "greedy")], 30), 10);
        fleet.lose("path");
        let with_path = [("tenant", "acme"), ("tier", "enterprise"), ("path", "/a")];
        assert_eq!(fleet.passed(&with_path, 20), 0);
        assert_eq!(fleet.passed(&ACME, 8), 5, "{text}");
    }
}

/// Sends requests for some seconds, so many per second. Returns how many were served.
fn send(fleet: &Fleet, seconds: u64, per_second: u64) -> u64 {
    let mut served = 0;
    for _ in 0..seconds * per_second {
        served += u64::from(fleet.admit(&[("tenant", "a")]).0.is_allowed());
        fleet.clock.advance(TimeDelta::from_micros(1_000_000 / per_second));
    }
    served
}

/// A service that was idle enough during an outage of the store must not be shed after it: its capacity has been refilled.
#[test]
fn what_time_has_refilled_is_not_charged_after_an_outage() {
    for (nodes, per_second) in [(1, 2), (2, 1)] {
        for text in [IN_FLIGHT.replace("10 in flight", "30/10s"), PLAIN.to_owned()] {
            let fleet = fleet(&text);
            fleet.limiter.set_live_nodes(nodes);
            assert_eq!(send(&fleet, 10, per_second), 10 * per_second);
            fleet.store().set_fault(Fault::outage);
            assert_eq!(send(&fleet, 45, per_second), 45 * per_second, "within the node's share");
            fleet.store().clear_fault();
            pollster::block_on(fleet.limiter.reconcile());
            assert_eq!(send(&fleet, 30, per_second), 30 * per_second, "{nodes} nodes: {text}");
        }
    }
}

/// An outage ends without a fresh burst all the same.
#[test]
fn what_time_has_not_refilled_is_charged_after_an_outage() {
    let fleet = fleet(PLAIN);
    fleet.store().set_fault(Fault::outage);
    let served = send(&fleet, 20, 9);
    assert!((85..=91).contains(&served), "the burst, and three per second: {served}");
    fleet.store().clear_fault();
    let after = send(&fleet, 10, 9);
    assert!((28..=32).contains(&after), "three per second: {after}");
}

/// A store that stalls must not double what is in flight: a node without it counts the requests that it has.
#[test]
fn requests_in_flight_count_without_the_store() {
    let plain = "{domain: d, overload: {fleet: {capacity: 10 in flight}}}";
    let rule = "{domain: d, descriptors: [{key: tenant, concurrency: 10, on_error: local}]}";
    for text in [IN_FLIGHT, plain, rule] {
        let fleet = fleet(text);
        let admit = |tries: usize| -> Vec<_> {
            let held = (0..tries).filter_map(|_| fleet.admit(&[("tenant", "a")]).1);
            held.map(|held| fleet.limiter.guard(held, TimeDelta::ZERO)).collect()
        };
        let mut held = admit(14);
        assert_eq!(held.len(), 10, "{text}");
        fleet.store().set_fault(Fault::outage);
        assert_eq!(admit(5).len(), 0, "all places are taken: {text}");
        held.truncate(7);
        let local = admit(5);
        assert_eq!(local.len(), 3, "those of requests that have ended: {text}");
        fleet.store().clear_fault();
        drop((held, local));
        // Those that begin between two outages count too.
        let held = admit(6);
        fleet.store().set_fault(Fault::outage);
        assert_eq!(admit(14).len(), 4, "{text}");
        // With other nodes, each has its share.
        fleet.limiter.set_live_nodes(2);
        assert_eq!(admit(14).len(), 0, "{text}");
        drop(held);
        assert_eq!(admit(14).len(), 5, "{text}");
    }
}

/// A tenant within its guarantee must not pay for an outage of the store with the requests of another one: each node has its part of the
/// guarantee, as of the capacity.
#[test]
fn without_the_store_each_node_keeps_its_part_of_a_guarantee() {
    let rate = "
domain: d
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 100/second, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 10% each}}
";
    for nodes in [1, 2] {
        let fleet = fleet(rate);
        fleet.limiter.set_live_nodes(nodes);
        fleet.store().set_fault(Fault::outage);
        let (mut greedy, mut own, mut pay, mut sent) = (0, 0, 0, 0);
        let count = |attributes: &[(&str, &str)]| {
            let (decision, _) = fleet.admit(attributes);
            assert_eq!(decision.origin, Origin::Local);
            u64::from(decision.is_allowed())
        };
        for step in 0..1_000 {
            // Three times the capacity, in 10 ms each, and an eighth less than the guarantee.
            greedy += (0..3).map(|_| count(&[("tenant", "greedy")])).sum::<u64>();
            if step % (12 * nodes) == 0 {
                sent += 1;
                own += count(&ACME);
                pay += count(&[("tenant", "other"), ("path", "/pay")]);
            }
            fleet.clock.advance(TimeDelta::from_millis(10));
        }
        assert_eq!((own, pay), (sent, sent), "{nodes} nodes, {greedy} of the greedy one");
        let rate = 1_000 / u64::from(nodes);
        let all = greedy + own + pay;
        assert!((rate * 4 / 5..=rate + rate / 5).contains(&all), "{nodes} nodes: {all}");
        // The store learns of it: neither the capacity nor the guarantee begins anew.
        fleet.store().clear_fault();
        let after = fleet.passed(&[("tenant", "greedy")], 100);
        assert!(after <= 100 - 80 / nodes as usize + 20, "{nodes} nodes: {after}");
    }
}

/// In flight a guarantee is held, and given back with the request, without the store too.
#[test]
fn without_the_store_requests_in_flight_hold_their_guarantee() {
    let fleet = fleet(IN_FLIGHT);
    fleet.store().set_fault(Fault::outage);
    let greedy = fleet.fill(&[("tenant", "greedy")]);
    assert_eq!(greedy.len(), 10);
    let own = fleet.fill(&ACME);
    assert_eq!(own.len(), 5, "beyond what others have borrowed");
    fleet.release(&own[..2]);
    let again = fleet.fill(&ACME);
    assert_eq!(again.len(), 2, "what was given back");
    assert!(fleet.admit(&[("tenant", "other")]).1.is_none(), "what was lent is not lent again");
    fleet.release(&greedy);
    fleet.release(&own);
    fleet.release(&again);
    fleet.store().clear_fault();
    pollster::block_on(fleet.limiter.reconcile());
    assert_eq!(fleet.fill(&[("tenant", "greedy")]).len(), 10);
    assert_eq!(fleet.fill(&ACME).len(), 5);
}

/// What a rule of the request denies on this node takes nothing of a guarantee.
#[test]
fn a_denial_without_the_store_takes_no_guarantee() {
    let text = IN_FLIGHT.replace("10 in flight", "10/minute").replace("limit: 1000/second", "limit: 2/day");
    let fleet = fleet(&text);
    fleet.store().set_fault(Fault::outage);
    assert_eq!(fleet.passed(&[("tenant", "greedy")], 30), 10);
    let with_path = [("tenant", "acme"), ("tier", "enterprise"), ("path", "/a")];
    assert_eq!(fleet.passed(&with_path, 20), 2, "its own limit");
    assert_eq!(fleet.passed(&ACME, 8), 3, "what is left of the guarantee");
}
