//! What a rule can say beyond Envoy's file, and what it means.

use tollgate_core::{Algorithm, Cost, Enforcement, KeyPart, Verdict};
use tollgate_core::{Mode, State, Timestamp};
use tollgate_rules::{
    Class, CostFrom, Descriptor, FailPolicy, MatchKind, OnError, Options, Profile, RuleResult, Ruleset,
    SoftAction, SoftLimit, Source, Unit,
};

fn load(text: &str) -> Ruleset {
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

fn rules(descriptors: &str) -> Ruleset {
    load(&format!("domain: d\ndescriptors:\n{descriptors}\n"))
}

/// The limits that a bag meets, as text with their roles.
fn limits(rules: &Ruleset, bag: &[(&str, &str)]) -> Vec<String> {
    let plan = rules.domains().next().unwrap().plan(bag, Cost::ONE);
    plan.limits.iter().map(|hit| format!("{} {:?}", hit.limit.limit, hit.limit.role)).collect()
}

#[test]
fn limits_have_many_forms() {
    for (descriptor, expected) in [
        ("limit: 100/minute", &["gcra 100/1m Live"][..]),
        ("limit: 100 per 30s", &["gcra 100/30s Live"]),
        ("limit: 5/250ms", &["gcra 5/250ms Live"]),
        ("limit: [10/second, 200/minute]", &["gcra 10/1s Live", "gcra 200/1m Live"]),
        ("limit: 1000/day in Europe/Zurich", &["fixed_window 1000/calendar day in Europe/Zurich Live"]),
        ("limit: {count: 9, calendar: month}", &["fixed_window 9/calendar month in UTC Live"]),
        ("limit: {count: 9, period: 30s, burst: 3}", &["gcra 9/30s burst 3 Live"]),
        ("limit: {count: 9, unit: hour, algorithm: sliding_window}", &["sliding_window 9/1h Live"]),
        ("limit: 9/s, burst: 3", &["gcra 9/1s burst 3 Live"]),
        ("limit: 9/s, algorithm: strict_window, slots: 20", &["strict_window 9/1s Live"]),
        (
            "limit: [9/s, 99/day in UTC], algorithm: sliding_log",
            &["sliding_log 9/1s Live", "fixed_window 99/calendar day in UTC Live"],
        ),
        ("rate_limit: {unit: minute, requests_per_unit: 7}", &["gcra 7/1m Live"]),
        (
            "rate_limit: {unit: minute, requests_per_unit: 7, burst: 2, algorithm: token_bucket}",
            &["token_bucket 7/1m burst 2 Live"],
        ),
        ("limit: 9/s, action: delay", &["leaky_bucket 9/1s Live"]),
        ("limit: 9/s, action: throttle, burst: 50", &["leaky_bucket 9/1s burst 50 Live"]),
        ("limit: 9/s, concurrency: 20", &["gcra 9/1s Live", "concurrency 20/1m Live"]),
        ("concurrency: {limit: 20, ttl: 5s}", &["concurrency 20/5s Live"]),
        ("limit: 9/s, shadow: true", &["gcra 9/1s Shadow"]),
        ("limit: 9/s, quota_mode: true", &["gcra 9/1s Quota"]),
        ("limit: 9/s, candidate: 5/s", &["gcra 9/1s Live", "gcra 5/1s Candidate"]),
        (
            "limit: 9/s, candidate: [5/s, 50/m]",
            &["gcra 9/1s Live", "gcra 5/1s Candidate", "gcra 50/1m Candidate"],
        ),
    ] {
        assert_eq!(
            limits(&rules(&format!("- {{key: k, {descriptor}}}")), &[("k", "v")]),
            expected,
            "{descriptor}"
        );
    }
}

#[test]
fn the_file_sets_what_its_rules_leave_open() {
    let set = load(
        "{domain: d, algorithm: sliding_window, jitter: true, class: security, descriptors: [{key: k, limit: [5/s, 9/day in UTC]}, {key: q, algorithm: gcra, class: comfort, limit: 1/s}]}",
    );
    let rule = &set.rules()[0];
    assert_eq!((rule.class, &rule.on_error), (Class::Security, &OnError::Always(FailPolicy::Closed)));
    let jitters: Vec<bool> = rule.limits.limits.iter().map(|limit| limit.limit.is_jittered()).collect();
    assert_eq!(jitters, [true, false], "a calendar day starts at midnight for everybody");
    assert_eq!(set.rules()[1].limits.limits[0].limit.algorithm(), Algorithm::Gcra);
    assert_eq!(set.rules()[1].on_error, OnError::Always(FailPolicy::Local));
}

#[test]
fn delay_lets_the_queue_wait() {
    let set = rules("- {key: k, limit: 2/s, action: delay}");
    let limit = &set.rules()[0].limits.limits[0].limit;
    let (mut state, now) = (State::default(), Timestamp::from_secs(100));
    assert_eq!(limit.step(&mut state, now, Cost::ONE).verdict, Verdict::ALLOWED);
    let second = limit.step(&mut state, now, Cost::ONE).verdict;
    assert!(matches!(second, Verdict::Allowed { delay } if delay.ceil_millis() == 500), "{second:?}");
    assert!(limit.step(&mut state, now, Cost::ONE).verdict.is_denied());
}

#[test]
fn a_tier_picks_its_limits_and_keeps_the_counter() {
    let set = rules(
        "- {key: k, limit: 10/minute, tiers: {pro: [100/minute, 9/s], free: 5/minute}}\n- {key: q, tiers: {pro: 7/s}}",
    );
    assert_eq!(limits(&set, &[("k", "v"), ("tier", "pro")]), ["gcra 100/1m Live", "gcra 9/1s Live"]);
    assert_eq!(limits(&set, &[("k", "v"), ("tier", "free")]), ["gcra 5/1m Live"]);
    assert_eq!(limits(&set, &[("k", "v"), ("tier", "odd")]), ["gcra 10/1m Live"]);
    assert_eq!(limits(&set, &[("k", "v")]), ["gcra 10/1m Live"]);
    assert!(limits(&set, &[("q", "v")]).is_empty());
    let rule = &set.rules()[0];
    assert_eq!(rule.limits_for(Some("pro"))[0].scope, rule.limits_for(None)[0].scope);

    let domain = set.domain("d").unwrap();
    let entries: [&[(&str, &str)]; 4] = [
        &[("k", "v"), ("tier", "pro")],
        &[("k", "v")],
        &[("q", "v")],
        &[("k", "v"), ("tier", "pro"), ("x", "y")],
    ];
    let descriptors = entries.map(|entries| Descriptor { entries, ..Descriptor::default() });
    let plan = domain.plan_descriptors(&descriptors, Cost::ONE);
    let met: Vec<(u16, u64)> =
        plan.limits.iter().map(|hit| (hit.descriptor, hit.limit.limit.rate().count)).collect();
    assert_eq!(met, [(0, 100), (0, 9), (1, 10)]);
    let kinds: Vec<MatchKind> = plan.matches.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [MatchKind::Limited, MatchKind::Limited, MatchKind::Exempt, MatchKind::None]);
    assert_eq!(plan.tier, Some("pro"));
}

