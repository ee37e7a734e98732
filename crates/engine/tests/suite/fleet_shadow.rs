//! Shadow mode of the fleet's capacity: it reports of each request what would become of it if the section were enforced.

use crate::rig::{Rig, check, rig, rules};
use proptest::prelude::*;
use std::sync::Arc;
use tollgate_core::conformance::{FaultyStore, StoreCall};
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, HeldPermits, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors: [{key: tenant, value: limited, name: own, limit: 30/second}]
overload:
  priorities: [{when: {path: /pay}, priority: critical}, {when: {path: /test}, priority: sheddable}]
  fleet: {capacity: 20/second, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 25% each, free: 10% together}}
";

fn shadowed(text: &str) -> String {
    text.replace("overload:", "overload:\n  shadow: true")
}

fn shadow(text: &str) -> Rig {
    rig(&shadowed(text))
}

fn plain(text: &str) -> String {
    text.lines().filter(|line| !line.contains("fairness")).map(|line| format!("{line}\n")).collect()
}

type Request = &'static [(&'static str, &'static str)];
const REQUESTS: [Request; 8] = [
    &[("tenant", "acme"), ("tier", "enterprise")],
    &[("tenant", "acme"), ("tier", "enterprise"), ("path", "/pay")],
    &[("tenant", "greedy")],
    &[("tenant", "greedy"), ("path", "/pay")],
    &[("tenant", "greedy"), ("path", "/test")],
    &[("tenant", "f1"), ("tier", "free")],
    &[("tenant", "f2"), ("tier", "free")],
    &[("tenant", "limited")],
];

/// Decides a request. Returns whether the fleet sheds it, or would, and what it holds.
fn admit(rig: &Rig, request: Request) -> (bool, Option<HeldPermits>) {
    let (decision, held) = pollster::block_on(rig.limiter.admit(&Check::attributes("d", request)));
    let is_denied = |status: &&tollgate_engine::LimitStatus| {
        decision.limit_name(status) == "overload/fleet" && status.outcome.verdict.is_denied()
    };
    let is_shed =
        decision.is_shed() || decision.is_allowed() && decision.limits.iter().any(|one| is_denied(&one));
    let reason = decision.reason.as_deref().unwrap_or_default();
    let says = if decision.is_allowed() { "would be shed at priority " } else { "shed at priority " };
    assert_eq!(is_shed, reason.starts_with(says), "{reason}");
    (is_shed, held)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 300, ..ProptestConfig::with_cases(16) })]
    /// Request by request: what would be shed takes nothing, so that all others see what they would if it were.
    #[test]
    fn what_is_reported_is_what_would_be_shed(
        sent in prop::collection::vec((0_usize..REQUESTS.len(), 0_u64..30, 0_usize..100), 1..400),
        is_in_flight: bool,
        is_fair: bool,
    ) {
        let text = if is_in_flight { RULES.replace("20/second", "20 in flight") } else { RULES.to_owned() };
        let text = if is_fair { text } else { plain(&text) };
        let (live, tried) = (rig(&text), shadow(&text));
        let (mut shed, mut held) = (0, Vec::new());
        for (number, (request, pause, pick)) in sent.into_iter().enumerate() {
            let (is_shed, own) = admit(&live, REQUESTS[request]);
            let (would_be, other) = admit(&tried, REQUESTS[request]);
            prop_assert_eq!(is_shed, would_be, "request {}: {:?}", number, REQUESTS[request]);
            shed += u64::from(is_shed);
            held.push((own, other));
            if is_in_flight && pick % 5 < 4 && !held.is_empty() {
                let (own, other) = held.swap_remove(pick % held.len());
                for (rig, permits) in [(&live, own), (&tried, other)] {
                    permits.iter().for_each(|held| pollster::block_on(rig.limiter.release(held)).expect("memory"));
                }
            }
            for rig in [&live, &tried] {
                rig.clock.advance(TimeDelta::from_millis(pause));
            }
        }
        let counted = |rig: &Rig| {
            rig.limiter.fleet_sheds().iter().fold((0, 0), |sum, one| (sum.0 + one.count, sum.1 + one.shadow))
        };
        prop_assert_eq!((counted(&live), counted(&tried)), ((shed, 0), (0, shed)));
    }
}

/// The log has the priority and the fair share, as it would have for a request that is shed.
#[test]
fn the_reason_is_that_of_a_request_that_is_shed() {
    let rig = shadow(RULES);
    let reason = (0..400).find_map(|_| {
        rig.clock.advance(TimeDelta::from_millis(10));
        let decision = rig.take(&[("tenant", "greedy")]);
        assert!(decision.is_allowed());
        decision.reason.as_deref().filter(|reason| reason.contains("fair share")).map(str::to_owned)
    });
    let expected = "would be shed at priority normal: of the fleet's capacity of 20/1s, 16 are for it, and the rest is reserved for higher priorities, beyond its tenant's fair share";
    assert_eq!(reason.as_deref(), Some(expected));
}

/// A request that passes, or that a limit of its caller denies, is one call; one that would be shed is charged to its other limits by a
/// second.
#[test]
fn a_request_that_would_not_be_shed_is_one_call_of_the_store() {
    let text = shadowed(&RULES.replace("value: limited, ", "").replace("30/second", "18/second"));
    for text in [text.clone(), plain(&text)] {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let counters =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let limiter = Limiter::new(rules(&text), FaultyStore::new(counters), clock as Arc<dyn Clock>);
        let calls = |tenant: &str| {
            let before = limiter.store().calls(StoreCall::Charge);
            let decision = check(&limiter, &[("tenant", tenant)], Cost::ONE);
            (decision, limiter.store().calls(StoreCall::Charge) - before)
        };
        // 16 of 20 are not reserved.
        for _ in 0..16 {
            let (decision, calls) = calls("a");
            assert!(decision.is_allowed() && decision.reason.is_none());
            assert_eq!(calls, 1);
        }
        let left = |decision: &tollgate_engine::Decision| {
            let own =
                decision.limits.iter().find(|one| decision.limit_name(one) == "own").expect("its limit");
            own.outcome.remaining
        };
        for remaining in [1, 0] {
            let (decision, calls) = calls("a");
            let reason = decision.reason.as_deref().unwrap_or_default();
            assert!(decision.is_allowed() && reason.starts_with("would be shed"), "{reason}");
            assert_eq!((calls, left(&decision)), (2, remaining), "its own limit is charged");
        }
        let (decision, calls) = calls("a");
        assert_eq!((decision.denied_by_name(), calls), (Some("own"), 1));
    }
}
