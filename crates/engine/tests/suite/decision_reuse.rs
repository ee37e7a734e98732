//! Decisions are written into memory that the thread used for earlier ones. If something of those were left, a caller
//! would get another caller's denial; if their rules stayed, a change would not take effect.

use crate::rig::{self, Rig, rig, rules};
use std::sync::Arc;
use tollgate_core::{Cost, Timestamp};
use tollgate_engine::{ActiveMeasures, DecisionDetails, Measure, MeasureAction, MeasureTarget};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, limit: {count: 1, period: 60s}}
  - {key: soft, limit: {count: 10, period: 60s}, soft: 1}
  - {key: tokens, cost: units, limit: 100/minute}
  - {key: queue, limit: 1/second, burst: 10, action: delay}
  - {key: a, limit: 5/minute}
  - {key: b, limit: 5/minute}
  - {key: c, limit: 5/minute}
  - {key: e, limit: 5/minute}
  - {key: global, limit: 1000/minute}
";

/// Requests whose decisions use every part of one: denied, degraded, malformed, delayed, blocked, of many limits.
const REQUESTS: [&[(&str, &str)]; 8] = [
    &[("user", "x")],
    &[("user", "x")],
    &[("soft", "x")],
    &[("tokens", "x"), ("units", "many")],
    &[("queue", "x")],
    &[("queue", "x")],
    &[("tenant", "blocked"), ("user", "y")],
    &[("a", "1"), ("b", "1"), ("c", "1"), ("e", "1"), ("user", "z")],
];

fn blocking() -> Rig {
    let Rig { clock, limiter } = rig(RULES);
    let measures = ActiveMeasures::default();
    measures.replace([Measure {
        name: "emergency:1".into(),
        action: MeasureAction::Block,
        target: MeasureTarget::Tenant("blocked".into()),
        expires_at: Timestamp::from_secs(2_000_000),
    }]);
    Rig { clock, limiter: limiter.with_measures(Arc::new(measures)) }
}

fn decision_text(rig: &Rig, attributes: &[(&str, &str)]) -> String {
    let decision = rig.take(attributes);
    let details = format!("{:?}", DecisionDetails::clone(&decision));
    let details = details.replace(&format!("{:?}", decision.id()), "");
    format!("{details} {:?} {:?}", decision.emergency(), decision.denied_by_name())
}

#[test]
fn a_decision_has_nothing_of_the_one_before_it() {
    let (reusing, fresh) = (blocking(), blocking());
    for round in 0..3 {
        for request in REQUESTS {
            let reused = decision_text(&reusing, request);
            // A new thread has kept nothing.
            let once = std::thread::scope(|scope| scope.spawn(|| decision_text(&fresh, request)).join());
            assert_eq!(reused, once.expect("no panic"), "round {round}: {request:?}");
        }
    }
}

#[test]
fn new_rules_decide_the_next_check_and_the_thread_lets_the_old_ones_go() {
    let Rig { limiter, .. } = rig("{domain: d, descriptors: [{key: user, limit: 5/minute}]}");
    let other = rig("{domain: d, descriptors: [{key: user, limit: 9/minute}]}");
    let remaining = |attributes| rig::check(&limiter, attributes, Cost::PEEK).limits[0].outcome.remaining;
    let request: &[(&str, &str)] = &[("user", "x")];
    // Several at once, so that the thread keeps several.
    let held: Vec<_> = (0..4).map(|_| rig::check(&limiter, request, Cost::PEEK)).collect();
    let old = Arc::downgrade(&limiter.rules());
    drop(held);
    assert_eq!(remaining(request), 5);
    limiter.replace_rules(rules("{domain: d, descriptors: [{key: user, limit: 7/minute}]}"));
    assert_eq!(remaining(request), 7);
    assert!(old.upgrade().is_none(), "the thread keeps rules that no limiter has");
    // Two limiters on one thread take turns with the same memory.
    for _ in 0..3 {
        assert_eq!(other.left(request, "user"), 9);
        assert_eq!(remaining(request), 7);
    }
}