#[test]
fn another_attribute_can_select_the_tier() {
    let set = load("{domain: d, tier_key: plan, descriptors: [{key: k, tiers: {pro: 7/s}}]}");
    assert_eq!(limits(&set, &[("k", "v"), ("plan", "pro")]), ["gcra 7/1s Live"]);
}

#[test]
fn the_class_chooses_how_a_rule_fails_and_on_error_wins() {
    let by_tier = |free, otherwise| OnError::ByTier { tiers: [("free".to_owned(), free)].into(), otherwise };
    for (descriptor, expected) in [
        ("class: comfort", OnError::Always(FailPolicy::Local)),
        ("class: security", OnError::Always(FailPolicy::Closed)),
        ("class: strict", OnError::Always(FailPolicy::Closed)),
        ("class: cost", by_tier(FailPolicy::Closed, FailPolicy::Open)),
        ("class: security, on_error: open", OnError::Always(FailPolicy::Open)),
        ("class: strict, on_error: local", OnError::Always(FailPolicy::Local)),
        ("on_error: {free: closed}", by_tier(FailPolicy::Closed, FailPolicy::Local)),
        ("on_error: closed", OnError::Always(FailPolicy::Closed)),
        ("on_error: {free: closed, default: open}", by_tier(FailPolicy::Closed, FailPolicy::Open)),
        ("class: strict, on_error: {free: open}", by_tier(FailPolicy::Open, FailPolicy::Closed)),
    ] {
        let set = rules(&format!("- {{key: k, limit: 1/s, {descriptor}}}"));
        assert_eq!(set.rules()[0].on_error, expected, "{descriptor}");
    }
}

