//! The `overload` section: priorities, the fleet's rule and its reserves, and errors that say where and what to write.

use proptest::prelude::*;
use tollgate_core::{Cost, Priority};
use tollgate_rules::{FLEET_RULE, FleetStanding, Options, Ruleset, Source};

const ISSUE: &str = r#"
domain: api
descriptors:
  - {key: tenant, limit: 100/second}
overload:
  priorities:
    - {when: {endpoint: "POST /v1/charges"}, priority: critical}
    - {when: {mode: test}, priority: sheddable}
    - {when: {method: [POST, PUT]}, priority: important}
  fleet:   {capacity: 5000 in flight, reserve: {critical: 20%}}
  workers: {limit: adaptive, floor: 16, target: 2x}
  fairness: {by: tenant, guarantees: {enterprise: 5% each, pro: 1% each, free: 10% together}}
  adapt:   {signals: {queue_depth: 100, p99_ms: 300}, order: [free, pro, enterprise], least: 20%}
"#;

fn load(text: &str) -> Ruleset {
    Ruleset::load(&[Source::new("api.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

fn errors(text: &str) -> String {
    match Ruleset::load(&[Source::new("api.yaml", text)], &Options::default()) {
        Ok(_) => panic!("loads: {text}"),
        Err(errors) => errors.to_string(),
    }
}

/// A rule that nobody can find in the file would be one too many.
#[test]
fn the_rule_of_tenants_shares_is_not_counted() {
    let rules = load(ISSUE);
    assert_eq!((rules.rule_count(), rules.rules().len()), (3, 4), "per tenant, the fleet, the workers");
    let without = ISSUE.replace(
        "  fairness: {by: tenant, guarantees: {enterprise: 5% each, pro: 1% each, free: 10% together}}\n",
        "",
    );
    assert_eq!((load(&without).rule_count(), load(&without).rules().len()), (3, 3));
}

#[test]
fn the_first_matching_priority_wins() {
    let rules = load(ISSUE);
    let overload = rules.domain("api").and_then(|domain| domain.overload()).expect("a section");
    let priority = |request: &[(&str, &str)]| overload.priority(request);
    assert_eq!(priority(&[("endpoint", "POST /v1/charges"), ("mode", "test")]), Priority::Critical);
    assert_eq!(priority(&[("method", "PUT"), ("mode", "test")]), Priority::Sheddable);
    assert_eq!(priority(&[("method", "PUT")]), Priority::Important);
    assert_eq!(priority(&[("method", "GET")]), Priority::Normal);
    assert_eq!(priority(&[]), Priority::Normal);
}

#[test]
fn wildcards_match_as_in_rules() {
    let rules = load(
        r#"{domain: d, overload: {priorities: [{when: {endpoint: "* /admin/*"}, priority: sheddable}]}}"#,
    );
    let overload = rules.domain("d").and_then(|domain| domain.overload()).expect("a section");
    assert_eq!(overload.priority(&[("endpoint", "GET /admin/jobs")]), Priority::Sheddable);
    assert_eq!(overload.priority(&[("endpoint", "GET /jobs")]), Priority::Normal);
}

#[test]
fn what_is_reserved_is_a_limit_that_only_the_others_are_charged_to() {
    let rules = load(ISSUE);
    let domain = rules.domain("api").expect("the domain");
    let fleet = |request: &[(&str, &str)]| -> Vec<u64> {
        let plan = domain.plan(request, Cost::ONE);
        let own = |matched: &&tollgate_rules::MatchedLimit<'_>| {
            matched.rule.is_some_and(|rule| rule.name == FLEET_RULE)
        };
        plan.limits.iter().filter(own).map(|matched| matched.limit.limit.capacity()).collect()
    };
    assert_eq!(fleet(&[("endpoint", "POST /v1/charges")]), [5000]);
    assert_eq!(fleet(&[("tenant", "acme")]), [5000, 4000]);
    // With a cost of its own a request is still one request in flight.
    let plan = domain.plan(&[("tenant", "acme")], Cost::new(7));
    assert!(plan.limits.iter().all(|matched| {
        matched.cost.units() == if matched.rule.is_some_and(|rule| rule.is_shedding) { 1 } else { 7 }
    }));
}

#[test]
fn reserves_add_up_downwards() {
    let rules = load(
        "{domain: d, overload: {fleet: {capacity: 1000/second, reserve: {critical: 20%, normal: 30%}}}}",
    );
    let rule = rules.rules().iter().find(|rule| rule.name == FLEET_RULE).expect("the fleet's rule");
    let capacities: Vec<u64> = rule.all_limits().map(|limit| limit.limit.rate().count).collect();
    assert_eq!(capacities, [1000, 800, 500]);
    let overload = rules.domain("d").and_then(|domain| domain.overload()).expect("a section");
    assert_eq!(overload.fleet.as_ref().expect("a fleet").charged, [1, 2, 2, 3]);
}

#[test]
fn errors_say_where_and_what_to_write() {
    for (text, wanted) in [
        ("{domain: d, overload: {shed: true}}", "unknown"),
        ("{domain: d, overload: {priorities: [{when: {a: b}, priority: urgent}]}}", "critical"),
        ("{domain: d, overload: {priorities: [{when: {a: b}}]}}", "`when` and `priority`"),
        ("{domain: d, overload: {fleet: {reserve: {critical: 20%}}}}", "no `capacity`"),
        ("{domain: d, overload: {fleet: {capacity: 5000}}}", "5000 in flight"),
        ("{domain: d, overload: {fleet: {capacity: 0 in flight}}}", "5000 in flight"),
        (
            "{domain: d, overload: {fleet: {capacity: 5 in flight, reserve: {critical: 60%, important: 40%}}}}",
            "less than 100%",
        ),
        (
            "{domain: d, overload: {fleet: {capacity: 5 in flight, reserve: {critical: twenty}}}}",
            "0% to 100%",
        ),
        ("{domain: d, overload: {fleet: {capacity: 5/second, ttl: 5s}}}", "`ttl`"),
        (
            "{domain: d, overload: {workers: {}, fairness: {by: t, guarantees: {free: 0.05% each}}}}",
            "steps of 0.1%",
        ),
        ("{domain: d, overload: {fleet: {capacity: 200000 in flight}}}", "at most 100000 requests in flight"),
        ("{domain: d, overload: {workers: {limit: auto}}}", "write `limit: adaptive`"),
        ("{domain: d, overload: {workers: {limit: 0}}}", "from 1 to 100000"),
        ("{domain: d, overload: {workers: {target: 2}}}", "target: 2x"),
        ("{domain: d, overload: {workers: {floor: 0}}}", "from 1 to"),
        ("{domain: d, overload: {fairness: {by: tenant}}}", "add `workers"),
        ("{domain: d, overload: {workers: {}, fairness: {by: t, guarantees: {free: 10%}}}}", "together"),
        ("{domain: d, overload: {adapt: {signals: {q: 0}, order: [free]}}}", "positive number"),
        ("{domain: d, overload: {adapt: {order: [free]}}}", "no `signals`"),
        ("{domain: d, overload: {adapt: {signals: {q: 1}}}}", "no `order`"),
        ("{domain: d, overload: {adapt: {signals: {q: 1}, order: [free], least: 0%}}}", "write 0.1% to 100%"),
        ("{domain: d, overload: {adapt: {signals: {q: 1}, order: [free], step: 500ms}}}", "`step: 500ms`"),
        (
            "{domain: d, overload: {adapt: {signals: {q: {measure: upstream_p99_ms}}, order: [free]}}}",
            "`above`",
        ),
        (
            "{domain: d, overload: {adapt: {signals: {q: {above: 1, measure: p99}}, order: [free]}}}",
            "upstream_p99_ms",
        ),
        (
            "{domain: d, overload: {adapt: {signals: {q: {above: 1, upstream: web}}, order: [free]}}}",
            "add `measure",
        ),
        (
            "{domain: d, overload: {adapt: {signals: {q: {above: 1, measure: upstream_p99_ms, query: up}}, order: [free]}}}",
            "two sources",
        ),
        (
            "{domain: d, overload: {adapt: {signals: {q: {above: 1, query: ' '}}, order: [free]}}}",
            "1 to 4096 bytes",
        ),
        (
            "{domain: d, overload: {adapt: {signals: {q: {above: 0.9, measure: upstream_utilization}}, order: [free]}}}",
            "add `workers",
        ),
        ("{domain: d, profile: envoy, overload: {workers: {}}}", "profile: envoy"),
    ] {
        let found = errors(text);
        assert!(found.contains(wanted) && found.contains("api.yaml:1:"), "{text}: {found}");
    }
}

#[test]
fn signals_have_a_source() {
    let text = "
domain: d
overload:
  workers: {limit: adaptive}
  adapt:
    order: [free]
    signals:
      queue_depth: 100
      pushed: {above: 7}
      slow: {above: 300, measure: upstream_p99_ms}
      busy: {above: 0.9, measure: upstream_utilization, upstream: billing}
      backlog: {above: 2.5, query: 'sum(queue{job=\"a\"})'}
";
    let rules = load(text);
    let adapt =
        rules.domain("d").and_then(|domain| domain.overload()?.active_adapt().cloned()).expect("signals");
    let shown: Vec<String> = adapt.signals.iter().map(ToString::to_string).collect();
    let sources: Vec<&str> = adapt.signals.iter().map(|signal| signal.source.name()).collect();
    assert_eq!(sources, ["pushed", "pushed", "measured", "measured", "query"]);
    assert_eq!(
        shown,
        [
            "queue_depth 100",
            "pushed 7",
            "slow 300 (upstream_p99_ms)",
            "busy 0.9 (upstream_utilization of billing)",
            "backlog 2.5 (query sum(queue{job=\"a\"}))"
        ]
    );
    let (one, other) = ("above: 300, measure: upstream_p99_ms", "above: 300, measure: upstream_in_flight");
    let changes: Vec<String> =
        rules.diff(&load(&text.replace(one, other))).into_iter().map(|change| change.rule).collect();
    assert_eq!(changes, ["d: overload/adapt"]);
}

/// In a section of a screen's length, a mark at its top says nothing.
#[test]
fn mistakes_and_warnings_are_marked_at_their_part() {
    let text = "domain: d\noverload:\n  workers: {limit: 8}\n  adapt:\n    signals: {q: {above: 1, measure: upstream_p99_ms}}\n    order: [free]\n    least: 0%\n    step: 10ms\n";
    let found = errors(text);
    assert!(found.contains("api.yaml:7:12") && found.contains("api.yaml:8:11"), "{found}");
    let sound = text.replace("0%", "20%").replace("10ms", "1s");
    let options = Options { permits: tollgate_rules::PermitRelease::Expire, ..Options::default() };
    let rules = Ruleset::load(&[Source::new("api.yaml", &*sound)], &options).expect("rules");
    let warnings: Vec<String> = rules.warnings().iter().map(ToString::to_string).collect();
    let at = |text: &str, place: &str| warnings.iter().any(|one| one.contains(text) && one.contains(place));
    assert!(at("`workers` has no effect", "api.yaml:3:12"), "{warnings:?}");
    assert!(at("`measure` have no effect", "api.yaml:5:5"), "{warnings:?}");
}

/// The mistake is marked where it is, not at the top of the section.
#[test]
fn an_error_of_a_signal_points_at_it() {
    let text = "domain: d\noverload:\n  adapt:\n    order: [free]\n    signals:\n      busy: {above: 1, measure: upstream_waiting}\n";
    assert!(errors(text).contains("api.yaml:6:"), "{}", errors(text));
}

#[test]
fn measuring_where_nothing_is_forwarded_is_a_warning() {
    let text =
        "{domain: d, overload: {adapt: {signals: {q: {above: 1, measure: upstream_p99_ms}}, order: [free]}}}";
    let options = Options { permits: tollgate_rules::PermitRelease::Expire, ..Options::default() };
    let rules = Ruleset::load(&[Source::new("api.yaml", text)], &options).expect("rules");
    assert!(rules.warnings().iter().any(|warning| warning.to_string().contains("`measure` have no effect")));
    assert!(load(text).warnings().is_empty());
}

#[test]
fn an_entry_that_never_applies_is_a_warning() {
    let text = "{domain: d, overload: {priorities: [{when: {method: '*'}, priority: normal}, {when: {method: GET, a: b}, priority: critical}]}}";
    let warnings = load(text).warnings().iter().map(ToString::to_string).collect::<String>();
    assert!(warnings.contains("never applies"), "{warnings}");
}

#[test]
fn settings_without_effect_are_refused_or_reported() {
    let section = |text: &str| format!("{{domain: d, overload: {{{text}}}}}");
    for (text, expected) in [
        ("workers: {limit: 20, floor: 5}", "`floor` is for the adaptive limit"),
        ("fleet: {capacity: 4 in flight, reserve: {normal: 90%}}", "less than one request"),
        ("fleet: {capacity: 1/second, reserve: {normal: 10%}}", "less than one request"),
    ] {
        assert!(errors(&section(text)).contains(expected), "{text}: {}", errors(&section(text)));
    }
    let adapt = "adapt: {signals: {a: 1}, order: [free]}";
    let critical = "priorities: [{when: {a: b}, priority: critical}]";
    let fleet = "fleet: {capacity: 1000/second, reserve: {critical: 20%}}";
    let fair = "fairness: {by: tenant, guarantees: {free: 5% each}}";
    for (text, expected) in [
        ("shadow: false".to_owned(), Some("nothing is shed")),
        (critical.to_owned(), Some("nothing is shed")),
        (format!("{adapt}, {critical}"), Some("nothing is shed")),
        (format!("{adapt}, shadow: true"), None),
        (adapt.replace("[free]", "[free], least: 100%"), Some("lets signals tighten nothing")),
        (
            "workers: {limit: 1}, priorities: [{when: {}, priority: critical}]".to_owned(),
            Some("`when` is empty"),
        ),
        (format!("workers: {{limit: 1}}, {fair}"), None),
        (
            format!("workers: {{limit: 1}}, {}", fair.replace("5%", "60%")),
            Some("more than the whole capacity"),
        ),
        (format!("workers: {{limit: 1}}, {}", fair.replace("5% each", "60% together")), None),
        (format!("workers: {{limit: 1}}, {fair}, {adapt}"), None),
        (
            format!("workers: {{limit: 1}}, {fair}, {}", adapt.replace("free", "fre")),
            Some("`order` has the tier `fre`"),
        ),
        (format!("workers: {{limit: 1}}, {fair}, fleet: {{capacity: 100/second}}"), None),
        (format!("{fair}, fleet: {{capacity: 100/second}}"), None),
        (
            format!("{fair}, fleet: {{capacity: 10/second}}"),
            Some("`free: 5% each` of the fleet's capacity is less than one request"),
        ),
        (
            format!("{fair}, fleet: {{capacity: 80000 in flight}}"),
            Some("guarantees take back only 20000 of 80000"),
        ),
        (format!("{fair}, fleet: {{capacity: 66666 in flight}}"), None),
        ("workers: {limit: 1}, fairness: ".to_owned(), Some("`fairness` has no value")),
        ("workers: {limit: 1}, fleet: null".to_owned(), Some("`fleet` has no value")),
        (fleet.to_owned(), Some("no request has priority critical")),
        (fleet.replace("critical", "normal"), Some("no request has a priority below normal")),
        (format!("{critical}, {fleet}"), None),
        (format!("{critical}, {}", fleet.replace("critical", "important")), None),
        (adapt.to_owned(), None),
    ] {
        let rules = load(&section(&text));
        let warnings: Vec<String> =
            rules.warnings().iter().chain(rules.notes()).map(ToString::to_string).collect();
        match expected {
            Some(expected) => {
                assert!(warnings.iter().any(|line| line.contains(expected)), "{text}: {warnings:?}");
            }
            None => assert!(warnings.is_empty(), "{text}: {warnings:?}"),
        }
    }
}

#[test]
fn a_diff_shows_the_section_and_shedding_is_no_limit_of_callers() {
    let changed =
        ISSUE.replace("20%}}", "30%}}").replace("floor: 16", "floor: 8").replace("mode: test", "mode: trial");
    let changes: Vec<String> =
        load(ISSUE).diff(&load(&changed)).into_iter().map(|change| change.rule).collect();
    assert_eq!(changes, ["api: overload/fleet", "api: overload/priorities", "api: overload/workers"]);
    let only = "{domain: api, overload: {fleet: {capacity: 10/second}}}";
    assert_eq!(load(ISSUE).loosened(&load(only)).len(), 1, "no limit of callers is left");
}

#[test]
fn an_explanation_has_the_priority_the_guarantee_and_what_is_shed_before() {
    let rules = load(ISSUE);
    let domain = rules.domain("api").expect("the domain");
    let explain = |request: &[(&str, &str)]| domain.explain(request).overload.expect("the section");
    let charge = explain(&[("endpoint", "POST /v1/charges"), ("tenant", "acme"), ("tier", "enterprise")]);
    assert_eq!((charge.priority.name(), charge.entry), ("critical", Some(1)));
    assert_eq!((charge.tenant.as_deref(), charge.guarantee.as_deref()), (Some("acme"), Some("5% each")));
    let earlier: Vec<&str> = charge.shed_earlier().map(tollgate_core::Priority::name).collect();
    assert_eq!(earlier, ["sheddable", "normal", "important"]);
    let test = explain(&[("mode", "test"), ("tier", "pro")]);
    assert_eq!((test.priority.name(), test.guarantee.as_deref()), ("sheddable", None), "no tenant is named");
    assert_eq!(test.shed_earlier().count(), 0);
    assert!(domain.explain(&[("tier", "free")]).to_string().contains("10% together guaranteed"));
    let tightened = explain(&[("tier", "pro")]).tightened.expect("a tier of the order");
    assert_eq!(tightened, "after free, down to 20%, while queue_depth is above 100 or p99_ms is above 300");
    assert_eq!(explain(&[("tier", "other")]).tightened, None);
}

#[test]
fn endpoints_of_priorities_are_named() {
    let rules = load(ISSUE);
    let domain = rules.domain("api").expect("the domain");
    assert_eq!(domain.endpoints().collect::<Vec<_>>(), ["POST /v1/charges"]);
}

#[test]
fn tenants_share_the_fleets_counters_by_other_numbers() {
    let text = "
domain: d
algorithm: fixed_window
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 1000/second, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {pro: 5% each, free: 10% together}}
";
    let rules = load(text);
    let domain = rules.domain("d").expect("the domain");
    assert_eq!(domain.domain_rules().count(), 1, "what tenants share is not listed besides the fleet");
    let numbers = |plan: &tollgate_rules::Plan<'_>| -> Vec<(u64, u64, String)> {
        let one = |matched: &tollgate_rules::MatchedLimit<'_>| {
            let limit = &matched.limit.limit;
            (limit.rate().count, limit.capacity(), matched.limit.scope.label().to_owned())
        };
        plan.limits.iter().map(one).collect()
    };
    let request = [("tenant", "acme"), ("tier", "pro")];
    let mut plan = domain.plan(&request, Cost::ONE);
    assert!(plan.shares_fleet());
    let fair = numbers(&plan);
    assert_eq!(
        fair.iter().map(|(count, burst, _)| (*count, *burst)).collect::<Vec<_>>(),
        [(1000, 1000), (800, 800)]
    );
    assert!(
        fair.iter().all(|(.., label)| label.contains("|gcra|")),
        "a window would forget what is taken back: {fair:?}"
    );
    plan.charge_fleet_as(FleetStanding::Excess);
    let excess = numbers(&plan);
    assert_eq!(
        excess.iter().map(|(count, burst, _)| (*count, *burst)).collect::<Vec<_>>(),
        [(1000, 950), (800, 760)]
    );
    plan.charge_fleet_as(FleetStanding::Guaranteed);
    let guaranteed = numbers(&plan);
    let burst: Vec<_> = guaranteed.iter().map(|(count, burst, _)| (*count, *burst)).collect();
    assert_eq!(burst, [(1000, 1500), (800, 1300), (50, 50)]);
    let labels =
        |all: &[(u64, u64, String)]| all.iter().take(2).map(|(.., label)| label.clone()).collect::<Vec<_>>();
    assert_eq!(labels(&fair), labels(&excess));
    assert_eq!(labels(&fair), labels(&guaranteed));
    plan.charge_fleet_as(FleetStanding::Fair);
    assert_eq!(numbers(&plan), fair);
    // Tenants of a tier with one guarantee have one counter; without a tenant there is none of the kind `each`.
    let key = |request: &[(&str, &str)]| {
        let mut plan = domain.plan(request, Cost::ONE);
        plan.charge_fleet_as(FleetStanding::Guaranteed);
        plan.is_claim_charged().then(|| plan.describe(plan.limits.len() - 1).1)
    };
    let free = |tenant| key(&[("tenant", tenant), ("tier", "free")]);
    assert_eq!(free("a"), free("b"));
    assert_ne!(key(&request), key(&[("tenant", "other"), ("tier", "pro")]));
    assert_eq!(key(&[("tier", "pro")]), None);
    assert_eq!(key(&[("tenant", "acme")]), None);
    assert!(key(&[("tier", "free")]).is_some());
}

