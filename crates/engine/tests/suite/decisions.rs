//! The decision on a request that matches many limits at once.

use crate::rig::{check, rig, rules};
use tollgate_core::{Cost, TimeDelta};
use tollgate_engine::{Check, DecisionVerdict, Origin, UnknownDomain};
use tollgate_rules::Descriptor;

/// A caller denied by one limit would otherwise pay for it in all others.
#[test]
fn a_denied_request_charges_no_other_limit() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: wide, limit: 100/minute}
  - {key: path, name: narrow, limit: 3/minute}
  - {key: global, name: total, limit: [50/second, 500/hour]}
");
    let request = [("user", "u"), ("path", "p"), ("global", "aggregate")];
    for _ in 0..3 {
        assert!(rig.take(&request).is_allowed());
    }
    for _ in 0..20 {
        let denied = rig.take(&request);
        assert_eq!(denied.denied_by_name(), Some("narrow"));
        assert_eq!(denied.origin, Origin::Store);
    }
    assert_eq!(rig.left(&request, "wide"), 97);
    assert_eq!(rig.left(&request, "total"), 47);
}

/// A retry after `retry_after` must pass; the longest wait is the one that counts.
#[test]
fn the_wait_is_the_longest_and_it_is_exact() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: short, limit: 1/second}
  - {key: path, name: long, limit: 1/minute}
");
    let request = [("user", "u"), ("path", "p")];
    assert!(rig.take(&request).is_allowed());
    let denied = rig.take(&request);
    assert_eq!(denied.denied_by_name(), Some("long"));
    let wait = denied.retry_after().expect("it can pass later");
    assert_eq!(wait, TimeDelta::from_secs(60));
    rig.clock.advance(TimeDelta::from_micros(wait.as_micros() - 1));
    assert!(!rig.take(&request).is_allowed());
    rig.clock.advance(TimeDelta::from_micros(1));
    assert!(rig.take(&request).is_allowed());
}

/// An operator who ranks rules expects the denial to carry the name that matters most.
#[test]
fn priority_names_the_denial() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: first, limit: 1/hour}
  - {key: path, name: second, limit: 1/minute, priority: 5}
");
    let request = [("user", "u"), ("path", "p")];
    assert!(rig.take(&request).is_allowed());
    let denied = rig.take(&request);
    assert_eq!(denied.denied_by_name(), Some("second"));
    assert_eq!(denied.retry_after(), Some(TimeDelta::from_secs(3600)), "the wait is still the longest");
}

/// A rule on trial must never bite, and must count as if it did.
#[test]
fn shadow_and_candidate_count_and_never_deny() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: trial, limit: 2/minute, shadow: true}
  - {key: path, name: live, limit: 10/minute, candidate: 4/minute}
");
    let request = [("user", "u"), ("path", "p")];
    for _ in 0..10 {
        assert!(rig.take(&request).is_allowed());
    }
    let denied = rig.take(&request);
    assert_eq!(denied.denied_by_name(), Some("live"));
    let over: Vec<bool> = denied.limits.iter().map(|limit| limit.outcome.verdict.is_denied()).collect();
    assert_eq!(over, [true, true, true], "shadow, live and candidate all say over");
}

/// Degrading is passing with a mark, and the mark names the rule.
#[test]
fn degrade_and_soft_limits_allow_and_report() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: lesser, limit: 2/minute, action: degrade}
  - {key: path, name: warned, limit: 10/minute, soft: 50%}
");
    let request = [("user", "u"), ("path", "p")];
    for _ in 0..2 {
        let decision = rig.take(&request);
        assert_eq!((decision.degraded_by, decision.warned_by), (None, None));
    }
    let third = rig.take(&request);
    assert!(third.is_allowed());
    assert_eq!(third.degraded_by.map(|by| third.name(by)), Some("lesser"));
    for _ in 0..2 {
        assert_eq!(rig.take(&request).warned_by, None);
    }
    let sixth = rig.take(&request);
    assert_eq!(sixth.warned_by.map(|by| sixth.name(by)), Some("warned"));
}

/// Callers are slowed down before they are denied: up to the threshold nothing happens, beyond it each waits its turn.
#[test]
fn a_soft_limit_delays_from_its_threshold_to_the_limit() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: slowed, limit: 10/minute, soft: {at: 80%, action: delay}}
  - {key: shadow, limit: 10/minute, shadow: true, soft: {at: 10%, action: delay}}
  - {key: window, limit: 10/minute, algorithm: sliding_log, soft: {at: 50%, action: delay}}