#[test]
fn soft_limits_are_units_or_percentages() {
    for (soft, mark) in [
        ("80", SoftLimit { threshold: 80, action: SoftAction::Warn }),
        ("80%", SoftLimit { threshold: 120, action: SoftAction::Warn }),
        ("\"1%\"", SoftLimit { threshold: 2, action: SoftAction::Warn }),
        ("{at: 50%, action: degrade}", SoftLimit { threshold: 75, action: SoftAction::Degrade }),
        ("{at: 50%, action: delay}", SoftLimit { threshold: 75, action: SoftAction::Delay }),
        ("{at: 50%, action: throttle}", SoftLimit { threshold: 75, action: SoftAction::Delay }),
    ] {
        let set = rules(&format!("- {{key: k, limit: 150/s, soft: {soft}}}"));
        assert_eq!(set.rules()[0].limits.limits[0].soft, Some(mark), "{soft}");
    }
}

#[test]
fn cost_is_the_callers_or_a_number_or_an_attributes() {
    let set = rules(
        "- {key: a, limit: 1/s}\n- {key: b, limit: 1/s, cost: 5}\n- {key: c, limit: 1/s, cost: tokens}\n- {key: e, concurrency: 3}",
    );
    let costs = |bag: &[(&str, &str)], cost| -> Vec<Cost> {
        set.domain("d").unwrap().plan(bag, cost).limits.iter().map(|hit| hit.cost).collect()
    };
    let bag = [("a", ""), ("b", ""), ("c", ""), ("e", ""), ("tokens", "42")];
    assert_eq!(costs(&bag, Cost::new(2)), [Cost::new(2), Cost::new(5), Cost::new(42), Cost::ONE]);
    assert_eq!(costs(&bag, Cost::PEEK), [Cost::PEEK; 4]);
    assert_eq!(
        costs(&bag, Cost::refund(2)),
        [Cost::refund(2), Cost::refund(5), Cost::refund(2), Cost::refund(1)]
    );
    assert_eq!(costs(&[("c", ""), ("tokens", "many")], Cost::new(2)), [Cost::new(2)]);
    assert_eq!(costs(&[("c", "")], Cost::new(2)), [Cost::new(2)]);
    assert_eq!(set.rules()[1].cost, CostFrom::Fixed(5));
}

