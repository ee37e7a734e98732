//! Usage is reported without charging, for every algorithm; a reset restores all of it.

use crate::rig::{self, rig};
use std::sync::Arc;
use tollgate_core::conformance::{Fault, FaultyStore, StoreCall};
use tollgate_core::{Charge, Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{
    ActiveMeasures, Check, LimitSource, LimitUsage, Limiter, Measure, MeasureAction, MeasureTarget, Usage,
    UsageError, UsageOf,
};
use tollgate_rules::{Options, Role, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const FORMS: [&str; 8] = [
    "limit: 7/second",
    "limit: 10/minute, burst: 4",
    "limit: 10/minute, algorithm: leaky_bucket",
    "limit: 10/minute, algorithm: fixed_window",
    "limit: 10/minute, algorithm: sliding_window",
    "limit: 10/minute, algorithm: strict_window",
    "limit: 10/minute, algorithm: sliding_log",
    "limit: 10/day, algorithm: fixed_window, jitter: true",
];

fn of<'a>(attributes: &'a [(&'a str, &'a str)]) -> UsageOf<'a> {
    UsageOf { domain: None, key: attributes[0].0, attributes, address: None, rule: None }
}

fn usage(rig: &rig::Rig, attributes: &[(&str, &str)]) -> Usage {
    pollster::block_on(rig.limiter.usage(&of(attributes))).expect("usage")
}

#[test]
fn peeks_charge_nothing_and_a_reset_refunds_everything() {
    for form in FORMS {
        let rig = rig(&format!("{{domain: d, descriptors: [{{key: api_key, {form}}}]}}"));
        let key = [("api_key", "k")];
        let capacity = rig.left(&key, "api_key");
        for spent in 1..=3 {
            assert!(rig.take(&key).is_allowed(), "{form}");
            for _ in 0..3 {
                let report = usage(&rig, &key);
                assert_eq!((report.limits.len(), report.limits[0].used()), (1, Some(spent)), "{form}");
                assert_eq!(report.limits[0].remaining, Some(capacity - spent), "{form}");
                assert!(report.limits[0].reset_after > TimeDelta::ZERO, "{form}");
            }
        }
        // Far beyond the limit, as after an outage, and into the next window.
        let check = tollgate_engine::Check::attributes("d", &key);
        let reserved = pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), None))
            .expect("reserved");
        pollster::block_on(rig.limiter.settle(reserved.id.expect("held"), 1_000)).expect("settled");
        assert!(!rig.take(&key).is_allowed(), "{form}");
        let report = pollster::block_on(rig.limiter.reset(&of(&key))).expect("a reset");
        assert_eq!(
            (report.limits[0].used(), report.limits[0].remaining),
            (Some(0), Some(capacity)),
            "{form}"
        );
        let passed = (0..20).take_while(|_| rig.take(&key).is_allowed()).count() as u64;
        assert_eq!(passed, capacity, "{form}: exactly the limit again, once");
    }
}

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    limit: 10/minute
    concurrency: 2
    tiers: {pro: 50/minute}
    descriptors:
      - {key: endpoint, limit: 5/minute, name: each-endpoint}
      - {key: endpoint, value: POST /orders, limit: 3/minute, name: orders}
      - {key: region, value: eu, descriptors: [{key: method, limit: 4/minute, name: eu-method}]}
  - {key: endpoint, limit: 100/minute, name: everybody}
  - {key: api_key, value: team-*, share_threshold: true, limit: 9/minute, name: shared}
";

