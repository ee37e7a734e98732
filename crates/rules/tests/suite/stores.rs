//! `store`: which store keeps a rule's counters, and what is refused.

use tollgate_core::Cost;
use tollgate_rules::{Descriptor, Options, Override, Plan, Ruleset, Source, Unit};

fn load(text: &str, stores: Option<&[&str]>) -> Result<Ruleset, Vec<String>> {
    let stores = stores.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    let options = Options { stores, ..Options::default() };
    Ruleset::load(&[Source::new("t.yaml", text)], &options).map_err(|errors| {
        let text = |e: &tollgate_rules::Diagnostic| {
            format!("{}:{} {} | {}", e.line, e.column, e.message, e.help.as_deref().unwrap_or(""))
        };
        errors.all().iter().map(text).collect()
    })
}

/// The store and the label of each limit that a request is charged for.
fn charged(set: &Ruleset, request: &[(&str, &str)]) -> Vec<(Option<String>, String)> {
    let plan = set.domain("d").expect("a domain").plan(request, Cost::ONE);
    let scopes = plan.limits.iter().map(|matched| &matched.limit.scope);
    scopes.map(|scope| (scope.store().map(str::to_owned), scope.label().to_owned())).collect()
}

const FILE: &str = "
domain: d
store: main
descriptors:
  - {key: user, limit: 5/minute}
  - key: tenant
    value: acme
    store: acme
    descriptors:
      - {key: user, limit: [5/minute, 9/hour], tiers: {pro: 50/minute}}
      - {key: path, store: default, limit: 5/minute}
  - {key: node, mode: local, limit: 5/minute}
";

/// Without it a tenant's counters lie with another tenant's, and fail with them.
#[test]
fn a_rule_has_its_own_store_else_its_groups_else_the_files() {
    let set = load(FILE, Some(&["main", "acme"])).expect("valid");
    let stores = |request: &[(&str, &str)]| -> Vec<Option<String>> {
        charged(&set, request).into_iter().map(|(store, _)| store).collect()
    };
    let named = |name: &str| Some(name.to_owned());
    assert_eq!(stores(&[("user", "u")]), [named("main")]);
    assert_eq!(stores(&[("tenant", "acme"), ("user", "u")]), [named("main"), named("acme"), named("acme")]);
    assert_eq!(stores(&[("tenant", "acme"), ("path", "/")]), [None]);
    assert_eq!(stores(&[("node", "n")]), [None], "each node counts for itself");
    let rule = &set.rules()[1];
    assert_eq!(rule.limits_for(Some("pro"))[0].scope, rule.limits_for(None)[0].scope);
    assert!(rule.settings().contains(&("store", "acme".to_owned())), "{:?}", rule.settings());
}

/// Without it a counter that moves to another store is taken for the one in the first: a lease, a remembered denial.
#[test]
fn a_counter_in_another_store_is_another_counter() {
    let label = |store: &str| {
        let text = format!("{{domain: d, descriptors: [{{key: user, limit: 5/minute{store}}}]}}");
        charged(&load(&text, None).expect("valid"), &[("user", "u")]).remove(0).1
    };
    assert_eq!(label(""), "d|user|gcra|1m");
    assert_eq!(label(", store: default"), "d|user|gcra|1m");
    assert_eq!(label(", store: eu"), "%@eu|d|user|gcra|1m");
    // No domain is named so that it reads as a store.
    let text = "{domain: '%@eu|d', descriptors: [{key: user, limit: 5/minute}]}";
    let set = load(text, None).expect("valid");
    assert_eq!(set.rules()[0].limits.limits[0].scope.store(), None);
}

/// Without it a quota moves a caller's counters to the default store.
#[test]
fn overrides_and_inline_limits_stay_in_the_store() {
    let text = "
domain: d
store: main
descriptors:
  - {key: api_key, store: acme, limit: 5/minute}
";
    let set = load(text, Some(&["main", "acme"])).expect("valid");
    let wanted = Override::new("default", 7, "hour");
    let (overrides, errors) = set.compile_overrides("api_key", None, &[wanted]);
    assert_eq!(errors, []);
    let domain = set.domain("d").expect("a domain");
    let quotas = [std::sync::Arc::new(overrides)];
    let mut plan = Plan { quotas: &quotas, ..Plan::default() };
    domain.plan_into(&[("api_key", "k")], Cost::ONE, &mut plan);
    let own = &plan.limits[1].limit;
    assert_eq!(own.limit.rate().count, 7, "beside the limit of the rule");
    assert_eq!(own.scope.store(), Some("acme"));
    let descriptor = Descriptor {
        entries: &[("other", "v")],
        limit: Some((3, Unit::Minute.length())),
        ..Descriptor::default()
    };
    let descriptors = [descriptor];
    assert_eq!(domain.plan_descriptors(&descriptors, Cost::ONE).limits[0].limit.scope.store(), Some("main"));
}