#[test]
fn networks_count_clients_together_and_all_prefixes_apply_to_a_bag() {
    let set = rules(
        "- {key: remote_address, limit: 10/s}\n- {key: remote_address/24/64, limit: 100/s}\n- {key: remote_address/16, limit: 1000/s}\n- {key: ip/64, limit: 1/s}",
    );
    let domain = set.domain("d").unwrap();
    let bag = [("remote_address", "192.0.2.7")];
    let plan = domain.plan(&bag, Cost::ONE);
    let parts: Vec<String> = plan.parts.iter().map(ToString::to_string).collect();
    assert_eq!(parts, ["192.0.2.7", "192.0.2.0/24", "192.0.0.0/16"]);
    assert!(matches!(plan.parts[1], KeyPart::Network { prefix: 120, .. }));
    let bag = [("remote_address", "2001:db8::1"), ("ip", "not an address")];
    let plan = domain.plan(&bag, Cost::ONE);
    assert_eq!(plan.limits.len(), 2, "the address and its /64");
    // A descriptor meets one: the first network in the file before the key alone.
    let descriptor = [Descriptor { entries: &[("remote_address", "192.0.2.7")], ..Descriptor::default() }];
    let plan = domain.plan_descriptors(&descriptor, Cost::ONE);
    assert_eq!(plan.limits[0].rule.unwrap().name, "remote_address/24/64");
}

#[test]
fn parents_and_children_apply_together_in_the_order_of_the_file() {
    let set = rules(
        "- {key: b, limit: 1/s}\n- {key: a, limit: 2/s, descriptors: [{key: b, value: x, limit: 3/s}, {key: c, limit: 4/s, descriptors: [{key: b, limit: 5/s}]}]}\n- {key: b, value: y, limit: 6/s}",
    );
    let counts = |bag: &[(&str, &str)]| -> Vec<u64> {
        set.domain("d")
            .unwrap()
            .plan(bag, Cost::ONE)
            .limits
            .iter()
            .map(|hit| hit.limit.limit.rate().count)
            .collect()
    };
    assert_eq!(counts(&[("a", "1"), ("b", "x"), ("c", "1")]), [1, 2, 3, 4, 5]);
    assert_eq!(counts(&[("c", "1"), ("b", "y"), ("a", "1")]), [2, 4, 5, 6]);
    assert_eq!(counts(&[("c", "1"), ("b", "z")]), [1]);
}

#[test]
fn only_deciding_attributes_are_required() {
    let set = rules(
        "- {key: k, limit: 1/s, candidate: 2/s}\n- {key: q, quota_mode: true, limit: 1/s}\n- {key: g, action: degrade, limit: 1/s}\n- {key: s, shadow: true, limit: 1/s}",
    );
    let bag = [("k", ""), ("q", ""), ("g", ""), ("s", "")];
    let plan = set.domain("d").unwrap().plan(&bag, Cost::ONE);
    let enforcement: Vec<Enforcement> = plan.limits.iter().map(|hit| hit.enforcement).collect();
    assert_eq!(
        enforcement,
        [
            Enforcement::Required,
            Enforcement::Independent,
            Enforcement::Alternative,
            Enforcement::Independent,
            Enforcement::Independent
        ]
    );
}

#[test]
fn an_inline_limit_uses_the_domains_algorithm() {
    let set = load("{domain: d, algorithm: sliding_window, descriptors: []}");
    let descriptor =
        [Descriptor { entries: &[("k", "v")], hits: None, limit: Some((5, Unit::Minute.length())) }];
    let plan = set.domain("d").unwrap().plan_descriptors(&descriptor, Cost::ONE);
    assert_eq!(plan.limits[0].limit.limit.to_string(), "sliding_window 5/1m");
    assert_eq!(plan.limits[0].enforcement, Enforcement::Required);
}

/// A log keeps every unit, so its count is bounded; the bound on any span is kept by the algorithm that replaces it.
#[test]
fn an_inline_limit_beyond_a_log_is_a_strict_window() {
    let set = load("{domain: d, algorithm: sliding_log, descriptors: []}");
    for (count, expected) in [(100_000, "sliding_log 100000/1m"), (100_001, "strict_window 100001/1m")] {
        let descriptor =
            [Descriptor { entries: &[("k", "v")], hits: None, limit: Some((count, Unit::Minute.length())) }];
        let plan = set.domain("d").unwrap().plan_descriptors(&descriptor, Cost::ONE);
        assert_eq!(plan.limits[0].limit.limit.to_string(), expected);
    }
}

