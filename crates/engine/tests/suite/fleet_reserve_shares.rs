//! What is reserved for a priority is shared by its tenants: one that asks for all of it leaves the others their shares. In virtual time,
//! with arrivals at random.

use crate::arrivals::send;
use crate::rig::{Rig, rig};
use proptest::prelude::*;
use tollgate_core::TimeDelta;
use tollgate_engine::{Check, HeldPermits};

/// Requests of one tenant per second.
#[derive(Clone, Copy)]
struct Load {
    tenant: &'static str,
    tier: &'static str,
    path: &'static str,
    rate: f64,
}

const fn normal(tenant: &'static str, rate: f64) -> Load {
    Load { tenant, tier: "none", path: "/", rate }
}

const fn enterprise(tenant: &'static str, rate: f64) -> Load {
    Load { tenant, tier: "enterprise", path: "/", rate }
}

const fn critical(tenant: &'static str, rate: f64) -> Load {
    Load { tenant, tier: "none", path: "/pay", rate }
}

const RULES: &str = "
domain: d
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: CAPACITY, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 40% each}, weights: {pro: 3}}
";

/// Sends for so many seconds. Returns how many of each tenant's requests were sent and served in the second half. With a seed, requests
/// come at random.
fn run(rig: &Rig, loads: &[Load], seconds: u64, seed: Option<u64>) -> Vec<(u64, u64)> {
    let load = |load: &Load| (load.rate, [("tenant", load.tenant), ("tier", load.tier), ("path", load.path)]);
    send(rig, loads, load, seconds * 1_000, seconds * 500, seed)
}

fn part(counts: &[(u64, u64)]) -> f64 {
    let (sent, served) = counts.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    served as f64 / sent as f64
}

/// Guarantees take all that is not reserved, and a loud tenant asks for ten times the reserve. Of all runs together: a tenant sends only a few
/// dozen requests in each.
#[test]
fn a_loud_critical_tenant_leaves_others_their_shares_of_the_reserve() {
    const RUNS: u64 = 8;
    let mut counts = [(0, 0); 6];
    for seed in 1..=RUNS {
        let rig = rig(&RULES.replace("CAPACITY", "50/second"));
        let loads = [
            critical("polite", 2.0),
            critical("quiet", 2.0),
            critical("loud", 100.0),
            enterprise("e0", 30.0),
            enterprise("e1", 30.0),
            normal("greedy", 60.0),
        ];
        for (sum, one) in counts.iter_mut().zip(run(&rig, &loads, 32, Some(seed))) {
            *sum = (sum.0 + one.0, sum.1 + one.1);
        }
    }
    assert!(part(&counts[..2]) >= 0.97, "{counts:?}");
    // What they leave of 10 per second is the loud one's, and guarantees are kept.
    assert!(counts[2].1 >= 80 * RUNS, "{counts:?}");
    assert!(counts[3].1 >= 310 * RUNS && counts[4].1 >= 310 * RUNS, "{counts:?}");
}

/// Returns what each has of a capacity by weighted max–min: the one that asks for least per weight is served first, the others share the rest.
fn max_min(capacity: f64, demands: &[(f64, f64)]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..demands.len()).collect();
    order.sort_by(|a, b| {
        let level = |at: &usize| demands[*at].0 / demands[*at].1;
        level(a).total_cmp(&level(b))
    });
    let (mut left, mut weights) = (capacity, demands.iter().map(|(_, weight)| weight).sum::<f64>());
    let mut shares = vec![0.0; demands.len()];
    for at in order {
        let (rate, weight) = demands[at];
        shares[at] = rate.min(left * weight / weights);
        left -= shares[at];
        weights -= weight;
    }
    shares
}