");
    let request = [("user", "u"), ("shadow", "s")];
    for _ in 0..8 {
        assert_eq!(rig.take(&request).verdict, DecisionVerdict::Allowed { delay: TimeDelta::ZERO });
    }
    for beyond in 1..=2 {
        let decision = rig.take(&request);
        // One unit drains in six seconds.
        let delay = TimeDelta::from_secs(6 * beyond);
        assert_eq!(decision.verdict, DecisionVerdict::Allowed { delay });
        assert_eq!(decision.limits[0].outcome.verdict, tollgate_core::Verdict::Allowed { delay });
        assert_eq!((decision.warned_by, decision.degraded_by), (None, None));
    }
    assert!(!rig.take(&request).is_allowed(), "beyond the limit");
    let delays: Vec<_> = (0..10).map(|_| rig.take(&[("window", "w")]).delay()).collect();
    assert!(delays[..5].iter().all(|delay| *delay == TimeDelta::ZERO), "{delays:?}");
    assert!(delays[5..].is_sorted() && delays[5] > TimeDelta::ZERO, "{delays:?}");
}

/// A delay queue returns each request's delay; a full one denies.
#[test]
fn delay_reports_the_wait_up_to_the_queue_limit() {
    let rig = rig("
domain: d
descriptors:
  - {key: path, name: queue, limit: 20/minute, action: throttle}
");
    for turn in 0..20 {
        assert_eq!(
            rig.take(&[("path", "p")]).verdict,
            DecisionVerdict::Allowed { delay: TimeDelta::from_secs(3 * turn) }
        );
    }
    assert_eq!(
        rig.take(&[("path", "p")]).verdict,
        DecisionVerdict::Denied { retry_after: Some(TimeDelta::from_secs(3)) }
    );
}

/// A tenant with two pools is served while one of them has room.
#[test]
fn quota_rules_are_over_only_together() {
    let text = "
domain: d
descriptors:
  - {key: pool_a, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 1, name: a}}
  - {key: pool_b, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 3, name: b}}
";
    let rig = rig(text);
    let request = [("pool_a", "x"), ("pool_b", "x")];
    for _ in 0..3 {
        assert!(rig.take(&request).is_allowed());
    }
    assert!(!rig.take(&request).is_allowed());
}

/// Envoy's statuses must come in the order of the descriptors, matched or not.
#[test]
fn descriptors_keep_their_order() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: u, limit: 1/minute}
");
    let descriptors = [
        Descriptor { entries: &[("nobody", "x")], ..Descriptor::default() },
        Descriptor { entries: &[("user", "x")], ..Descriptor::default() },
        Descriptor { entries: &[("user", "x")], ..Descriptor::default() },
    ];
    let decision = pollster::block_on(rig.limiter.check(&Check::descriptors("d", &descriptors)));
    assert!(!decision.is_allowed(), "the same descriptor twice counts twice");
    let limited: Vec<bool> = (0..3).map(|at| decision.tightest(at).is_some()).collect();
    assert_eq!(limited, [false, true, true]);
}

/// A reload that forgot counters would hand out fresh quota to everybody.
#[test]
fn new_rules_keep_what_has_been_used() {
    let old = "
domain: d
descriptors:
  - {key: user, name: u, limit: 10/minute}
";
    let rig = rig(old);
    for _ in 0..10 {
        assert!(rig.take(&[("user", "x")]).is_allowed());
    }
    rig.limiter.replace_rules(rules(&format!("{old}  - {{key: path, limit: 5/minute}}\n")));
    assert!(!rig.take(&[("user", "x")]).is_allowed(), "an unchanged rule keeps its counter");
    rig.limiter.replace_rules(rules(&old.replace("10/minute", "20/minute")));
    for _ in 0..10 {
        assert!(rig.take(&[("user", "x")]).is_allowed(), "a raised number gives its new room at once");
    }
    assert!(!rig.take(&[("user", "x")]).is_allowed(), "a changed number keeps what was used");
    rig.limiter.replace_rules(rules(&old.replace("10/minute", "15/minute")));
    assert!(!rig.take(&[("user", "x")]).is_allowed(), "a lowered one too");
    let revision = rig.limiter.rules().revision().to_owned();
    assert_eq!(rig.take(&[("user", "x")]).revision(), revision);
}

/// An unmatched request must pass, with the origin `unmatched`.
#[test]
fn unknown_domains_and_unmatched_requests_pass() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, limit: 1/minute}
");
    let elsewhere = pollster::block_on(rig.limiter.check(&Check::attributes("elsewhere", &[("user", "x")])));
    assert_eq!((elsewhere.is_allowed(), elsewhere.origin), (true, Origin::Unmatched));
    assert_eq!(rig.take(&[("other", "x")]).origin, Origin::Unmatched);
}