/// A request that is charged anywhere is one of the fleet, whichever of its descriptors comes first.
#[test]
fn a_request_is_a_peek_only_if_all_its_descriptors_are() {
    let rules = load("{domain: d, overload: {fleet: {capacity: 5/second}}}");
    let domain = rules.domain("d").expect("the domain");
    let entries = [[("path", "/")], [("tenant", "a")]];
    let cost = |hits: [Option<Cost>; 2]| {
        let descriptors = [0, 1].map(|at| tollgate_rules::Descriptor {
            entries: &entries[at],
            hits: hits[at],
            limit: None,
        });
        domain.plan_descriptors(&descriptors, Cost::ONE).limits[0].cost
    };
    let (peek, refund) = (Some(Cost::PEEK), Some(Cost::refund(1)));
    for (hits, expected) in [
        ([None, None], Cost::ONE),
        ([peek, Some(Cost::new(3))], Cost::ONE),
        ([Some(Cost::new(3)), peek], Cost::ONE),
        ([refund, None], Cost::ONE),
        ([peek, refund], Cost::refund(1)),
        ([refund, peek], Cost::refund(1)),
        ([peek, peek], Cost::PEEK),
    ] {
        assert_eq!(cost(hits), expected, "{hits:?}");
    }
}

/// A mistake in `fleet` is reported once, and not as if there were none.
#[test]
fn a_capacity_with_a_mistake_is_still_one() {
    let found = errors("{domain: d, overload: {fleet: {capacity: 0/second}, fairness: {by: tenant}}}");
    assert!(found.contains("capacity: 0/second") && !found.contains("there is neither"), "{found}");
}