#[test]
fn rules_that_need_more_are_named_with_what_they_need() {
    let rig = rig(RULES);
    let report = usage(&rig, &[("api_key", "k")]);
    let names: Vec<&str> = report.limits.iter().map(|one| one.rule.as_str()).collect();
    assert_eq!(names, ["api_key", "api_key", "orders"], "its window, its permits, and a fixed endpoint's");
    let mut needs: Vec<(&str, Vec<String>)> =
        report.unmatched.iter().map(|needs| (needs.rule.as_str(), needs.attributes.clone())).collect();
    needs.sort();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        needs,
        [
            ("each-endpoint", words(&["endpoint"])),
            ("eu-method", words(&["region", "method"])),
            ("everybody", words(&["endpoint"])),
        ]
    );
    let order = [("api_key", "k"), ("endpoint", "POST /orders"), ("region", "us"), ("tier", "pro")];
    assert!(rig.take(&order).is_allowed());
    let report = usage(&rig, &order);
    let names: Vec<(&str, u64, LimitSource)> =
        report.limits.iter().map(|one| (one.rule.as_str(), one.used().expect("known"), one.source)).collect();
    let own = ("api_key", 1, LimitSource::Tier);
    assert_eq!(
        names,
        [own, own, ("orders", 1, LimitSource::Rule), ("everybody", 1, LimitSource::Rule)],
        "its window, its permits, the endpoint's, and what it shares with everybody"
    );
    assert_eq!(
        report.limits.iter().map(|one| one.is_shared).collect::<Vec<_>>(),
        [false, false, false, true]
    );
    assert!(report.unmatched.is_empty(), "another region and a less specific endpoint can never be met");
    assert_eq!(report.tier.as_deref(), Some("pro"));
}

#[test]
fn a_reset_of_one_rule_leaves_the_others_and_other_callers() {
    let rig = rig(RULES);
    let order = [("api_key", "k"), ("endpoint", "POST /orders")];
    let other = [("api_key", "l"), ("endpoint", "POST /orders")];
    for _ in 0..2 {
        assert!(rig.take(&order).is_allowed() && rig.take(&other).is_allowed());
    }
    let report =
        pollster::block_on(rig.limiter.reset(&UsageOf { rule: Some("endpoint=POST /orders"), ..of(&order) }))
            .expect("a reset");
    assert_eq!((report.limits.len(), report.limits[0].used()), (1, Some(0)));
    let used = |attributes: &[(&str, &str)]| -> Vec<u64> {
        usage(&rig, attributes).limits.iter().map(|one| one.used().expect("known")).collect()
    };
    // The permits of requests under way are held, not used.
    assert_eq!((used(&order), used(&other)), (vec![2, 2, 0, 4], vec![2, 2, 2, 4]));
    assert_eq!(rig.left(&order, "everybody"), 96, "a shared counter is not reset for one caller");
    let unknown = pollster::block_on(rig.limiter.reset(&UsageOf { rule: Some("everybody"), ..of(&order) }));
    assert!(matches!(unknown, Err(UsageError::Rule(_))), "{unknown:?}");
    let unknown = pollster::block_on(rig.limiter.usage(&UsageOf { domain: Some("nowhere"), ..of(&order) }));
    assert!(matches!(unknown, Err(UsageError::Domain(_))), "{unknown:?}");
}

#[test]
fn split_counters_are_reported_as_one() {
    let rig = rig("{domain: d, descriptors: [{key: api_key, limit: 40/minute, split: 4}]}");
    let key = [("api_key", "k")];
    for _ in 0..8 {
        assert!(rig::check(&rig.limiter, &key, Cost::ONE).is_allowed());
    }
    let report = usage(&rig, &key);
    assert_eq!(
        (report.limits[0].limit.capacity(), report.limits[0].used(), report.limits[0].remaining),
        (40, Some(8), Some(32))
    );
    let report = pollster::block_on(rig.limiter.reset(&of(&key))).expect("a reset");
    assert_eq!(report.limits[0].used(), Some(0));
}