#[test]
fn mode_priority_name_and_location_reach_the_engine() {
    let set = rules("- {key: k, name: n, mode: local, priority: -3, limit: 1/s, class: cost}");
    let rule = &set.rules()[0];
    assert_eq!(
        (rule.name.as_str(), rule.has_explicit_name, rule.mode, rule.priority),
        ("n", true, Mode::Local, -3)
    );
    assert_eq!(rule.location, ("t.yaml".to_owned(), 3));
    assert_eq!(set.rule(0).map(|rule| rule.id), Some(0));
}

/// Where a limit is decided: as the rule says, and else by what follows from class, sharing and the store.
#[test]
fn modes_are_derived_from_the_rule() {
    let text = "domain: d
descriptors:
- {key: user, name: usual, limit: 100/s}
- {key: login, name: exact, class: security, limit: 100/s}
- {key: key, name: leased, mode: leased, limit: 100/s, concurrency: 5}
- {key: ip, name: local, mode: local, limit: 100/s}
- {key: said, name: said, mode: central, limit: 100/s}
- {key: endpoint, name: all, limit: 100/s}
- {key: tenant, value: big, name: one, limit: 100/s}
- {key: slow, name: log, algorithm: sliding_log, limit: 100/s}
";
    let modes = |lease_shared| {
        let options = Options { lease_shared, ..Options::default() };
        let set = Ruleset::load(&[Source::new("t.yaml", text)], &options)
            .unwrap_or_else(|errors| panic!("{errors}"));
        let modes: Vec<_> =
            set.rules().iter().flat_map(tollgate_rules::Rule::all_limits).map(|limit| limit.mode).collect();
        modes
    };
    use Mode::{Adaptive, Central, Leased, Local};
    // The one limit of all callers is shared, and so is that of one value that the file names.
    let far = [Adaptive, Central, Leased, Central, Local, Central, Leased, Leased, Central];
    assert_eq!(modes(true), far);
    let near = [Adaptive, Central, Leased, Central, Local, Central, Adaptive, Adaptive, Central];
    assert_eq!(modes(false), near);
}

/// Without it a part is set aside and handed out besides.
#[test]
fn a_fallback_is_deducted_from_the_limit_and_shared_by_the_nodes() {
    let load = |nodes, limit: &str| {
        let text = format!("{{domain: d, descriptors: [{{key: k, limit: {limit}, fallback: 5%}}]}}");
        let options = Options { nodes, ..Options::default() };
        Ruleset::load(&[Source::new("t.yaml", text)], &options).unwrap_or_else(|errors| panic!("{errors}"))
    };
    let set = load(Some(10), "1000/s");
    let (rule, limit) = (&set.rules()[0], &set.rules()[0].limits.limits[0]);
    assert_eq!((limit.limit.rate().count, limit.limit.capacity(), limit.prepaid), (950, 950, true));
    assert_eq!(limit.node_share.as_ref().map(|share| (share.rate().count, share.capacity())), Some((5, 5)));
    assert_eq!(rule.on_error, OnError::Always(FailPolicy::Local));
    // A share of less than one, or among an unknown number of nodes: closed, and nothing is set aside.
    for set in [load(Some(100), "1000/s"), load(None, "1000/s")] {
        let rule = &set.rules()[0];
        assert_eq!(rule.on_error, OnError::Always(FailPolicy::Closed));
        assert_eq!(rule.limits.limits[0].limit.rate().count, 1_000);
        assert!(!rule.limits.limits[0].prepaid);
    }
    // Nodes that share a store count each other: the part is set aside, and divided when it is needed.
    let text = "{domain: d, descriptors: [{key: k, limit: 1000/s, fallback: 5%}]}";
    let options = Options { lease_shared: true, ..Options::default() };
    let set = Ruleset::load(&[Source::new("t.yaml", text)], &options).expect("rules");
    let (rule, limit) = (&set.rules()[0], &set.rules()[0].limits.limits[0]);
    assert_eq!((limit.limit.rate().count, limit.prepaid, limit.node_share.is_none()), (950, true, true));
    assert_eq!(limit.reserve.as_ref().map(|reserve| reserve.rate().count), Some(50));
    assert_eq!(rule.on_error, OnError::Always(FailPolicy::Local));
}

