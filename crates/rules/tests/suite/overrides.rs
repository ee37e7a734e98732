//! What is agreed with one caller is compiled against the rules: which rules it may change, and what stays as it was.

use std::sync::Arc;
use tollgate_core::Cost;
use tollgate_rules::{CallerOverrides, Options, Override, Plan, Ruleset, Source};

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
    Override { descriptor: descriptor.to_owned(), count, period: period.to_owned(), burst: None }
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
        assert_eq!(found, ["gcra 7/1m"], "{name}: both of the rule's limits give way");
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
    assert_eq!(limits.len(), 3, "{limits:?}: both periods, and the permits of the rule");
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
    let burst = Override { burst: Some(3), ..override_of("endpoint=PUT *", 5, "minute") };
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