/// Without it an enterprise customer's counters cannot lie apart unless its tenants have rules of their own.
#[test]
fn a_tier_has_its_own_store_else_its_rules() {
    let text = "
domain: d
store: main
descriptors:
  - key: api_key
    limit: 5/minute
    tiers:
      pro: {limit: [50/minute, 900/hour], store: acme}
      small: 9/minute
      old: {limit: {count: 7, period: minute}, store: default}
      free: {count: 3, period: minute}
    candidate: 4/minute
    concurrency: 2
";
    let set = load(text, Some(&["main", "acme"])).expect("valid");
    let stores = |tier: &str| -> Vec<(Option<String>, String)> {
        let mut all = charged(&set, &[("api_key", "k"), ("tier", tier)]);
        all.sort();
        all
    };
    let label = |store: &str, rest: &str| {
        let prefix = if store.is_empty() { String::new() } else { format!("%@{store}|") };
        (
            Some(store).filter(|store| !store.is_empty()).map(str::to_owned),
            format!("{prefix}d|api_key|{rest}"),
        )
    };
    let all = |store: &str, rates: &[&str]| -> Vec<(Option<String>, String)> {
        let more = ["candidate:gcra|1m", "concurrency|held"];
        let mut all: Vec<_> = rates.iter().chain(&more).map(|rest| label(store, rest)).collect();
        all.sort();
        all
    };
    assert_eq!(
        stores("pro"),
        all("acme", &["gcra|1m", "gcra|1h"]),
        "all of the tier's limits are in one store"
    );
    assert_eq!(stores("old"), all("", &["gcra|1m"]));
    for tier in ["small", "free", "unknown"] {
        assert_eq!(stores(tier), all("main", &["gcra|1m"]), "{tier}");
    }
    // The counter is that of a rule in the same store, whichever way it got there.
    let rule = "{domain: d, store: acme, descriptors: [{key: api_key, limit: 5/minute}]}";
    let of_rule = load(rule, None).expect("valid");
    let scope = &of_rule.rules()[0].limits.limits[0].scope;
    assert_eq!(set.rules()[0].limits_for(Some("pro"))[0].scope, *scope);

    // An override stays in the store of the quota's tier.
    let wanted = |period: &str| Override::new("default", 7, period);
    for (tier, period, store) in [
        ("pro", "minute", "acme"),
        ("pro", "day", "acme"),
        ("small", "minute", "main"),
        ("small", "day", "main"),
    ] {
        let (overrides, errors) = set.compile_overrides("api_key", Some(tier), &[wanted(period)]);
        assert_eq!(errors, []);
        let quotas = [std::sync::Arc::new(overrides)];
        let mut plan = Plan { quotas: &quotas, ..Plan::default() };
        set.domain("d").expect("a domain").plan_into(&[("api_key", "k")], Cost::ONE, &mut plan);
        assert!(plan.limits.iter().any(|matched| matched.limit.limit.rate().count == 7));
        let stores = plan.limits.iter().map(|matched| matched.limit.scope.store());
        assert!(
            stores.clone().all(|found| found == Some(store)),
            "{tier} {period}: {:?}",
            stores.collect::<Vec<_>>()
        );
    }
    let rule = &set.rules()[0];
    let shown = ("tiers.store", "pro: acme, old: default".to_owned());
    assert!(rule.settings().contains(&shown), "{:?}", rule.settings());
    for (tiers, wrong) in [
        ("{pro: {limit: 5/minute, store: acne}}", "unknown store `acne`"),
        ("{pro: {store: acme}}", "the tier `pro` has no `limit`"),
        ("{pro: {limit: 5/minute, shop: acme}}", "unknown key `shop` in a tier"),
        ("{pro: {limit: 5/minute, store: 'a|b'}}", "is no name of a store"),
        ("{pro: {limit: 5/minute, store: acme}}, mode: local", "`store` with `mode: local`"),
    ] {
        let text = format!("{{domain: d, descriptors: [{{key: k, tiers: {tiers}}}]}}");
        let errors = load(&text, Some(&["main", "acme"])).expect_err(tiers);
        assert!(errors.len() == 1 && errors[0].contains(wrong), "{tiers}: {errors:?}");
    }
}