/// Warnings that need the whole domain are marked at the section, also where no rule is.
#[test]
fn a_warning_about_the_section_points_at_it() {
    let text = "domain: d\noverload:\n  fleet: {capacity: 100/second}\n  fairness: {by: tenant, guarantees: {pro: 60% each}}\n";
    let warnings: Vec<String> = load(text).warnings().iter().map(ToString::to_string).collect();
    let found = warnings.iter().find(|line| line.contains("two tenants of tier `pro`"));
    assert!(found.is_some_and(|line| line.contains("api.yaml:3:")), "{warnings:?}");
}

/// What `validate` says is not guaranteed, `explain` does not promise, and otherwise it says how much.
#[test]
fn an_explanation_has_what_a_guarantee_is_of_the_fleet() {
    let explain = |capacity: &str| {
        let rules = load(&format!(
            "{{domain: d, overload: {{fleet: {{capacity: {capacity}}}, fairness: {{by: tenant, guarantees: {{pro: 5% each}}}}}}}}"
        ));
        let domain = rules.domain("d").expect("the domain");
        domain.explain(&[("tenant", "acme"), ("tier", "pro")]).to_string()
    };
    assert!(explain("10/second").contains("tenant acme: nothing guaranteed"), "{}", explain("10/second"));
    let part = "tenant acme: 5% each guaranteed: 250/1s of the fleet's capacity, counted by overload/fleet";
    assert!(explain("5000/second").contains(part), "{}", explain("5000/second"));
    assert!(explain("200 in flight").contains("10 in flight of the fleet's capacity"));
}

