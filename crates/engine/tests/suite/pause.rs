//! Requests that wait for their clients hold no place in flight to the upstream.

use std::sync::Arc;
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Ended, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
overload:
  workers: {limit: 1}
  adapt: {signals: {slow: {above: 500, measure: upstream_p99_ms}}, order: [free], step: 1h}
";

#[test]
fn a_paused_request_leaves_its_place_to_others_and_its_wait_is_no_latency() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("t.yaml", RULES)], &Options::default());
    let rules = Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")));
    let limiter = Limiter::new(rules, store, Arc::clone(&clock) as Arc<dyn Clock>);
    let check = Check::attributes("d", &[("user", "u")]);
    let enter = || {
        let entered = pollster::block_on(limiter.enter_upstream(&check, "up", limiter.clock().now()));
        entered.unwrap_or_else(|_| panic!("a place is free")).expect("workers are limited")
    };
    let in_flight = || limiter.upstream_states()[0].gate.in_flight;
    for _ in 0..20 {
        let mut slow = enter();
        slow.pause();
        slow.pause();
        assert_eq!(in_flight(), 0);
        let mut other = enter();
        other.ended(Ended::Completed);
        clock.advance(TimeDelta::from_secs(30));
        slow.resume();
        slow.resume();
        assert_eq!(in_flight(), 2, "it is not shed");
        drop(other);
        clock.advance(TimeDelta::from_millis(10));
        slow.ended(Ended::Completed);
        drop(slow);
        assert_eq!(in_flight(), 0);
    }
    clock.advance(TimeDelta::from_secs(3_600));
    drop(enter());
    let slow = limiter.adaptations()[0].signals[0].value;
    assert!((5.0..100.0).contains(&slow), "the upstream took 10 ms, its client 30 s: {slow}");
    let state = &limiter.upstream_states()[0].gate;
    assert_eq!(state.shed.iter().sum::<u64>(), 0);
    let mut left = enter();
    left.pause();
    drop(left);
    assert_eq!(in_flight(), 0);
}
