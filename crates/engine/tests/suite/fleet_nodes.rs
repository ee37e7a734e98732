//! Tenants of different nodes that share a capacity in flight: what is left goes by the parts of their nodes, not to the first that asks.
//! Two nodes and one store, in virtual time.

use crate::rig;
use std::sync::Arc;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, HeldPermits, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

type Node = Limiter<Arc<MemoryStore<Arc<ManualClock>>>>;

fn nodes(rules: &str) -> ([Node; 2], Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let store = Arc::new(store);
    let node = || {
        let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let limiter = Limiter::new(rig::rules(rules), Arc::clone(&store), time);
        limiter.set_live_nodes(2);
        limiter
    };
    ([node(), node()], clock)
}

const RULES: &str = "
domain: d
overload:
  fleet: {capacity: 100 in flight}
  fairness: {by: tenant, guarantees: {enterprise: 10% each}}
";

/// A tenant of one node.
struct Tenant {
    name: &'static str,
    node: usize,
    /// Requests in a millisecond, and how many milliseconds each lasts in the mean.
    rate: f64,
    lasts: u64,
}

/// What became of a tenant's requests after the first part of a run: sent, served, and the mean number in flight.
#[derive(Debug, Default)]
struct Had {
    sent: u64,
    served: u64,
    in_flight: f64,
}

/// Sends at random for some seconds, in steps of two milliseconds; what is counted begins when the shares have `settled`.
fn run(tenants: &[Tenant], seconds: u64, settled: u64) -> Vec<Had> {
    const STEP: u64 = 2;
    let (nodes, clock) = nodes(RULES);
    // Requests that all began together would otherwise end together.
    let mut random = SplitMix64::new(7);
    let mut had: Vec<Had> = tenants.iter().map(|_| Had::default()).collect();
    let mut open: Vec<(u64, usize, HeldPermits)> = Vec::new();
    let mut due = vec![0.0; tenants.len()];
    for now in (0..seconds * 1_000).step_by(STEP as usize) {
        open.retain(|(until, tenant, held)| {
            let is_open = *until > now;
            if !is_open {
                let node = &nodes[tenants[*tenant].node];
                pollster::block_on(node.release(held)).expect("memory");
            }
            is_open
        });
        let is_settled = now >= settled * 1_000;
        let first = usize::from(random.fraction() < 0.5);
        for at in (0..tenants.len()).map(|at| (at + first) % tenants.len()) {
            let tenant = &tenants[at];
            due[at] += 2.0 * random.fraction() * tenant.rate * STEP as f64;
            while due[at] >= 1.0 {
                due[at] -= 1.0;
                let attributes = [("tenant", tenant.name)];
                let check = Check::attributes("d", &attributes);
                let (decision, held) = pollster::block_on(nodes[tenant.node].admit(&check));
                had[at].sent += u64::from(is_settled);
                had[at].served += u64::from(is_settled && decision.is_allowed());
                let lasts = (tenant.lasts as f64 * (0.5 + random.fraction())) as u64;
                open.extend(held.map(|held| (now + lasts, at, held)));
            }
            if is_settled {
                let own = open.iter().filter(|(_, of, _)| *of == at).count();
                had[at].in_flight += (own as u64 * STEP) as f64 / (1_000 * (seconds - settled)) as f64;
            }
        }
        clock.advance(TimeDelta::from_millis(STEP));
    }
    had
}

const fn tenant(name: &'static str, node: usize, rate: f64, lasts: u64) -> Tenant {
    Tenant { name, node, rate, lasts }
}

/// One tenant wants all places, and another on another node 30 of its node's 50; whichever of them has the longer requests.
#[test]
fn a_node_is_not_outbid_by_another() {
    for (greedy, own, rate) in [(200, 300, 0.1), (1_000, 300, 0.1), (100, 3_000, 0.01), (300, 100, 0.3)] {
        let tenants = [tenant("greedy", 0, 1.0, greedy), tenant("own", 1, rate, own)];
        let had = run(&tenants, 40, 20);
        let case = format!("requests of {greedy} and {own} ms: {had:?}");
        assert!(had[1].served * 100 >= had[1].sent * 90, "{case}");
        assert!(had[0].in_flight >= 60.0, "what the other leaves is its own: {case}");
    }
}

/// Both want all places: each has about what its node is owed, however long their requests last.
#[test]
fn nodes_that_want_all_have_their_parts() {
    for (first, second) in [(200, 200), (1_000, 200)] {
        let tenants = [tenant("one", 0, 1.0, first), tenant("two", 1, 1.0, second)];
        let had = run(&tenants, 40, 20);
        let case = format!("requests of {first} and {second} ms: {had:?}");
        assert!(had.iter().all(|had| (35.0..65.0).contains(&had.in_flight)), "{case}");
    }
}

/// Requests whose end is not reported hold their places for the time that is set.
#[test]
fn a_node_is_not_outbid_where_the_end_of_requests_is_not_reported() {
    let (nodes, clock) = nodes(&RULES.replace("100 in flight", "100 in flight, ttl: 2s"));
    let mut random = SplitMix64::new(7);
    let (mut sent, mut served, mut greedy) = (0, 0, 0);
    for step in 0..20_000 {
        // 60 in a second for two seconds each, and 15.
        if random.fraction() < 0.12 {
            greedy += u64::from(rig::check(&nodes[0], &[("tenant", "greedy")], Cost::ONE).is_allowed());
        }
        if random.fraction() < 0.03 {
            let own = rig::check(&nodes[1], &[("tenant", "own")], Cost::ONE);
            let is_settled = u64::from(step >= 10_000);
            sent += is_settled;
            served += is_settled * u64::from(own.is_allowed());
        }
        clock.advance(TimeDelta::from_millis(2));
    }
    assert!(served * 100 >= sent * 90, "{served} of {sent}, {greedy} of the other");
}

/// A reserve is for all nodes: a tenant that asks for all of it on one node leaves others their shares on another.
#[test]
fn a_reserve_is_not_taken_by_one_node() {
    let (nodes, clock) = nodes(
        "
domain: d
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 500/second, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 80% each}}
",
    );
    let senders = [
        ("other", "enterprise", "/", 0, 0.6),
        ("loud", "none", "/pay", 0, 0.3),
        ("own", "none", "/pay", 1, 0.03),
    ];
    let mut random = SplitMix64::new(7);
    let mut counts = [(0, 0); 3];
    for ms in 0..20_000 {
        for (at, (tenant, tier, path, node, rate)) in senders.into_iter().enumerate() {
            if random.fraction() < rate {
                let attributes = [("tenant", tenant), ("tier", tier), ("path", path)];
                let is_served = rig::check(&nodes[node], &attributes, Cost::ONE).is_allowed();
                if ms >= 10_000 {
                    counts[at].0 += 1;
                    counts[at].1 += u64::from(is_served);
                }
            }
        }
        clock.advance(TimeDelta::from_millis(1));
    }
    let (sent, served) = counts[2];
    assert!(served * 100 >= sent * 97, "{counts:?}");
    assert!(counts[1].1 >= 600, "what is left of the reserve is the loud one's: {counts:?}");
}