proptest! {
    /// Sets of names only say where not to look.
    #[test]
    fn the_first_entry_that_matches_gives_the_priority(
        entries in proptest::collection::vec(
            (proptest::collection::btree_map("(ab|ac|b)", proptest::collection::vec("(GET|GOT|PUT|POST|P\\*T)", 1..3), 0..3), 0..4_usize),
            1..5,
        ),
        request in proptest::collection::vec(("(ab|ac|b)", "(GET|GOT|PUT|POST|P)"), 0..4),
    ) {
        let entry = |(when, priority): &(std::collections::BTreeMap<String, Vec<String>>, usize)| {
            let when: Vec<String> = when.iter().map(|(name, values)| format!("{name:?}: {values:?}")).collect();
            format!("    - {{when: {{{}}}, priority: {}}}\n", when.join(", "), Priority::ALL[*priority].name())
        };
        let lines: String = entries.iter().map(entry).collect();
        let rules = load(&format!("domain: api\noverload:\n  priorities:\n{lines}  workers: {{limit: 8}}\n"));
        let overload = rules.domain("api").and_then(|domain| domain.overload()).expect("a section");
        let request: Vec<(&str, &str)> = request.iter().map(|(name, value)| (&**name, &**value)).collect();
        let find = |name: &str| request.iter().find(|(own, _)| *own == name).map(|(_, value)| *value);
        let matches = |wanted: &str, value: &str| match wanted.split_once('*') {
            Some((start, end)) => {
                value.len() >= start.len() + end.len() && value.starts_with(start) && value.ends_with(end)
            }
            None => wanted == value,
        };
        let expected = entries.iter().find(|(when, _)| {
            when.iter().all(|(name, values)| {
                find(name).is_some_and(|value| values.iter().any(|wanted| matches(wanted, value)))
            })
        });
        let expected = expected.map_or(Priority::default(), |(_, priority)| Priority::ALL[*priority]);
        prop_assert_eq!(overload.priority(&request), expected);
        prop_assert_eq!(overload.priority_of(find), expected);
    }
}
