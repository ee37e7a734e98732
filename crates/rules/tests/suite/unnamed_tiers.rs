//! Callers of no tier that a rule names: where the rule protects something they never have more than the strictest tier,
//! and fail no more openly.

use tollgate_core::Cost;
use tollgate_rules::{Descriptor, FailPolicy, Options, Ruleset, Source};

fn load(descriptor: &str) -> Ruleset {
    let text = format!("domain: d\ndescriptors:\n- {descriptor}\n");
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

/// The limits of a request with this tier, or none.
fn limits(rules: &Ruleset, tier: Option<&str>) -> Vec<String> {
    let mut request = vec![("user", "u")];
    request.extend(tier.map(|tier| ("tier", tier)));
    let domain = rules.domain("d").expect("a domain");
    let shown = |plan: tollgate_rules::Plan<'_>| {
        plan.limits.iter().map(|limit| limit.limit.limit.to_string()).collect()
    };
    let by_attributes: Vec<String> = shown(domain.plan(&request, Cost::ONE));
    let descriptors = [Descriptor { entries: &request, ..Descriptor::default() }];
    let by_descriptor: Vec<String> = shown(domain.plan_descriptors(&descriptors, Cost::ONE));
    assert_eq!(by_attributes, by_descriptor, "{tier:?}");
    by_attributes
}

fn policy(rules: &Ruleset, tier: Option<&str>) -> FailPolicy {
    rules.rules()[0].on_error.policy(tier)
}

#[test]
fn unknown_plans_have_the_strictest_limit_where_a_rule_protects() {
    for (rule, expected) in [
        ("tiers: {free: 60/minute, pro: 600/minute}", &["60/1m"][..]),
        // A lower rate is stricter than a smaller burst, and among equals the smaller burst.
        ("tiers: {a: [10/second, 1000/day], b: [5/second, 100000/day]}", &["10/1s", "1000/1d"]),
        (
            "tiers: {a: {count: 60, period: minute, burst: 50}, b: {count: 60, period: minute, burst: 5}}",
            &["60/1m burst 5"],
        ),
        // Of each cost.
        (
            "tiers: {a: [60/minute, {count: 9, period: day, cost: tokens}], b: [10/minute, {count: 99, period: day, cost: tokens}]}",
            &["10/1m", "9/1d"],
        ),
        // A tier for those who are shut out is no plan.
        ("tiers: {suspended: 0/minute, free: 60/minute}", &["60/1m"]),
        ("tiers: {suspended: 0/minute}", &["0/1m"]),
        ("limit: 5/minute, tiers: {free: 1/minute}", &["5/1m"]),
        // Said, it is meant.
        ("limit: unlimited, tiers: {free: 1/minute}", &[]),
    ] {
        for class in ["cost", "security", "strict"] {
            let rules = load(&format!("{{key: user, class: {class}, {rule}}}"));
            for tier in [None, Some("platinum")] {
                let found = limits(&rules, tier);
                let mut found: Vec<_> =
                    found.iter().map(|limit| limit.split_once(' ').expect("an algorithm").1).collect();
                found.sort_unstable();
                let mut expected = expected.to_vec();
                expected.sort_unstable();
                assert_eq!(found, expected, "{class}, {tier:?}: {rule}");
            }
        }
    }
    // The counters are those of the tier: without one a caller has no second budget.
    let rules = load("{key: user, class: cost, tiers: {free: 60/minute, pro: 600/minute}}");
    let rule = &rules.rules()[0];
    assert_eq!(rule.limits.limits[0].scope, rule.limits_for(Some("free"))[0].scope);
}

/// Leaving the tier out must not be the way through an outage.
#[test]
fn without_a_tier_a_request_fails_as_with_the_tier_whose_limit_it_has() {
    use FailPolicy::{Closed, Local, Open};
    for (rule, expected) in [
        ("class: cost, tiers: {free: 60/minute, pro: 600/minute}", [Closed, Closed, Closed, Open]),
        ("class: cost, tiers: {basic: 60/minute, pro: 600/minute}", [Closed, Closed, Closed, Open]),
        ("class: cost, limit: 60/minute, tiers: {pro: 600/minute}", [Closed, Closed, Closed, Open]),
        (
            "class: cost, on_error: {free: local, default: open}, tiers: {free: 60/minute, pro: 600/minute}",
            [Local, Local, Local, Open],
        ),
        // What a file says of callers with a limit of their own stands.
        (
            "class: cost, on_error: {free: closed, default: open}, limit: 6/minute, tiers: {pro: 600/minute}",
            [Open, Open, Closed, Open],
        ),
        ("class: cost, on_error: open, tiers: {free: 60/minute, pro: 600/minute}", [Open, Open, Open, Open]),
        ("class: cost, limit: 60/minute", [Open, Open, Closed, Open]),
        ("class: security, tiers: {free: 60/minute}", [Closed, Closed, Closed, Closed]),
    ] {
        let rules = load(&format!("{{key: user, {rule}}}"));
        let found = [None, Some("platinum"), Some("free"), Some("pro")].map(|tier| policy(&rules, tier));
        assert_eq!(found, expected, "{rule}");
    }
}

/// Nobody must find out from the bill.
#[test]
fn what_unknown_plans_have_is_reported() {
    let free = load("{key: user, tiers: {free: 60/minute}}");
    assert_eq!(limits(&free, None), Vec::<String>::new());
    let [warning] = free.warnings() else { panic!("{:?}", free.warnings()) };
    assert!(warning.message.contains("has no limit"), "{warning}");
    assert!(
        warning.help.as_deref().is_some_and(|help| help.contains("`limit: 60/minute` beside `tiers`")),
        "{warning}"
    );
    let cost = load("{key: user, class: cost, tiers: {free: 60/minute, pro: 600/minute}}");
    let [note] = cost.notes() else { panic!("{:?}", cost.notes()) };
    assert!(note.message.contains("`60/1m`") && note.message.contains("that of `free`"), "{note}");
    for stated in ["limit: 5/minute, ", "limit: unlimited, ", "class: cost, limit: 5/minute, "] {
        let rules = load(&format!("{{key: user, {stated}tiers: {{free: 60/minute}}}}"));
        assert!(rules.warnings().is_empty() && rules.notes().is_empty(), "{stated}");
    }
}
