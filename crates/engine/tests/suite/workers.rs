//! Gates of upstreams across changes of rules: requests in flight count on, whatever the new settings are.

use std::sync::Arc;
use tollgate_core::{Clock, ManualClock, Timestamp};
use tollgate_engine::{Check, Limiter, WorkerPermit};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

type Memory = MemoryStore<Arc<ManualClock>>;

fn rules(limit: u32, target: u32) -> Arc<Ruleset> {
    let text = format!("{{domain: d, overload: {{workers: {{limit: {limit}, target: {target}x}}}}}}");
    let rules = Ruleset::load(&[Source::new("t.yaml", &text)], &Options::default());
    Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")))
}

fn limiter() -> Limiter<Memory> {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    Limiter::new(rules(8, 2), store, clock as Arc<dyn Clock>)
}

fn enter(limiter: &Limiter<Memory>, upstream: &str) -> Option<WorkerPermit> {
    let check = Check::attributes("d", &[("user", "u")]);
    pollster::block_on(limiter.enter_upstream(&check, upstream, limiter.clock().now()))
        .expect("a place is free")
}

#[test]
fn published_settings_do_not_forget_requests_in_flight() {
    let limiter = limiter();
    let mut held = Vec::new();
    for target in 2..6 {
        limiter.replace_rules(rules(8, target));
        held.push(enter(&limiter, "web").expect("limited"));
        held.push(enter(&limiter, "web").expect("limited"));
        assert_eq!(limiter.upstream_states()[0].gate.in_flight as usize, held.len());
    }
    drop(held);
    assert_eq!(limiter.upstream_states()[0].gate.in_flight, 0);
}

#[test]
fn settings_change_for_known_upstreams_also_when_no_more_can_be_known() {
    let limiter = limiter();
    let held: Vec<_> = (0..1_100).map(|upstream| enter(&limiter, &upstream.to_string())).collect();
    assert_eq!((held.iter().flatten().count(), limiter.upstream_states().len()), (1_024, 1_024));
    limiter.replace_rules(rules(9, 2));
    let _permit = enter(&limiter, "7").expect("limited");
    let states = limiter.upstream_states();
    let state = states.iter().find(|state| state.upstream == "7").expect("known");
    assert_eq!((state.gate.limit, state.gate.in_flight), (9, 2));
}
