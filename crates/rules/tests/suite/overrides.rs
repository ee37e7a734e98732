//! What is agreed with one caller is compiled against the rules: which rules it may change, and what stays as it was.

use std::sync::Arc;
use tollgate_core::Cost;
use tollgate_rules::{
    CallerOverrides, MatchKind, Options, Override, OverrideRate, Plan, Replaces, Ruleset, Source,
};

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    limit: 100/minute
    burst: 10
    soft: 50%
    concurrency: 4
    tiers: {pro: 1000/minute}
    descriptors:
      - {key: endpoint, value: POST /orders, name: orders, limit: [2/second, 50/minute]}
      - {key: endpoint, value: GET /health, rate_limit: {unlimited: true}}
      - {key: endpoint, value: \"PUT *\", algorithm: strict_window, slots: 8, limit: 8/minute}
  - {key: endpoint, limit: 500/minute}
  - {key: api_key, value: \"shared-*\", share_threshold: true, limit: 9/minute}
";

fn rules() -> Ruleset {
    Ruleset::load(&[Source::new("t.yaml", RULES)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

fn override_of(descriptor: &str, count: u64, period: &str) -> Override {
    Override::new(descriptor, count, period)
}

fn unlimited(descriptor: &str) -> Override {
    Override { limit: None, ..Override::new(descriptor, 0, "second") }
}

/// The numbers of a rule's limits for a request.
fn limits_of(rules: &Ruleset, quota: Option<&Arc<CallerOverrides>>, request: &[(&str, &str)]) -> Vec<String> {
    matched(rules, quota, request).into_iter().map(|(_, limit, _)| limit).collect()
}

fn compiled(rules: &Ruleset, tier: Option<&str>, overrides: &[Override]) -> Arc<CallerOverrides> {
    let (tenant, unfit) = rules.compile_overrides("api_key", tier, overrides);
    assert_eq!(unfit, []);
    Arc::new(tenant)
}

/// The limits that a request meets: rule, limit, counter.
fn matched(
    rules: &Ruleset,
    tenant: Option<&Arc<CallerOverrides>>,
    request: &[(&str, &str)],
) -> Vec<(String, String, String)> {
    let mut plan = Plan { quotas: tenant.map_or(&[], std::slice::from_ref), ..Plan::default() };
    rules.domain("d").expect("a domain").plan_into(request, Cost::ONE, &mut plan);
    let hits = plan.limits.iter().map(|hit| {
        let name = hit.rule.map_or("", |rule| rule.name.as_str());
        (name.to_owned(), hit.limit.limit.to_string(), hit.limit.scope.label().to_owned())
    });
    hits.collect()
}

#[test]
fn every_name_of_a_rule_finds_it() {
    let rules = rules();
    let orders = [("api_key", "a"), ("endpoint", "POST /orders")];
    for name in ["orders", "api_key/endpoint=POST /orders", "endpoint=POST /orders", "endpoint:POST /orders"]
    {
        let tenant = compiled(&rules, None, &[override_of(name, 7, "minute")]);
        let limits = matched(&rules, Some(&tenant), &orders);
        let found: Vec<_> =
            limits.iter().filter(|(rule, ..)| rule == "orders").map(|(_, limit, _)| limit.as_str()).collect();
        assert_eq!(found, ["gcra 2/1s", "gcra 7/1m"], "{name}: the limit of another period stays");
    }
    for name in ["default", "api_key"] {
        let tenant = compiled(&rules, None, &[override_of(name, 7, "minute")]);
        assert!(
            matched(&rules, Some(&tenant), &[("api_key", "a")])
                .iter()
                .any(|(_, limit, _)| limit == "gcra 7/1m"),
            "{name}"
        );
    }
    // Rules whose counters others share, or that are not there.
    for name in ["endpoint", "api_key=shared-*", "nothing", ""] {
        let (_, unfit) = rules.compile_overrides("api_key", None, &[override_of(name, 7, "minute")]);
        assert_eq!(unfit.len(), 1, "{name}");
        assert_eq!(unfit[0].field, "descriptor");
    }
}

#[test]
fn the_same_period_keeps_the_counter_and_another_has_its_own() {
    let rules = rules();
    let request = [("api_key", "a"), ("endpoint", "PUT /x")];
    let before = matched(&rules, None, &request);
    let tenant = compiled(
        &rules,
        None,
        &[override_of("default", 7, "60s"), override_of("endpoint=PUT *", 5, "minute")],
    );
    let after = matched(&rules, Some(&tenant), &request);
    let mut counters = [&before, &after]
        .map(|limits| limits.iter().map(|(.., counter)| counter.clone()).collect::<Vec<_>>());
    counters.iter_mut().for_each(|counters| counters.sort());
    assert_eq!(counters[0], counters[1]);
    assert_ne!(before, after);
    let tenant = compiled(&rules, None, &[override_of("default", 7, "hour")]);
    let other = matched(&rules, Some(&tenant), &request);
    let hour = other.iter().find(|(_, limit, _)| limit == "gcra 7/1h").expect("the agreed limit");
    assert!(!counters[0].contains(&hour.2), "{}", hour.2);
}

#[test]
fn permits_soft_limits_and_tiers_are_unchanged() {
    let rules = rules();
    let tenant = compiled(
        &rules,
        Some("pro"),
        &[override_of("default", 7, "minute"), override_of("default", 70, "hour")],
    );
    let request = [("api_key", "a"), ("tier", "free")];
    let mut plan = Plan { quotas: std::slice::from_ref(&tenant), ..Plan::default() };
    rules.domain("d").expect("a domain").plan_into(&request, Cost::ONE, &mut plan);
    let limits: Vec<_> = plan.limits.iter().map(|hit| hit.limit.limit.to_string()).collect();
    assert_eq!(
        limits,
        ["gcra 7/1m", "gcra 70/1h", "concurrency 4/1m"],
        "both periods, and the permits of the rule"
    );
    assert_eq!(
        plan.limits.iter().filter(|hit| hit.limit.soft.is_some_and(|soft| soft.threshold == 4)).count(),
        1,
        "half of 7"
    );
    // A tier alone: the rule's limits for it, whatever the request says.
    let tier = compiled(&rules, Some("pro"), &[]);
    assert!(
        matched(&rules, Some(&tier), &request).iter().any(|(_, limit, _)| limit.starts_with("gcra 1000/1m"))
    );
    // A rule that limits nobody can limit one.
    let tenant = compiled(&rules, None, &[override_of("endpoint:GET /health", 1, "minute")]);
    let request = [("api_key", "a"), ("endpoint", "GET /health")];
    assert!(matched(&rules, Some(&tenant), &request).iter().any(|(_, limit, _)| limit == "gcra 1/1m"));
    assert!(!matched(&rules, None, &request).iter().any(|(_, limit, _)| limit == "gcra 1/1m"));
}

#[test]
fn unsupported_options_are_rejected() {
    let rules = rules();
    let limit = Some(OverrideRate { count: 5, period: "minute".to_owned(), burst: Some(3) });
    let burst = Override { limit, ..override_of("endpoint=PUT *", 5, "minute") };
    let wrong = [
        burst,
        override_of("orders", 1 << 50, "minute"),
        override_of("orders", 1, "fortnight"),
        override_of("orders", 1, "1ms in UTC"),
    ];
    let (_, unfit) = rules.compile_overrides("api_key", None, &wrong);
    let fields: Vec<_> = unfit.iter().map(|unfit| (unfit.index, unfit.field)).collect();
    assert_eq!(fields, [(0, "burst"), (1, "requests_per_unit"), (2, "period"), (3, "period")]);
}

/// A customer's 1200 a minute must not admit all of them in one second, nor any number in a month.
#[test]
fn an_override_leaves_the_limits_of_other_periods_in_force() {
    let text = "{domain: d, descriptors: [{key: api_key, limit: [10/s, 100/minute, 1M/month], candidate: 50/minute, \
                tiers: {pro: [20/s, 200/minute]}}]}";
    let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).expect("rules");
    let request = [("api_key", "a")];
    let own = compiled(&rules, None, &[override_of("default", 1200, "minute")]);
    assert_eq!(
        limits_of(&rules, Some(&own), &request),
        ["gcra 10/1s", "gcra 1200/1m", "gcra 1000000/30d", "gcra 50/1m"]
    );
    // The tier may come with the request: its limits stay, not those of callers without a tier.
    let pro = [("api_key", "a"), ("tier", "pro")];
    assert_eq!(limits_of(&rules, Some(&own), &pro), ["gcra 20/1s", "gcra 1200/1m", "gcra 50/1m"]);
    let other = compiled(&rules, None, &[override_of("default", 9, "hour")]);
    assert_eq!(
        limits_of(&rules, Some(&other), &pro),
        ["gcra 20/1s", "gcra 200/1m", "gcra 9/1h", "gcra 50/1m"]
    );
    let all = [
        Override { replaces: Replaces::All, ..override_of("default", 1200, "minute") },
        override_of("default", 30, "second"),
    ];
    for order in [[0, 1], [1, 0]] {
        let own = compiled(&rules, None, &order.map(|at| all[at].clone()));
        let mut limits = limits_of(&rules, Some(&own), &pro);
        limits.sort();
        assert_eq!(limits, ["gcra 1200/1m", "gcra 30/1s", "gcra 50/1m"], "{order:?}");
    }
}

/// What overrides leave in force is a limit of the rule: shown as such, and counted in its metrics.
#[test]
fn only_what_is_overridden_counts_as_override() {
    use tollgate_rules::LimitOrigin;
    let rules = rules();
    let own = compiled(&rules, None, &[override_of("orders", 7, "minute")]);
    let request = [("api_key", "a"), ("endpoint", "POST /orders")];
    let mut plan = Plan { quotas: std::slice::from_ref(&own), ..Plan::default() };
    rules.domain("d").expect("a domain").plan_into(&request, Cost::ONE, &mut plan);
    let overridden = plan.limits.iter().filter(|one| matches!(one.limit, LimitOrigin::Override(_)));
    assert_eq!(overridden.map(|one| one.limit.limit.to_string()).collect::<Vec<_>>(), ["gcra 7/1m"]);
}

#[test]
fn unlimited_is_said_of_rules_tiers_and_callers() {
    let text = "
domain: d
descriptors:
  - {key: api_key, limit: 5/minute, concurrency: 2, tiers: {pro: 50/minute, partner: unlimited}}
  - {key: path, limit: unlimited, tiers: {free: 1/minute}}
  - {key: host, tiers: {free: 1/minute}}
";
    let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).expect("rules");
    let limits =
        |quota: Option<&Arc<CallerOverrides>>, request: &[(&str, &str)]| limits_of(&rules, quota, request);
    assert_eq!(limits(None, &[("api_key", "a"), ("tier", "partner")]), ["concurrency 2/1m"]);
    assert_eq!(limits(None, &[("api_key", "a"), ("tier", "other")]), ["gcra 5/1m", "concurrency 2/1m"]);
    assert_eq!(limits(None, &[("path", "/"), ("tier", "free")]), ["gcra 1/1m"]);
    let kind =
        |request: &[(&str, &str)]| rules.domain("d").expect("a domain").plan(request, Cost::ONE).matches[0].0;
    assert_eq!(kind(&[("path", "/")]), MatchKind::Unlimited);
    assert_eq!(kind(&[("host", "h")]), MatchKind::Exempt, "no limit is stated");
    let own = compiled(&rules, None, &[unlimited("default")]);
    for tier in ["partner", "pro", "none"] {
        assert_eq!(limits(Some(&own), &[("api_key", "a"), ("tier", tier)]), ["concurrency 2/1m"], "{tier}");
    }
    let partner = compiled(&rules, Some("partner"), &[override_of("default", 9, "minute")]);
    assert_eq!(limits(Some(&partner), &[("api_key", "a")]), ["gcra 9/1m", "concurrency 2/1m"]);
    let both = [unlimited("default"), override_of("default", 9, "minute")];
    for order in [[0, 1], [1, 0]] {
        let (_, unfit) = rules.compile_overrides("api_key", None, &order.map(|at| both[at].clone()));
        assert_eq!(unfit.iter().map(|one| (one.index, one.field)).collect::<Vec<_>>(), [(1, "limit")]);
    }
    let billed = "{domain: d, descriptors: [{key: api_key, limit: 5/minute, billing: true}]}";
    let billed = Ruleset::load(&[Source::new("t.yaml", billed)], &Options::default()).expect("rules");
    let (_, unfit) = billed.compile_overrides("api_key", None, &[unlimited("default")]);
    assert!(unfit[0].reason.contains("is billed"), "{unfit:?}");
}