/// Without it a split counter lets through the whole limit in each part, or one part takes all the traffic.
#[test]
fn a_split_counter_is_parts_of_the_limit_that_take_turns() {
    let set = rules("- {key: k, limit: 100/s, split: 4}");
    let limit = &set.rules()[0].limits.limits[0];
    assert_eq!(limit.limit.rate().count, 100);
    assert!((0..4).all(|shard| limit.for_shard(shard).rate().count == 25));
    let mut parts = std::collections::BTreeMap::new();
    for _ in 0..40 {
        let request = [("k", "v")];
        let domain = set.domains().next().unwrap();
        let plan = domain.plan(&request, Cost::ONE);
        let (from, to) = plan.limits[0].parts;
        let names: Vec<String> =
            plan.parts[usize::from(from)..usize::from(to)].iter().map(ToString::to_string).collect();
        assert_eq!(names[1], "v");
        *parts.entry(names[0].clone()).or_insert(0) += 1;
    }
    assert_eq!(parts.into_values().collect::<Vec<_>>(), [10, 10, 10, 10]);
}

#[test]
fn the_option_forces_a_profile_over_the_file() {
    let source = Source::new("t", "{domain: d, descriptors: [{key: k, limit: 1/s}]}");
    let set = Ruleset::load(
        std::slice::from_ref(&source),
        &Options { profile: Some(Profile::Envoy), ..Options::default() },
    )
    .unwrap();
    assert_eq!(set.rules()[0].limits.limits[0].limit.algorithm(), Algorithm::FixedWindow);
    let native = Ruleset::load(&[source], &Options::default()).unwrap();
    assert_ne!(set.revision(), native.revision());
}

#[test]
fn the_revision_is_of_the_content() {
    let (a, b) = ("{domain: a, descriptors: []}", "{domain: b, descriptors: []}");
    let of = |texts: &[(&str, &str)]| {
        let sources: Vec<Source> = texts.iter().map(|(name, text)| Source::new(*name, *text)).collect();
        Ruleset::load(&sources, &Options::default()).unwrap().revision().to_owned()
    };
    assert_eq!(of(&[("1", a), ("2", b)]), of(&[("x", b), ("y", a)]));
    assert_ne!(of(&[("1", a)]), of(&[("1", b)]));
    assert!(of(&[("1", a)]).len() == 12 && of(&[("1", a)]).bytes().all(|byte| byte.is_ascii_hexdigit()));
}

#[test]
fn counters_survive_a_changed_number_and_not_a_changed_meaning() {
    let scope = |descriptor: &str| {
        rules(&format!("- {{key: k, {descriptor}}}")).rules()[0].limits.limits[0].scope.clone()
    };
    let base = scope("limit: 10/s");
    for same in [
        "limit: 20/s",
        "limit: {count: 10, period: 1s, burst: 50}",
        "limit: 10 per 1000ms",
        "limit: 10/s, name: n, class: strict",
        "value: \"*\", limit: 10/s",
    ] {
        assert_eq!(scope(same), base, "{same}");
    }
    for other in [
        "limit: 10/m",
        "limit: 10/s, algorithm: fixed_window",
        "limit: 10/s, shadow: true",
        "value: v, limit: 10/s",
        "value: \"v*\", share_threshold: true, limit: 10/s",
    ] {
        assert_ne!(scope(other), base, "{other}");
    }
    let strict = |slots: u32| scope(&format!("limit: 10/s, algorithm: strict_window, slots: {slots}"));
    assert_ne!(strict(5), strict(6));
    assert_eq!(scope("concurrency: 5"), scope("concurrency: {limit: 6, ttl: 9s}"));
}