/// Rules are read again when a store is added, and may name it then.
#[test]
fn names_that_are_added_are_known_everywhere() {
    let names: tollgate_rules::StoreNames = ["eu".to_owned()].into_iter().collect();
    let options = Options { stores: Some(names.clone()), ..Options::default() };
    let copy = options.clone();
    let text = "{domain: d, descriptors: [{key: k, store: us, limit: 5/minute}]}";
    let load = |options: &Options| Ruleset::load(&[Source::new("t.yaml", text)], options).is_ok();
    assert!(!load(&options) && !load(&copy));
    names.add("us".to_owned());
    assert!(load(&options) && load(&copy) && options == copy);
    assert_eq!(names.list(), ["eu", "us"]);
}

#[test]
fn names_that_are_not_configured_are_refused_with_their_place() {
    let rule = |text: &str| format!("domain: d\ndescriptors:\n- {{key: k, limit: 5/minute, {text}}}\n");
    let cases: [(String, &[&str], &str); 7] = [
        (rule("store: eu"), &[], "3:36 no store is named `eu`: the server has only its default store | name it with `--store-named eu="),
        (rule("store: ue"), &["eu", "us"], "3:36 unknown store `ue` | "),
        (rule("store: asia"), &["eu", "us"], "3:36 unknown store `asia` | write one of: eu, us, default"),
        ("domain: d\nstore: asia\ndescriptors:\n- {key: k, limit: 5/minute}\n".to_owned(), &["eu"], "2:8 unknown store `asia`"),
        (rule("store: 'a|b'"), &["eu"], "3:36 `a|b` is no name of a store | write 1 to 64 letters"),
        (rule("store: eu, mode: local"), &["eu"], "3:36 `store` with `mode: local`: each node counts in its own memory"),
        // Reported once for a group.
        (
            "domain: d\ndescriptors:\n- {key: k, store: asia, descriptors: [{key: a, limit: 5/minute}, {key: b, limit: 5/minute}]}\n".to_owned(),
            &["eu"],
            "3:19 unknown store `asia`",
        ),
    ];
    for (text, stores, expected) in cases {
        let errors = load(&text, Some(stores)).err().unwrap_or_default();
        assert!(
            errors.len() == 1 && errors[0].contains(expected),
            "{text}wanted {expected}\ngot {errors:#?}"
        );
    }
    assert!(load(&rule("store: eu"), None).is_ok(), "a file that is read alone may name any store");
}

/// A false alarm about tenants that have a store each would be about the very use of it.
#[test]
fn a_request_in_several_stores_is_noted() {
    let notes = |descriptors: &str| -> Vec<String> {
        let set = load(&format!("domain: d\ndescriptors:\n{descriptors}"), None).expect("valid");
        set.notes().iter().map(|note| note.message.clone()).filter(|text| text.contains("stores")).collect()
    };
    let apart = "- {key: tenant, value: a, store: a, limit: 5/minute}\n- {key: tenant, value: b, store: b, limit: 5/minute}\n- {key: tenant, limit: 5/minute}\n";
    assert!(notes(apart).is_empty(), "{:?}", notes(apart));
    let nested = "- {key: tenant, value: a, store: a, descriptors: [{key: user, limit: 5/minute}]}\n- {key: tenant, value: b, store: b, descriptors: [{key: path, limit: 5/minute}]}\n";
    assert!(notes(nested).is_empty(), "{:?}", notes(nested));
    let together = "- {key: tenant, store: a, limit: 5/minute}\n- {key: user, limit: 5/minute}\n";
    assert!(
        notes(together)[0].starts_with("a request may match rules of the stores `a` and `default`"),
        "{:?}",
        notes(together)
    );
}