/// Each caller's whole usage can be read and reset whichever attribute identifies it.
#[test]
fn a_caller_may_be_identified_by_any_attribute() {
    let rig = rig("
domain: d
descriptors:
  - key: tenant
    limit: 10/minute
    name: tenants
    descriptors:
      - {key: user_id, limit: 5/minute, name: users}
");
    let request = [("user_id", "u"), ("tenant", "t")];
    let tenant = [("tenant", "t"), ("user_id", "u")];
    assert!(rig.take(&request).is_allowed());
    let report = usage(&rig, &request);
    let own: Vec<_> =
        report.limits.iter().map(|one| (one.rule.as_str(), one.used(), one.is_shared)).collect();
    assert_eq!(own, [("tenants", Some(1), true), ("users", Some(1), false)]);
    assert_eq!(usage(&rig, &request[..1]).unmatched.len(), 2, "both need the tenant");
    pollster::block_on(rig.limiter.reset(&of(&request))).expect("a reset");
    let report = usage(&rig, &tenant);
    let own: Vec<_> =
        report.limits.iter().map(|one| (one.rule.as_str(), one.used(), one.is_shared)).collect();
    assert_eq!(own, [("tenants", Some(1), false), ("users", Some(0), false)], "the tenant's units stay used");
}

/// Dashboards and customers show when a window ends; it contains now, and what is used is of that window.
#[test]
fn usage_is_of_a_window_that_contains_now() {
    for form in FORMS {
        let rig = rig(&format!("{{domain: d, descriptors: [{{key: api_key, {form}}}]}}"));
        let key = [("api_key", "k")];
        for spent in 0..=3 {
            let now = rig.clock.now();
            let report = usage(&rig, &key);
            let one = &report.limits[0];
            let (start, end) = one.window.expect("a window");
            assert!(start <= now && now < end, "{form} {spent}: {start:?} {now:?} {end:?}");
            assert_eq!(one.used(), Some(spent), "{form}");
            let length = one.limit.rate().period.length();
            assert!(end.since(start) >= length, "{form}");
            if form.contains("fixed_window") {
                assert_eq!(
                    end.since(now),
                    one.reset_after,
                    "{form}: the window ends when it is unused again"
                );
            }
            assert!(rig.take(&key).is_allowed(), "{form}");
            rig.clock.advance(TimeDelta::from_millis(1));
        }
    }
    let rig = rig("{domain: d, descriptors: [{key: api_key, concurrency: 2}]}");
    assert_eq!(usage(&rig, &[("api_key", "k")]).limits[0].window, None, "permits have no window");
}

fn is_far(charges: &[Charge<'_>]) -> bool {
    charges.iter().any(|charge| charge.key.scope.label().contains("far"))
}

/// Without it one owner that is away hides all of a caller's usage from operators, and they cannot reset any of it.
#[test]
fn what_cannot_be_reached_has_no_remaining_and_the_rest_is_read_and_reset() {
    let rules = "
domain: d
descriptors:
  - key: user
    limit: 10/hour
    descriptors:
      - {key: far, limit: 5/hour}
";
    let rules = Ruleset::load(&[Source::new("r.yaml", rules)], &Options::default()).expect("rules");
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let near = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let limiter = Limiter::new(Arc::new(rules), FaultyStore::new(near), clock);
    let caller = [("user", "u"), ("far", "x")];
    for _ in 0..3 {
        assert!(pollster::block_on(limiter.check(&Check::attributes("d", &caller))).is_allowed());
    }
    let used = |usage: &Usage| usage.limits.iter().map(LimitUsage::used).collect::<Vec<_>>();
    let read = || pollster::block_on(limiter.usage(&of(&caller)));
    assert_eq!(used(&read().expect("usage")), [Some(3), Some(3)]);
    let away = |is_away| if is_away { Fault::timeout() } else { Fault::None };
    limiter.store().set_fault(move |_, charges| away(is_far(charges)));
    assert_eq!(used(&read().expect("what is near")), [Some(3), None]);
    let reset = pollster::block_on(limiter.reset(&of(&caller))).expect("what is near");
    assert_eq!(used(&reset), [Some(0), None]);
    let far = UsageOf { rule: Some("user/far"), ..of(&caller) };
    assert!(matches!(pollster::block_on(limiter.usage(&far)), Err(UsageError::Store(_))));
    assert!(matches!(pollster::block_on(limiter.reset(&far)), Err(UsageError::Store(_))));
    // It answers again, after the reset has failed.
    limiter.store().set_fault(move |call, charges| away(call == StoreCall::Debit && is_far(charges)));
    assert!(matches!(pollster::block_on(limiter.reset(&of(&caller))), Err(UsageError::Store(_))));
    limiter.store().clear_fault();
    assert_eq!(used(&read().expect("usage")), [Some(0), Some(3)], "nothing seems to be reset that is not");
}

/// Support reads that four units are left, and the caller is denied.
#[test]
fn usage_is_of_the_limits_in_force() {
    let text = "
domain: d
descriptors:
  - key: api_key
    name: own
    limit: 8/minute
    algorithm: fixed_window
    soft: {at: 50%}
    descriptors:
      - {key: region, name: later, limit: 1/minute, algorithm: fixed_window, enforce: 1%}
      - {key: zone, name: lesser, limit: 5/minute, algorithm: fixed_window, action: degrade}
";
    let mut rig = rig(text);
    let measures = Arc::new(ActiveMeasures::new(|key| key.len() as u64));
    rig.limiter = rig.limiter.with_measures(Arc::clone(&measures));
    let key = [("api_key", "k"), ("region", "eu"), ("zone", "a")];
    let declare = |action, target| {
        let expires_at = Timestamp::from_secs(9_000_000_000);
        measures.replace([Measure { name: "emergency:1".into(), action, target, expires_at }]);
    };
    (0..4).for_each(|_| assert!(rig.take(&key).is_allowed()));
    let read = |rig: &rig::Rig| {
        let all = usage(rig, &key).limits;
        let one = |name: &str| all.iter().find(|one| one.rule == name).expect("a limit").clone();
        ["own", "later", "lesser"].map(one)
    };
    let [own, later, lesser] = read(&rig);
    assert_eq!((own.limit.capacity(), own.remaining, own.is_enforced), (8, Some(4), true));
    assert_eq!((later.role, later.is_enforced), (Role::Unenforced, false));
    assert!(!lesser.is_enforced);

    declare(MeasureAction::Tighten(500), MeasureTarget::All);
    let [own, ..] = read(&rig);
    assert_eq!((own.limit.capacity(), own.remaining, own.is_charged), (4, Some(0), true));
    assert_eq!(own.configured.map(|limit| limit.capacity()), Some(8));
    assert_eq!(own.measure, Some(("emergency:1".to_owned(), MeasureAction::Tighten(500))));
    let denied = rig.take(&key);
    assert!(!denied.is_allowed());
    let decided = &denied.limits[0];
    assert_eq!(
        (decided.outcome.remaining, denied.limit(decided).map(|limit| limit.limit.capacity())),
        (0, Some(4))
    );

    declare(MeasureAction::DisableRule, MeasureTarget::Rule("own".into()));
    let [own, later, _] = read(&rig);
    assert_eq!((own.limit.capacity(), own.remaining, own.is_charged), (8, Some(4), false));
    assert!(later.is_charged && later.measure.is_none());
    declare(MeasureAction::Block, MeasureTarget::ApiKey(1));
    assert!(read(&rig).iter().all(|one| !one.is_charged && one.measure.is_some()));
}

/// Support must not believe that it has given a caller anything.
#[test]
fn a_reset_says_what_it_has_reset() {
    let rig = rig("{domain: d, descriptors: [
        {key: api_key, name: own, limit: 2/minute}, {key: endpoint, name: all, limit: 9/minute}]}");
    let key = [("api_key", "k")];
    assert!(rig.take(&key).is_allowed());
    let report = pollster::block_on(rig.limiter.reset(&of(&key))).expect("a reset");
    assert_eq!(report.limits[0].is_reset, Some(true));
    assert_eq!(usage(&rig, &key).limits[0].is_reset, None);
    let nothing = pollster::block_on(rig.limiter.reset(&of(&[("tenant", "t")])));
    assert!(matches!(nothing, Err(UsageError::NoReset(_))), "{nothing:?}");
}