#[test]
fn explain_names_the_clause_that_failed() {
    let set = rules(
        "- {key: a, limit: 1/s, descriptors: [{key: b, value: x, limit: 2/s}]}\n- {key: a, value: vip}\n- {key: c, limit: 3/s}\n- {key: d/24, limit: 4/s}\n- {key: e, limit: 1/s, name: base}\n- {key: e, value: z, rate_limit: {unlimited: true, replaces: [{name: f}]}}\n- {key: f, limit: 1/s, name: f}",
    );
    let domain = set.domain("d").unwrap();
    let text = domain.explain(&[("a", "1"), ("b", "y"), ("d", "home"), ("e", "z"), ("f", "1")]).to_string();
    for line in [
        "domain d: 3 of 8 rules match",
        "a (t.yaml:3): matches, 1 limit",
        "  gcra 1/1s, counter d|a|gcra|1s [1]",
        "  no   b=x: `y` is another value",
        "  no   a=vip: `1` is another value",
        "  no   c: the request has no `c`",
        "  no   d/24: `home` is no address of that family",
        "  no   e: `z` belongs to the more specific or earlier `e=z`",
        "e=z (t.yaml:8): matches, unlimited",
        "f (t.yaml:9): matches, replaced by e=z",
    ] {
        assert!(text.lines().any(|found| found == line), "no line `{line}` in\n{text}");
    }
    let vip = domain.explain(&[("a", "vip")]);
    let matched: Vec<(&str, &RuleResult)> =
        vip.matched().map(|rule| (rule.name.as_str(), &rule.result)).collect();
    assert_eq!(matched, [("a=vip", &RuleResult::Exempt)]);
    assert_eq!(vip.rules[0].result, RuleResult::NoMatch);
}

#[test]
fn a_ruleset_can_be_shared() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Ruleset>();
}

/// A store must recognize what it may not write down, whichever way the request came.
#[test]
fn values_that_may_be_secrets_are_marked() {
    let rules = load(
        "domain: d
descriptors:
  - {key: api_key, limit: 1/s}
  - key: user
    descriptors: [{key: X-Session-Id, value: 'a*', limit: 1/s}]
  - {key: generic_key, limit: 1/s}
",
    );
    let domain = rules.domain("d").unwrap();
    let bag = [("api_key", "k"), ("user", "u"), ("X-Session-Id", "abc"), ("generic_key", "g")];
    let wanted = [KeyPart::Secret("k"), KeyPart::Text("u"), KeyPart::Secret("abc"), KeyPart::Text("g")];
    assert_eq!(domain.plan(&bag, Cost::ONE).parts.as_slice(), wanted);
    let (one, two, three) = (&bag[..1], &bag[1..3], &bag[3..]);
    let by = |limit| [one, two, three].map(|entries| Descriptor { entries, hits: None, limit });
    let matched = by(None);
    assert_eq!(domain.plan_descriptors(&matched, Cost::ONE).parts.as_slice(), wanted);
    let brought = by(Some((5, Unit::Hour.length())));
    assert_eq!(domain.plan_descriptors(&brought, Cost::ONE).parts.as_slice(), wanted);
}

/// A reader of metrics, or of the list of hot keys, must not be able to impersonate a caller.
#[test]
fn a_secret_in_a_rule_is_not_in_its_counter_scopes() {
    let key = "sk_live_4242424242424242";
    let text = |name: &str| {
        format!("domain: d\ndescriptors:\n  - {{key: api_key, value: {key}{name}, limit: 1/s}}\n")
    };
    let unnamed = load(&text(""));
    let warned = unnamed.warnings().iter().map(ToString::to_string).collect::<String>();
    assert!(warned.contains("give it a `name`"), "{warned}");
    let named = load(&text(", name: partner"));
    assert!(named.warnings().is_empty(), "{:?}", named.warnings());
    let label = named.rules()[0].limits.limits[0].scope.label();
    assert!(label.starts_with("d|api_key=sk_liv…") && !label.contains("4242"), "{label}");
}