/// A misspelled domain has no limits, and its answers look like those of a good one.
#[test]
fn a_misspelled_domain_is_named_in_the_reason() {
    let rig = rig("
domain: checkout
descriptors:
  - {key: user, limit: 1/minute}
");
    let reason = |domain: &str| {
        let decision = pollster::block_on(rig.limiter.check(&Check::attributes(domain, &[("user", "x")])));
        decision.reason.as_deref().map(str::to_owned)
    };
    for domain in ["checkuot", "chekout", "checkouts", "Checkout", "check-out"] {
        let reason = reason(domain).unwrap_or_else(|| panic!("{domain}: no reason"));
        assert!(reason.contains(domain) && reason.contains("did you mean `checkout`?"), "{reason}");
    }
    for domain in ["elsewhere", "", "checkout"] {
        assert_eq!(reason(domain), None, "{domain}");
    }
}

/// Operators who name every domain want a misspelled one to be noticed, not to be a way around the limits.
#[test]
fn unknown_domains_are_denied_where_the_policy_says_so() {
    let limiter = rig("{domain: d, descriptors: [{key: user, limit: 1/minute}]}")
        .limiter
        .with_unknown_domain(UnknownDomain::Deny);
    let elsewhere = pollster::block_on(limiter.check(&Check::attributes("elsewhere", &[("user", "x")])));
    assert_eq!((elsewhere.is_allowed(), elsewhere.denied_by_name()), (false, Some("unknown-domain")));
    assert_eq!(elsewhere.retry_after(), None, "waiting does not help");
    assert!(check(&limiter, &[("other", "x")], Cost::ONE).is_allowed(), "unmatched in a known domain");
    let shadow = limiter.with_global_shadow(true);
    let allowed = pollster::block_on(shadow.check(&Check::attributes("elsewhere", &[])));
    assert!(allowed.is_allowed() && allowed.denied_by.is_none());
}

/// A caller whose cost cannot be read must not pay one unit for a request of thousands, nor take from other limits.
#[test]
fn a_malformed_cost_is_no_cost() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, name: tokens, cost: tokens, limit: 1000/minute}
  - {key: user/32, name: unused, limit: 1/minute}
  - {key: path, name: requests, limit: 10/minute}
  - {key: quiet, name: quiet, cost: tokens, shadow: true, limit: 10/minute}
");
    for malformed in
        ["", "x", "-1", "+1", "1.0", "1e3", " 1", "1 ", "0x10", "1_000", "99999999999999999999", "١"]
    {
        let request = [("user", "u"), ("path", "p"), ("tokens", malformed)];
        let decision = rig.take(&request);
        assert!(!decision.is_allowed(), "{malformed:?}");
        assert_eq!(decision.malformed_cost.as_deref(), Some("tokens"), "{malformed:?}");
        assert_eq!(decision.denied_by_name(), Some("malformed-cost"));
        let peek = check(&rig.limiter, &request, Cost::PEEK);
        assert_eq!(peek.malformed_cost.as_deref(), Some("tokens"), "a peek at {malformed:?}");
        // A shadow rule denies nothing, and a request that names no cost has the usual one.
        assert!(rig.take(&[("quiet", "q"), ("tokens", malformed)]).is_allowed(), "{malformed:?}");
    }
    let request = [("user", "u"), ("path", "p")];
    assert_eq!(
        (rig.left(&request, "tokens"), rig.left(&request, "requests")),
        (1000, 10),
        "nothing was charged"
    );
    assert!(rig.take(&[("user", "u"), ("path", "p"), ("tokens", "300")]).is_allowed());
    assert!(rig.take(&request).is_allowed());
    assert_eq!((rig.left(&request, "tokens"), rig.left(&request, "requests")), (699, 8));
}

/// The switch that stops all denials must not stop the counting.
#[test]
fn global_shadow_allows_and_still_reports() {
    let text = "
domain: d
descriptors:
  - {key: user, limit: 1/minute}
";
    let built = rig(text);
    let limiter = built.limiter.with_global_shadow(true);
    for _ in 0..3 {
        let decision = check(&limiter, &[("user", "x")], Cost::ONE);
        assert!(decision.is_allowed());
    }
    let decision = check(&limiter, &[("user", "x")], Cost::ONE);
    assert!(decision.limits[0].outcome.verdict.is_denied());
}
