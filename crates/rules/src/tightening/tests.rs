//! Each way to admit far less is found, and daily changes ask nothing.

use crate::{Options, Ruleset, Source, TighteningKind};
use tollgate_core::{Cost, State, Timestamp};

fn load(descriptors: &str) -> Ruleset {
    domain(&format!("descriptors: [{descriptors}]"))
}

fn domain(text: &str) -> Ruleset {
    Ruleset::load(&[Source::new("d.yaml", format!("{{domain: d, {text}}}"))], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

fn tightened(before: &str, after: &str) -> Vec<String> {
    load(before).tightened(&load(after)).into_iter().map(|one| one.detail).collect()
}

/// Wraps the settings of one rule.
fn rule(settings: &str) -> String {
    format!("{{key: api_key, {settings}}}")
}

#[test]
fn whatever_cuts_a_limit_is_found() {
    for (before, after, says) in [
        ("limit: 100/s", "limit: 0/s", "admits nothing"),
        ("limit: 100/s, shadow: true", "limit: 0/s", "admits nothing"),
        ("limit: 100/s", "limit: 10/s", "admits 10 times less: gcra 10/1s instead of gcra 100/1s"),
        ("limit: 100/s", "limit: 100/minute", "admits 60 times less: gcra 100/1m instead of gcra 100/1s"),
        ("limit: 100/minute, burst: 600", "limit: 100/minute, burst: 20", "admits 30 times less at once"),
        ("limit: [100/s, 1M/month]", "limit: [100/s, 1000/month]", "admits 1000 times less"),
        ("limit: 100/s", "limit: [100/s, 100/hour]", "admits 3600 times less"),
        ("limit: [1/s, 1000/minute]", "limit: [1/s, 100/minute]", "admits 10 times less"),
        ("limit: 100/s, candidate: 5/s", "limit: 5/s", "admits 20 times less"),
        ("limit: 100/s", "limit: 100/s, cost: 50", "admits 50 times less"),
        ("limit: 100/s", "limit: 100/s, cost: 500", "admits nothing"),
        ("limit: 100/s", "limit: 5/s, algorithm: sliding_log", "admits 20 times less"),
        ("concurrency: 100", "concurrency: 5", "admits 20 times less at once"),
        ("rate_limit: {unlimited: true}", "limit: 100/s", "admits less: gcra 100/1s instead of unlimited"),
        (
            "limit: 10/s, tiers: {pro: 100/s}",
            "limit: 10/s, tiers: {pro: 1/s}",
            "admits 100 times less for tier pro",
        ),
        ("limit: 10/s, tiers: {pro: 100/s}", "limit: 10/s", "admits 10 times less for tier pro"),
        ("limit: 10/s", "limit: 10/s, tiers: {free: 10/hour}", "admits 3600 times less for tier free"),
        ("limit: 10/s", "limit: 10/s, tiers: {free: 0/s}", "admits nothing for tier free"),
        (
            "limit: [{count: 100000, period: minute, cost: tokens}]",
            "limit: [{count: 5000, period: minute, cost: tokens}]",
            "admits 20 times less",
        ),
    ] {
        let found = tightened(&rule(before), &rule(after));
        assert_eq!(found.len(), 1, "{before} → {after}: {found:?}");
        assert!(found[0].starts_with(&format!("rule `d: api_key` {says}")), "{before} → {after}: {found:?}");
    }
}

/// A request is limited by the rule that matches it: where that changes, the rules at both paths are compared.
#[test]
fn another_rule_that_applies_is_compared() {
    let general = "{key: api_key, limit: 100/s}";
    for (before, after, says) in [
        (
            general,
            "{key: api_key, limit: 100/s}, {key: api_key, value: bob, limit: 1/s}",
            "`d: api_key=bob` admits 100 times less",
        ),
        (
            general,
            "{key: api_key, value: 'b*', limit: 1/s}, {key: api_key, limit: 100/s}",
            "`d: api_key=b*` admits 100 times less",
        ),
        (
            general,
            "{key: api_key, limit: 100/s}, {key: ip, value: evil, limit: 0/s}",
            "`d: ip=evil` admits nothing",
        ),
        (
            "{key: api_key, value: bob, limit: 5000/s}, {key: api_key, limit: 100/s}",
            general,
            "`d: api_key` admits 50 times less: gcra 100/1s for requests of `api_key=bob` instead of gcra 5000/1s",
        ),
        (
            "{key: api_key, name: per-key, limit: 100/s}",
            "{key: api_key, name: per-key, limit: 100/s}, {key: tenant, replaces: [{name: per-key}], limit: 1/s}",
            "`d: tenant` admits 100 times less",
        ),
        (
            "{key: api_key, name: per-key, limit: 100/s}, {key: tenant, replaces: [{name: per-key}], limit: 9000/s}",
            "{key: api_key, name: per-key, limit: 100/s}, {key: tenant, limit: 9000/s}",
            "`d: api_key` admits 90 times less",
        ),
    ] {
        let found = tightened(before, after);
        assert_eq!(found.len(), 1, "{before} → {after}: {found:?}");
        assert!(found[0].contains(says), "{before} → {after}: {found:?}");
    }
}

#[test]
fn a_first_rule_set_that_admits_nothing_is_found() {
    let found =
        Ruleset::load(&[], &Options::default()).expect("no rules").tightened(&load(&rule("limit: 0/s")));
    assert_eq!((found.len(), found[0].kind), (1, TighteningKind::AdmitsNothing), "{found:?}");
    // What admits nothing already is not asked again.
    assert_eq!(tightened(&rule("limit: 0/s"), &rule("limit: 0/minute")), [""; 0]);
}

#[test]
fn the_capacity_of_a_fleet_is_compared() {
    let fleet = |rate: &str| {
        domain(&format!("overload: {{fleet: {{capacity: {rate}}}}}, descriptors: [{{key: a, limit: 1/s}}]"))
    };
    let found = fleet("1000/s").tightened(&fleet("20/s"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].detail.contains("admits 50 times less"), "{found:?}");
    assert_eq!(fleet("1000/s").tightened(&fleet("200/s")), []);
}

#[test]
fn daily_changes_ask_nothing() {
    for (before, after) in [
        ("limit: 100/s", "limit: 11/s"),
        ("limit: 100/s", "limit: 1000/s"),
        ("limit: 0/s", "limit: 100/s"),
        ("limit: 100/s", "limit: 0/s, shadow: true"),
        ("limit: 100/s", "limit: 100/s, candidate: 0/s"),
        ("limit: 100/s", "limit: 100/s, class: security"),
        ("limit: 100/s", "limit: 100/s, on_error: closed"),
        ("limit: 100/s", "limit: 100/s, algorithm: sliding_log"),
        ("limit: 100/s", "limit: 100/s, algorithm: fixed_window"),
        ("limit: 100/s", "limit: 100/s, split: 4"),
        ("limit: 100/s", "rate_limit: {unlimited: true}"),
        ("limit: 5/s, shadow: true", "limit: 5/s"),
        ("limit: 10/s, tiers: {pro: 100/s}", "limit: 50/s, tiers: {pro: 90/s, big: 900/s}"),
    ] {
        assert_eq!(tightened(&rule(before), &rule(after)), [""; 0], "{before} → {after}");
    }
    let general = "{key: api_key, limit: 100/s}";
    for more in ["{key: ip, limit: 1/hour}", "{key: api_key, value: bob, limit: 5000/s}"] {
        assert_eq!(tightened(general, &format!("{general}, {more}")), [""; 0], "{more}");
    }
    let nested =
        "{key: api_key, limit: 100/s, descriptors: [{key: endpoint, value: POST /login, limit: 5/hour}]}";
    assert_eq!(tightened(general, nested), [""; 0]);
}

/// Small steps are judged against the rules of a day ago, and only those that lower further.
#[test]
fn small_steps_add_up() {
    let per_key = |limit: &str| load(&rule(&format!("limit: {limit}")));
    let (day_ago, now) = (per_key("100/s"), per_key("12/s"));
    let found = now.tightened_since(&day_ago, &per_key("4/s"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].detail.contains("25 times less than a day ago"), "{found:?}");
    assert_eq!(now.tightened_since(&day_ago, &per_key("13/s")), []);
    let confirmed = per_key("1/s");
    assert_eq!(confirmed.tightened_since(&day_ago, &confirmed), []);
    assert_eq!(now.tightened_since(&day_ago, &per_key("1/s")).len(), 1, "one large step is reported once");
}

/// The oracle floods a caller's limits and counts what passes: whatever lets a tenth through is found.
#[test]
fn what_a_flood_would_lose_is_found() {
    let flood = |rules: &Ruleset| -> u64 {
        let limits: Vec<_> = rules.rules()[0].limits.limits.iter().map(|limit| limit.limit.clone()).collect();
        let mut states = vec![State::default(); limits.len()];
        let mut passed = 0;
        for second in 0..7_200 {
            let now = Timestamp::from_secs(1_000_000 + second);
            let mut next = states.clone();
            while limits
                .iter()
                .zip(&mut next)
                .all(|(limit, state)| limit.step(state, now, Cost::ONE).verdict.is_allowed())
            {
                states.clone_from(&next);
                passed += 1;
            }
            // A denied request changes nothing.
        }
        passed
    };
    let all: Vec<(&str, Ruleset, u64)> = [
        "limit: 5/minute",
        "limit: 5/hour",
        "limit: 5/s",
        "limit: [5/minute, 20/hour]",
        "limit: [5/s, 1000/hour]",
        "limit: 50/hour, algorithm: fixed_window",
        "limit: 60/hour, algorithm: strict_window",
        "limit: 3/minute, algorithm: sliding_log",
        "limit: 5/minute, burst: 100",
        "limit: 0/minute",
    ]
    .into_iter()
    .map(|limits| {
        let rules = load(&rule(limits));
        let passed = flood(&rules);
        (limits, rules, passed)
    })
    .collect();
    let mut losses = 0;
    for (before, old, many) in &all {
        for (after, new, few) in &all {
            // The algorithms differ by a factor of two in a short time.
            if *many >= few * 20 && many > few {
                losses += 1;
                assert!(!old.tightened(new).is_empty(), "{before} → {after}: {many} → {few}");
            }
        }
    }
    assert!(losses > 20, "{losses}");
}