/// Of places in flight: a loud tenant's twelve clients want all of the reserve, a polite one a tenth of a place.
#[test]
fn a_loud_critical_tenant_leaves_others_their_places() {
    for nodes in [0, 1] {
        let rig = rig(&RULES.replace("CAPACITY", "40 in flight").replace("40%", "25%"));
        rig.limiter.set_live_nodes(nodes);
        let admit = |load: Load| {
            let attributes = [("tenant", load.tenant), ("tier", load.tier), ("path", load.path)];
            pollster::block_on(rig.limiter.admit(&Check::attributes("d", &attributes))).1
        };
        let held: Vec<_> = (0..32).filter_map(|_| admit(normal("greedy", 0.0))).collect();
        let own: Vec<_> = (0..10).filter_map(|_| admit(enterprise("acme", 0.0))).collect();
        assert_eq!((held.len(), own.len()), (32, 10), "all but what is reserved, and the guarantee");
        let mut open: Vec<(u64, HeldPermits)> = Vec::new();
        let mut clients = [0_u64; 12];
        let (mut sent, mut served, mut others) = (0, 0, 0);
        for now in 0..20_000_u64 {
            for (_, ended) in open.extract_if(.., |(until, _)| *until <= now) {
                pollster::block_on(rig.limiter.release(&ended)).expect("memory");
            }
            let due = clients.iter_mut().enumerate().filter(|(_, at)| **at <= now);
            for (client, next) in due {
                // Not all at once.
                let lasts = 45 + (client as u64 * 7 + now) % 11;
                let permits = admit(critical("loud", 0.0));
                *next = now + 4 + if permits.is_some() { lasts } else { 1 };
                others += u64::from(permits.is_some() && now >= 4_000);
                open.extend(permits.map(|permits| (now + lasts, permits)));
            }
            if now % 110 == 55 {
                let permits = admit(critical("polite", 0.0));
                sent += u64::from(now >= 4_000);
                served += u64::from(permits.is_some() && now >= 4_000);
                open.extend(permits.map(|permits| (now + 10, permits)));
            }
            rig.clock.advance(TimeDelta::from_millis(1));
        }
        assert!(served * 100 >= sent * 95, "{nodes} nodes: {served} of {sent}, {others} of the loud one");
        // Seven of eight places for 16 seconds.
        assert!(others >= 7 * 16_000 / 60, "{nodes} nodes: {others} of the loud one");
    }
}

/// What guarantees take back is not taken from a reserve, whatever was lent before.
#[test]
fn guarantees_that_take_back_all_they_may_leave_what_is_reserved() {
    for capacity in ["50/minute", "50 in flight"] {
        let rig = rig(&RULES.replace("CAPACITY", capacity));
        let passed = |load: Load, tries: usize| {
            let attributes = [("tenant", load.tenant), ("tier", load.tier), ("path", load.path)];
            (0..tries).filter(|_| rig.take(&attributes).is_allowed()).count()
        };
        // Critical requests within guarantees count in no reserve, and nothing below one.
        assert_eq!(passed(normal("greedy", 0.0), 60), 40, "what is not reserved: {capacity}");
        for (tenant, requests) in [("e0", 20), ("e1", 15)] {
            let own = Load { path: "/pay", ..enterprise(tenant, 0.0) };
            assert_eq!(passed(own, requests), requests, "up to 150%: {capacity}");
        }
        assert_eq!(passed(critical("polite", 0.0), 20), 10, "all that is reserved: {capacity}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Guarantees and other priorities use all that they can get: whatever the critical tenants ask for, each has its part of the reserve.
    #[test]
    fn a_reserve_is_shared_by_weighted_max_min(
        demands in prop::collection::vec((5.0_f64..400.0, any::<bool>()), 2..6),
    ) {
        const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
        // Nothing is guaranteed to tier pro, but it has a weight.
        let rig = rig(&RULES.replace("CAPACITY", "500/second").replace("40%", "80%"));
        let mut loads = vec![enterprise("other", 600.0), normal("greedy", 600.0)];
        loads.extend(demands.iter().zip(NAMES).map(|((rate, is_pro), tenant)| {
            Load { tier: if *is_pro { "pro" } else { "none" }, ..critical(tenant, *rate) }
        }));
        let counts = run(&rig, &loads, 12, None);
        let weighted: Vec<_> = demands.iter().map(|(rate, is_pro)| (*rate, if *is_pro { 3.0 } else { 1.0 })).collect();
        let shares = max_min(100.0, &weighted);
        let had: Vec<f64> = counts[2..].iter().map(|(_, served)| *served as f64 / 6.0).collect();
        for (had_one, share) in had.iter().zip(&shares) {
            // 95% are shared out, and what is left goes to whoever asks.
            prop_assert!(*had_one >= share * 0.9 - 1.0, "{:?} of {:?}, {:?}", had, shares, counts);
        }
        let total: f64 = had.iter().sum();
        prop_assert!(total >= shares.iter().sum::<f64>() * 0.97, "{:?} of {:?}", had, shares);
        prop_assert!(counts[0].1 >= 6 * 390, "the guarantee: {:?}", counts);
    }
}
