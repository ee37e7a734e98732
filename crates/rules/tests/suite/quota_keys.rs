//! Quotas of other attributes than `api_key`: which rules they are about, and which of several wins. Without this the tier
//! of one user would lift a limit that all users of a tenant share.

use std::sync::Arc;
use tollgate_core::Cost;
use tollgate_rules::{CallerOverrides, Options, Override, Plan, Ruleset, Source};

const RULES: &str = "
domain: d
descriptors:
  - key: tenant
    name: tenants
    limit: 100/minute
    tiers: {pro: 1000/minute, big: 9000/minute}
    descriptors:
      - key: user_id
        name: users
        limit: 10/minute
        tiers: {pro: 20/minute, big: 90/minute}
        descriptors:
          - {key: endpoint, value: POST /orders, name: orders, limit: 2/minute, tiers: {pro: 4/minute}}
  - key: api_key
    name: keys
    limit: 50/minute
    tiers: {pro: 60/minute}
  - {key: endpoint, value: POST /orders, name: endpoint, limit: 500/minute, tiers: {pro: 600/minute}}
  - {key: remote_address/24, name: networks, limit: 7/minute}
---
domain: other
descriptors:
  - {key: path, limit: 5/minute}
";

fn rules() -> Ruleset {
    let sources: Vec<Source> = RULES.split("---\n").map(|text| Source::new("t.yaml", text)).collect();
    Ruleset::load(&sources, &Options::default()).unwrap_or_else(|errors| panic!("{errors}"))
}

fn quota(rules: &Ruleset, key: &str, tier: Option<&str>, overrides: &[(&str, u64)]) -> Arc<CallerOverrides> {
    let overrides: Vec<Override> =
        overrides.iter().map(|(descriptor, count)| Override::new(descriptor, *count, "minute")).collect();
    let (quota, unfit) = rules.compile_overrides(key, tier, &overrides);
    assert_eq!(unfit, []);
    Arc::new(quota)
}

/// The limits of a request by rule, in the order of the file.
fn limits(rules: &Ruleset, quotas: &[Arc<CallerOverrides>]) -> Vec<(String, u64)> {
    let request = [
        ("tenant", "acme"),
        ("user_id", "u-1"),
        ("api_key", "k"),
        ("endpoint", "POST /orders"),
        ("remote_address", "10.0.0.1"),
    ];
    let mut plan = Plan { quotas, ..Plan::default() };
    rules.domain("d").expect("a domain").plan_into(&request, Cost::ONE, &mut plan);
    let own = plan.limits.iter().map(|matched| {
        let rule = matched.rule.expect("a rule");
        (rule.name.clone(), matched.limit.limit.rate().count)
    });
    own.collect()
}

fn counts(rules: &Ruleset, quotas: &[Arc<CallerOverrides>]) -> Vec<u64> {
    limits(rules, quotas).into_iter().map(|(_, count)| count).collect()
}

#[test]
fn a_tier_is_for_the_rules_that_count_by_its_attribute() {
    let rules = rules();
    let names: Vec<String> = limits(&rules, &[]).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["tenants", "users", "orders", "keys", "endpoint", "networks"]);
    assert_eq!(counts(&rules, &[]), [100, 10, 2, 50, 500, 7]);
    let user = quota(&rules, "user_id", Some("pro"), &[]);
    assert_eq!(counts(&rules, &[user]), [100, 20, 4, 50, 500, 7], "not the tenant's");
    let tenant = quota(&rules, "tenant", Some("pro"), &[]);
    assert_eq!(counts(&rules, &[tenant]), [1000, 20, 4, 50, 500, 7]);
    let key = quota(&rules, "api_key", Some("pro"), &[]);
    assert_eq!(counts(&rules, &[key]), [1000, 20, 4, 60, 600, 7], "an API key's is for every rule");
}

#[test]
fn the_last_attribute_of_the_path_wins_and_overrides_win_over_tiers() {
    let rules = rules();
    let key = quota(&rules, "api_key", Some("pro"), &[]);
    let tenant = quota(&rules, "tenant", Some("big"), &[("orders", 33)]);
    let user = quota(&rules, "user_id", Some("pro"), &[]);
    for quotas in [[&key, &tenant, &user], [&user, &tenant, &key], [&tenant, &key, &user]] {
        let quotas = quotas.map(Arc::clone);
        assert_eq!(counts(&rules, &quotas), [9000, 20, 33, 60, 600, 7]);
    }
    let own = quota(&rules, "user_id", None, &[("default", 15), ("orders", 44)]);
    assert_eq!(counts(&rules, &[tenant, own]), [9000, 15, 44, 50, 500, 7]);
}

#[test]
fn a_plan_has_the_tier_of_each_rule() {
    let rules = rules();
    let quotas = [quota(&rules, "user_id", Some("pro"), &[])];
    let request = [("tenant", "acme"), ("user_id", "u-1"), ("tier", "big")];
    let mut plan = Plan { quotas: &quotas, ..Plan::default() };
    rules.domain("d").expect("a domain").plan_into(&request, Cost::ONE, &mut plan);
    let tiers: Vec<_> = plan.limits.iter().map(|one| plan.tier_for(one.rule.expect("a rule"))).collect();
    assert_eq!(tiers, [Some("big"), Some("pro")]);
}

#[test]
fn rules_are_named_from_the_point_of_view_of_the_attribute() {
    let rules = rules();
    let named = |key: &str, name: &str| -> Vec<&str> {
        let found = rules.find_per_caller_rules(key, name);
        found.into_iter().map(|id| rules.rule(id).expect("a rule").name.as_str()).collect()
    };
    assert_eq!(named("tenant", "default"), ["tenants"]);
    assert_eq!(named("user_id", "default"), ["users"], "no rule is on it alone");
    assert_eq!(named("user_id", "endpoint:POST /orders"), ["orders"]);
    assert_eq!(named("tenant", "user_id"), ["users"]);
    assert_eq!(named("tenant", "tenant/user_id/endpoint=POST /orders"), ["orders"]);
    assert_eq!(named("remote_address", "default"), [""; 0], "shared by the clients of a network");
    assert_eq!(named("user_id", "tenants"), [""; 0], "shared by the tenant's users");
    assert_eq!(named("nobody", "default"), [""; 0]);
    assert_eq!(rules.quota_key_names(), ["api_key", "path", "tenant", "user_id"]);
    assert!(!rules.is_quota_key("endpoint"), "only a fixed value of it has a rule");
    assert!(rules.counts_by("d", "user_id") && !rules.counts_by("other", "user_id"));
}
