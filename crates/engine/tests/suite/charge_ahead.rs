//! Units that are charged ahead: each limit by itself, and what is denied is returned to where it was counted.

use crate::rig::{Memory, rules};
use std::sync::Arc;
use tollgate_core::conformance::DeadStore;
use tollgate_core::{Clock, Cost, CounterStore, ManualClock, Timestamp};
use tollgate_engine::{ChargeAhead, Check, Limiter, Origin};
use tollgate_store::{MemoryConfig, MemoryStore};

fn memory(clock: &Arc<ManualClock>) -> Memory {
    MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("memory")
}

fn ahead<S: CounterStore>(limiter: &Limiter<S>, units: u64, costs: &[(u64, u64)]) -> ChargeAhead {
    let check = Check::attributes("d", &[("user", "u")]).with_cost(Cost::new(units));
    pollster::block_on(limiter.charge_ahead(&check, costs))
}

/// A window that counts denied requests would be used up by units that were asked for ahead and denied.
fn returns_what_is_denied<S: CounterStore>(limiter: &Limiter<S>, origin: Origin) {
    let denied = ahead(limiter, 150, &[]);
    assert!(!denied.decision.is_allowed());
    assert_eq!((denied.decision.origin, denied.counters[0].remaining), (origin, 100));
    assert!(ahead(limiter, 100, &[]).decision.is_allowed());
    assert_eq!(ahead(limiter, 0, &[]).counters[0].remaining, 0);
}

const ENVOY: &str = "
domain: d
profile: envoy
descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 100}";

#[test]
fn denied_units_are_returned_to_the_store() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    for mode in ["", ", mode: local"] {
        let rules = rules(&format!("{ENVOY}{mode}}}\n"));
        let limiter = Limiter::new(rules, memory(&clock), Arc::clone(&clock) as Arc<dyn Clock>);
        returns_what_is_denied(&limiter, Origin::Store);
    }
}

#[test]
fn denied_units_are_returned_to_the_counters_of_an_outage() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let rules = rules(&format!("{ENVOY}, on_error: local}}\n"));
    let limiter = Limiter::new(rules, DeadStore, Arc::clone(&clock) as Arc<dyn Clock>);
    returns_what_is_denied(&limiter.with_fallback(memory(&clock)), Origin::Local);
}

/// What one limit has in escrow still must not be charged to it again because another lacks units.
#[test]
fn each_limit_has_its_own_cost() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let rules = rules(
        "
domain: d
descriptors:
  - {key: user, limit: [{count: 10, period: second, burst: 40}, 1000/hour]}
",
    );
    let limiter = Limiter::new(rules, memory(&clock), Arc::clone(&clock) as Arc<dyn Clock>);
    let first = ahead(&limiter, 0, &[]);
    let costs: Vec<(u64, u64)> = first.counters.iter().map(|one| (one.counter, one.capacity / 20)).collect();
    let charged = ahead(&limiter, 7, &costs);
    let left: Vec<(u64, u64)> =
        charged.counters.iter().map(|one| (one.cost, one.capacity - one.remaining)).collect();
    for (own, (cost, used)) in first.counters.iter().zip(&left) {
        let expected = own.capacity / 20;
        assert_eq!((*cost, *used), (expected, expected), "{left:?}");
    }
    assert!(charged.decision.is_allowed() && left.len() == 2, "{left:?}");
}
