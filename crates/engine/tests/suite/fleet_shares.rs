//! A tenant has the larger of its guarantee and its fair share, not both: however much it sends, tenants within their fair shares are
//! served. In virtual time, evenly spaced and at random.

use crate::arrivals::send;
use crate::rig::{Rig, check, rig};
use tollgate_core::{Cost, TimeDelta};
use tollgate_engine::{Check, HeldPermits};

/// Requests of one tenant per second.
struct Load {
    tenant: &'static str,
    tier: &'static str,
    rate: f64,
}

/// Sends for some seconds in steps of a millisecond and returns how many of each tenant's requests were sent and served after the first
/// four seconds. With a seed, arrivals are random.
fn run(rig: &Rig, loads: &[Load], seconds: u64, seed: Option<u64>) -> Vec<(u64, u64)> {
    let load = |load: &Load| (load.rate, [("tenant", load.tenant), ("tier", load.tier)]);
    send(rig, loads, load, seconds * 1_000, 4_000, seed)
}

fn rules(capacity: u64, guarantee: &str) -> Rig {
    rig(&format!(
        "{{domain: d, overload: {{fleet: {{capacity: {capacity}/second}}, fairness: {{by: tenant, guarantees: {{enterprise: {guarantee} each}}}}}}}}"
    ))
}

/// One tenant sends four times the capacity, and four others an eighth of it each; at random a tenth, because some of it comes too soon.
fn flood(capacity: u64, guarantee: &str, tier: &'static str, seed: Option<u64>) -> (f64, f64) {
    let rig = rules(capacity, guarantee);
    let mut loads = vec![Load { tenant: "acme", tier, rate: 4.0 * capacity as f64 }];
    let part = if seed.is_some() { 10.0 } else { 8.0 };
    let small = |tenant| Load { tenant, tier: "none", rate: capacity as f64 / part };
    loads.extend(["a", "b", "c", "d"].map(small));
    let counts = run(&rig, &loads, 14, seed);
    let (sent, served) = counts[1..].iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    (served as f64 / sent as f64, counts[0].1 as f64 / (10 * capacity) as f64)
}

#[test]
fn a_flood_beyond_a_guarantee_takes_no_fair_shares() {
    const CASES: [(&str, &str); 4] =
        [("50%", "enterprise"), ("40%", "enterprise"), ("25%", "enterprise"), ("50%", "none")];
    for (capacity, seed, least) in [
        (20, None, 0.99),
        (20, Some(1), 0.93),
        (20, Some(2), 0.93),
        (100, None, 0.99),
        (100, Some(1), 0.96),
        (100, Some(2), 0.96),
        (1_000, None, 0.99),
    ] {
        for (guarantee, tier) in CASES {
            let (small, big) = flood(capacity, guarantee, tier, seed);
            let case = format!("{capacity}/second, {guarantee} for {tier}, {seed:?}");
            assert!(small >= least, "{case}: {small} of the small ones' requests, {big} of the capacity");
            // What the others leave is its own, and its guarantee.
            assert!((0.45..0.7).contains(&big), "{case}: {big} of the capacity, {small}");
        }
    }
}

/// The others share what guarantees leave: a level that forgets them would call everybody within its share, and serve by chance.
#[test]
fn what_guarantees_take_is_not_shared_out_again() {
    let rig = rules(200, "50%");
    let mut loads = vec![Load { tenant: "acme", tier: "enterprise", rate: 800.0 }];
    loads.extend(["g1", "g2", "g3"].map(|tenant| Load { tenant, tier: "none", rate: 200.0 }));
    // Fair is a fourth of the other half, 25 per second each.
    loads.push(Load { tenant: "small", tier: "none", rate: 20.0 });
    let counts = run(&rig, &loads, 24, None);
    let (sent, served) = counts[4];
    assert!(served * 100 >= sent * 97, "{served} of {sent} requests of the small one: {counts:?}");
    assert!(counts[0].1 >= 1_960, "its guarantee: {counts:?}");
}

/// The capacity and its shares are counted in requests: one that costs its caller much takes no more of them than any other.
#[test]
fn a_request_takes_one_of_the_capacity_whatever_it_costs() {
    let rig = rules(100, "10%");
    let (mut sent, mut served) = ([0; 2], [0; 2]);
    for ms in 0..16_000_u64 {
        // 50 requests per second of ten units each, and 40 of one: 540 units in 90 requests.
        if ms % 20 == 0 {
            sent[0] += 1;
            let decision = check(&rig.limiter, &[("tenant", "costly")], Cost::new(10));
            served[0] += u64::from(decision.is_allowed());
        }
        if ms % 25 == 7 {
            sent[1] += 1;
            served[1] += u64::from(rig.take(&[("tenant", "small")]).is_allowed());
        }
        rig.clock.advance(TimeDelta::from_millis(1));
    }
    assert_eq!(served, sent);
}

/// The same of places in flight.
#[test]
fn a_request_holds_one_place_whatever_it_costs() {
    for nodes in [0, 1] {
        let rig = rig(
            "{domain: d, overload: {fleet: {capacity: 40 in flight}, fairness: {by: tenant, guarantees: {enterprise: 10% each}}}}",
        );
        rig.limiter.set_live_nodes(nodes);
        let mut open: Vec<(u64, HeldPermits)> = Vec::new();
        let (mut sent, mut served) = ([0; 2], [0; 2]);
        for ms in 0..12_000_u64 {
            for (_, ended) in open.extract_if(.., |(until, _)| *until <= ms) {
                pollster::block_on(rig.limiter.release(&ended)).expect("memory");
            }
            let mut admit = |tenant: &str, units: u64| {
                let attributes = [("tenant", tenant)];
                let check = Check::attributes("d", &attributes).with_cost(Cost::new(units));
                let (decision, permits) = pollster::block_on(rig.limiter.admit(&check));
                // Not all for the same time.
                open.extend(permits.map(|permits| (ms + 80 + ms % 41, permits)));
                u64::from(decision.is_allowed())
            };
            // 13 places in requests of four units, and 15 in requests of one: 67 units.
            if ms % 8 == 0 {
                sent[0] += 1;
                served[0] += admit("costly", 4);
            }
            if ms % 7 == 3 {
                sent[1] += 1;
                served[1] += admit("small", 1);
            }
            rig.clock.advance(TimeDelta::from_millis(1));
        }
        assert_eq!(served, sent, "{nodes} nodes");
    }
}
