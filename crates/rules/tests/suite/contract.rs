//! The facts of the Envoy rule file, one by one: a file written for that service loads unchanged and matches the same.

use tollgate_core::{Algorithm, Cost, Enforcement, State, Timestamp};
use tollgate_rules::{Descriptor, MatchKind, Options, Profile, Role, Ruleset, Source, Unit};

type Entries<'a> = &'a [(&'a str, &'a str)];

fn load(descriptors: &str) -> Ruleset {
    let text = format!("domain: d\nprofile: envoy\ndescriptors:\n{descriptors}\n");
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

/// What each descriptor meets: `rule count/unit [values]`, or the kind of match.
fn matched(rules: &Ruleset, descriptors: &[Entries<'_>]) -> Vec<String> {
    let descriptors: Vec<Descriptor<'_>> =
        descriptors.iter().map(|entries| Descriptor { entries, ..Descriptor::default() }).collect();
    let plan = rules.domain("d").expect("its domain").plan_descriptors(&descriptors, Cost::ONE);
    assert_eq!(plan.matches.len(), descriptors.len(), "one match for each descriptor");
    let describe = |(i, (matched, rule)): (usize, &(MatchKind, Option<&tollgate_rules::Rule>))| {
        let hit = plan.limits.iter().find(|hit| usize::from(hit.descriptor) == i);
        let Some(hit) = hit else { return format!("{matched:?}") };
        assert_eq!(*matched, MatchKind::Limited);
        let parts = &plan.parts[usize::from(hit.parts.0)..usize::from(hit.parts.1)];
        let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
        format!("{} {} [{}]", rule.unwrap().name, hit.limit.limit.rate(), parts.join(","))
    };
    plan.matches.iter().enumerate().map(describe).collect()
}

#[test]
fn exact_then_wildcards_in_file_order_then_the_key_alone() {
    let rules = load(
        "- {key: k, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: k, value: \"ab*\", rate_limit: {unit: second, requests_per_unit: 2}}
- {key: k, value: \"a*\", rate_limit: {unit: second, requests_per_unit: 3}}
- {key: k, value: abc, rate_limit: {unit: second, requests_per_unit: 4}}
- {key: k, value: \"*z*z\", rate_limit: {unit: second, requests_per_unit: 5}}
- {key: k, value: \"abz*\", rate_limit: {unit: second, requests_per_unit: 6}}",
    );
    for (value, expected) in [
        ("abc", "k=abc 4/1s []"),
        ("abd", "k=ab* 2/1s [abd]"),
        ("ac", "k=a* 3/1s [ac]"),
        ("a", "k=a* 3/1s [a]"),
        ("zz", "k=*z*z 5/1s [zz]"),
        ("abz", "k=ab* 2/1s [abz]"),
        ("abz*", "k=abz* 6/1s [abz*]"), // exactly as it is written
        ("z", "k 1/1s [z]"),            // the fixed parts may not overlap
        ("", "k 1/1s []"),
        ("ABC", "k 1/1s [ABC]"), // values and keys are case-sensitive
    ] {
        assert_eq!(matched(&rules, &[&[("k", value)]]), [expected], "{value}");
    }
    assert_eq!(matched(&rules, &[&[("K", "abc")]]), ["None"]);
}

#[test]
fn a_limit_applies_only_where_the_walk_ends_and_there_is_no_way_back() {
    let rules = load(
        "- key: a
  rate_limit: {unit: second, requests_per_unit: 1}
  descriptors:
  - {key: b, rate_limit: {unit: second, requests_per_unit: 2}}
- key: a
  value: x
  descriptors:
  - {key: c, rate_limit: {unit: second, requests_per_unit: 3}}",
    );
    for (entries, expected) in [
        (&[("a", "y")][..], "a 1/1s [y]"),
        (&[("a", "y"), ("b", "z")], "a/b 2/1s [y,z]"),
        (&[("a", "y"), ("c", "z")], "None"),
        (&[("a", "y"), ("b", "z"), ("c", "z")], "None"),
        (&[("b", "z"), ("a", "y")], "None"),
        (&[("a", "x"), ("c", "z")], "a=x/c 3/1s [z]"),
        (&[("a", "x")], "None"),             // ends where there is no limit
        (&[("a", "x"), ("b", "z")], "None"), // `a=x` was taken; `a` is not tried again
        (&[], "None"),
    ] {
        assert_eq!(matched(&rules, &[entries]), [expected], "{entries:?}");
    }
}

#[test]
fn exceptions_and_unlimited_are_matched_and_not_counted() {
    let rules = load(
        "- {key: k, rate_limit: {unit: MINUTE, requests_per_unit: 1}}
- {key: k, value: friend}
- {key: k, value: vip, rate_limit: {unlimited: true}}",
    );
    assert_eq!(
        matched(&rules, &[&[("k", "friend")], &[("k", "vip")], &[("k", "x")], &[("q", "x")]]),
        ["Exempt", "Unlimited", "k 1/1m [x]", "None"]
    );
    assert!(rules.domain("other").is_none());
}

#[test]
fn a_shared_threshold_is_one_counter_for_the_pattern() {
    let rules = load(
        "- {key: k, value: \"a*\", share_threshold: true, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: k, value: \"b*\", rate_limit: {unit: second, requests_per_unit: 1}}",
    );
    assert_eq!(matched(&rules, &[&[("k", "a1")], &[("k", "b1")]]), ["k=a* 1/1s []", "k=b* 1/1s [b1]"]);
}

#[test]
fn a_matched_rule_drops_what_it_replaces_whatever_the_order() {
    let rules = load(
        "- {key: a, rate_limit: {unit: second, requests_per_unit: 1, name: base}}
- {key: b, rate_limit: {unit: second, requests_per_unit: 2, name: special, replaces: [{name: base}, {name: other}]}}
- {key: c, rate_limit: {unlimited: true, replaces: [{name: special}]}}
- {key: d, rate_limit: {unit: second, requests_per_unit: 4}}",
    );
    assert_eq!(matched(&rules, &[&[("a", "1")], &[("d", "1")]]), ["base 1/1s [1]", "d 4/1s [1]"]);
    assert_eq!(matched(&rules, &[&[("a", "1")], &[("b", "1")]]), ["None", "special 2/1s [1]"]);
    assert_eq!(matched(&rules, &[&[("b", "1")], &[("a", "1")]]), ["special 2/1s [1]", "None"]);
    assert_eq!(
        matched(&rules, &[&[("b", "1")], &[("c", "1")], &[("d", "1")]]),
        ["None", "Unlimited", "d 4/1s [1]"]
    );
    // The same in a bag.
    let bag = [("a", "1"), ("b", "1"), ("d", "1")];
    let plan = rules.domain("d").unwrap().plan(&bag, Cost::ONE);
    let names: Vec<&str> = plan.limits.iter().map(|hit| hit.rule.unwrap().name.as_str()).collect();
    assert_eq!(names, ["special", "d"]);
    let bag = [("b", "1"), ("c", "1")];
    let plan = rules.domain("d").unwrap().plan(&bag, Cost::ONE);
    assert!(plan.limits.is_empty());
    assert_eq!(plan.matches[0].0, MatchKind::Unlimited);
}

#[test]
fn every_limit_is_a_window_from_the_epoch_that_counts_denied_hits_too() {
    for (unit, seconds) in [
        ("second", 1),
        ("Minute", 60),
        ("HOUR", 3_600),
        ("day", 86_400),
        ("week", 604_800),
        ("month", 2_592_000),
        ("year", 31_536_000),
    ] {
        let rules = load(&format!("- {{key: k, rate_limit: {{unit: {unit}, requests_per_unit: 2}}}}"));
        let limit = &rules.rules()[0].limits.limits[0];
        assert_eq!(limit.limit.algorithm(), Algorithm::FixedWindow, "{unit}");
        assert_eq!(limit.unit, Unit::from_name(unit));
        // At the last second of a window: the Nth of N passes with 0 left, the next does not, and is counted.
        let (mut state, now) = (State::default(), Timestamp::from_secs(seconds * 7 - 1));
        let take = |state: &mut State, now| limit.limit.step(state, now, Cost::ONE);
        assert_eq!(take(&mut state, now).remaining, 1);
        let last = take(&mut state, now);
        assert!(last.verdict.is_allowed() && last.remaining == 0 && last.reset_after.ceil_secs() == 1);
        assert!(take(&mut state, now).verdict.is_denied());
        limit.limit.step(&mut state, now, Cost::refund(1));
        assert!(take(&mut state, now).verdict.is_denied(), "the denied hit was counted");
        assert_eq!(take(&mut state, Timestamp::from_secs(seconds * 7)).remaining, 1, "a new window");
    }
}

/// With `stop_when_over`, what denies the request keeps the others from being charged; what cannot deny it does not.
#[test]
fn enforced_limits_are_charged_together_if_asked_for() {
    let text = "domain: d\nprofile: envoy\ndescriptors:
- {key: a, shadow_mode: true, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: b, quota_mode: true, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: c, rate_limit: {unit: second, requests_per_unit: 1}}
";
    let options = Options { stop_when_over: true, ..Options::default() };
    let rules = Ruleset::load(&[Source::new("t.yaml", text)], &options).unwrap();
    let entries: [Entries<'_>; 3] = [&[("a", "1")], &[("b", "1")], &[("c", "1")]];
    let descriptors = entries.map(|entries| Descriptor { entries, ..Descriptor::default() });
    let plan = rules.domain("d").unwrap().plan_descriptors(&descriptors, Cost::ONE);
    let all: Vec<Enforcement> = plan.limits.iter().map(|hit| hit.enforcement).collect();
    assert_eq!(all, [Enforcement::Independent, Enforcement::Independent, Enforcement::Required]);
}

#[test]
fn shadow_and_quota_are_roles_and_every_descriptor_stands_alone() {
    let rules = load(
        "- {key: a, shadow_mode: true, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: b, quota_mode: true, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: c, rate_limit: {unit: second, requests_per_unit: 0}}",
    );
    let entries: [Entries<'_>; 3] = [&[("a", "1")], &[("b", "1")], &[("c", "1")]];
    let descriptors = entries.map(|entries| Descriptor { entries, ..Descriptor::default() });
    let plan = rules.domain("d").unwrap().plan_descriptors(&descriptors, Cost::ONE);
    let roles: Vec<(Role, Enforcement)> =
        plan.limits.iter().map(|hit| (hit.limit.role, hit.enforcement)).collect();
    assert_eq!(roles, [Role::Shadow, Role::Quota, Role::Live].map(|role| (role, Enforcement::Independent)));
    // Zero requests a unit blocks.
    assert!(
        plan.limits[2]
            .limit
            .limit
            .step(&mut State::default(), Timestamp::from_secs(1), Cost::ONE)
            .verdict
            .is_denied()
    );
}

#[test]
fn hits_come_from_the_descriptor_else_from_the_request_where_zero_is_one() {
    let rules = load("- {key: k, rate_limit: {unit: second, requests_per_unit: 1}}");
    for (own, request, cost) in [
        (None, Cost::PEEK, Cost::ONE),
        (None, Cost::new(3), Cost::new(3)),
        (Some(Cost::PEEK), Cost::new(3), Cost::PEEK),
        (Some(Cost::new(5)), Cost::new(3), Cost::new(5)),
        (Some(Cost::refund(2)), Cost::ONE, Cost::refund(2)),
    ] {
        let descriptor = [Descriptor { entries: &[("k", "v")], hits: own, limit: None }];
        let plan = rules.domain("d").unwrap().plan_descriptors(&descriptor, request);
        assert_eq!(plan.limits[0].cost, cost, "{own:?} {request:?}");
    }
}

#[test]
fn the_same_descriptor_twice_counts_twice() {
    let rules = load("- {key: k, rate_limit: {unit: second, requests_per_unit: 1}}");
    assert_eq!(matched(&rules, &[&[("k", "v")], &[("k", "v")]]), ["k 1/1s [v]", "k 1/1s [v]"]);
}

#[test]
fn a_descriptors_own_limit_replaces_the_rules_settings() {
    let rules = load(
        "- {key: k, shadow_mode: true, rate_limit: {unit: second, requests_per_unit: 1, name: n}}
- {key: q, rate_limit: {unit: second, requests_per_unit: 1, replaces: [{name: n}]}}",
    );
    let own = |entries| Descriptor { entries, hits: None, limit: Some((7, Unit::Hour.length())) };
    let descriptors = [
        own(&[("k", "v")]),
        own(&[("unknown", "v")]),
        Descriptor { entries: &[("q", "v")], ..Descriptor::default() },
    ];
    let plan = rules.domain("d").unwrap().plan_descriptors(&descriptors, Cost::ONE);
    assert_eq!(plan.limits.len(), 3);
    for hit in &plan.limits[..2] {
        assert!(hit.rule.is_none());
        assert_eq!((hit.limit.role, hit.limit.unit), (Role::Live, Some(Unit::Hour)));
        assert_eq!(hit.limit.limit.to_string(), "fixed_window 7/1h");
    }
    assert_ne!(plan.limits[0].limit.scope, plan.limits[1].limit.scope);
    assert_ne!(plan.limits[0].limit.scope, rules.rules()[0].limits.limits[0].scope);
    assert!(matches!(plan.matches[0], (MatchKind::Limited, None)));
}

/// That service's counter is named by the entries and the window alone: a request with an override of the same unit
/// spends from what the configured rule counts, and the other way round.
#[test]
fn an_override_of_the_same_unit_shares_the_rules_counter() {
    let rules = load(
        "- {key: k, rate_limit: {unit: minute, requests_per_unit: 5}, descriptors: [{key: m, value: x, shadow_mode: true, \
         rate_limit: {unit: minute, requests_per_unit: 1}}]}
- {key: w, value: \"a*\", rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: s, value: \"a*\", share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: e, value: z}",
    );
    let counter = |entries: &[(&str, &str)], limit| {
        let descriptors = [Descriptor { entries, hits: None, limit }];
        let plan = rules.domain("d").unwrap().plan_descriptors(&descriptors, Cost::ONE);
        plan.limits.first().map(|matched| {
            let values: Vec<String> =
                plan.charge(matched, Default::default()).key.parts.iter().map(ToString::to_string).collect();
            format!("{} {values:?}", matched.limit.scope.label())
        })
    };
    for (entries, unit, shares) in [
        (&[("k", "v")][..], Unit::Minute, true),
        (&[("k", "v"), ("m", "x")], Unit::Minute, true),
        (&[("w", "ab")], Unit::Hour, true),
        // Another unit is another window; a pattern with one counter has no counter per value.
        (&[("k", "v")], Unit::Hour, false),
        (&[("w", "ab")], Unit::Day, false),
        (&[("s", "ab")], Unit::Hour, false),
    ] {
        let (own, configured) = (counter(entries, Some((9, unit.length()))), counter(entries, None));
        assert!(own.is_some() && configured.is_some(), "{entries:?}");
        assert_eq!(own == configured, shares, "{entries:?}: {own:?}, {configured:?}");
    }
    assert!(counter(&[("e", "z")], Some((9, Unit::Hour.length()))).is_some(), "no rule need have a limit");
    assert_ne!(
        counter(&[("k", "v")], Some((9, Unit::Minute.length()))),
        counter(&[("k", "u")], Some((9, Unit::Minute.length())))
    );
}

/// The usual rollout is shadow mode first: what was counted there must count when the rule is enforced, as in that service.
#[test]
fn a_rule_that_leaves_shadow_mode_keeps_its_counter() {
    let scopes = |profile: &str, mode: &str| {
        let text = format!(
            "domain: d\nprofile: {profile}\ndescriptors:\n- {{key: k, {mode}rate_limit: {{unit: hour, requests_per_unit: 1}}}}\n"
        );
        let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).unwrap();
        rules.rules()[0].limits.limits.iter().map(|limit| limit.scope.label().to_owned()).collect::<Vec<_>>()
    };
    let enforced = scopes("envoy", "");
    assert_eq!(scopes("envoy", "shadow_mode: true, "), enforced);
    assert_eq!(scopes("envoy", "quota_mode: true, "), enforced);
    assert_ne!(scopes("envoy", "candidate: 5/hour, ")[1], enforced[0], "counted beside it");
    assert_ne!(scopes("native", "shadow: true, "), scopes("native", ""), "it counts what others deny");
}

#[test]
fn keys_and_values_never_run_into_each_other() {
    let rules = load(
        "- {key: a, value: b_c, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: a_b, value: c, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: a, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: a_b, rate_limit: {unit: second, requests_per_unit: 1}}",
    );
    let mut labels: Vec<&str> =
        rules.rules().iter().map(|rule| rule.limits.limits[0].scope.label()).collect();
    labels.sort_unstable();
    labels.dedup();
    assert_eq!(labels.len(), 4);
}

#[test]
fn files_of_envoys_service_load_unchanged() {
    let rules = load(
        "- key: k
  value: 404            # a number is text here
  rate_limit: &base     # anchors, merges, nulls, YAML 1.1 booleans
    unit: Day
    requests_per_unit: 1_000
  detailed_metric: yes
  value_to_metric: true
  metadata: {team: payments, tier: 3}
  descriptors:
- key: k
  value:
  rate_limit:
    <<: *base
    unit: hour
- key: remote_address/24
  rate_limit: *base",
    );
    assert_eq!(
        matched(
            &rules,
            &[
                &[("k", "404")],
                &[("k", "1")],
                &[("remote_address/24", "x")],
                &[("remote_address", "10.0.0.1")]
            ]
        ),
        ["k=404 1000/1d []", "k 1000/1h [1]", "remote_address/24 1000/1d [x]", "None"]
    );
    let rule = &rules.rules()[0];
    assert!(rule.detailed_metric && rule.value_to_metric);
    assert_eq!(rule.metadata.to_string(), r#"{"team": "payments", "tier": 3}"#);
    assert_eq!(rules.domain("d").map(tollgate_rules::Domain::profile), Some(Profile::Envoy));
}

/// That service accepts each of its keys at every level, and ignores it where it means nothing. Such a file must not be
/// refused: it would leave everything unlimited.
#[test]
fn keys_where_they_mean_nothing_are_warnings_in_files_of_that_service() {
    let text = "name: listener\ndomain: d\nunit: second\ndescriptors:\n  - key: a\n    requests_per_unit: 3\n    rate_limit: \
                {unit: second, requests_per_unit: 1, shadow_mode: true}\n";
    let load = |text: &str, options: &Options| Ruleset::load(&[Source::new("t.yaml", text)], options);
    let warned = [
        "`name` has no effect in a rule file",
        "`unit` has no",
        "`requests_per_unit` has",
        "`shadow_mode` has",
    ];
    for (text, options) in [
        (format!("{text}profile: envoy\n"), Options::default()),
        (text.to_owned(), Options { profile: Some(Profile::Envoy), ..Options::default() }),
        (
            text.to_owned(),
            Options { profile: Some(Profile::Native), ratelimit_files: true, ..Options::default() },
        ),
    ] {
        let rules = load(&text, &options).unwrap_or_else(|errors| panic!("{errors}"));
        let found: Vec<String> = rules.warnings().iter().map(ToString::to_string).collect();
        for part in warned {
            assert!(found.iter().any(|warning| warning.contains(part)), "{part}: {found:#?}");
        }
        assert_eq!(matched(&rules, &[&[("a", "x")]]), ["a 1/1s [x]"]);
    }
    assert!(load(text, &Options::default()).is_err(), "another file");
    assert!(
        load(&format!("{text}colour: red\nprofile: envoy\n"), &Options::default()).is_err(),
        "not its keys"
    );
}

/// Envoy Gateway names the keys of shared rules `namespace/policy/rule/0`: refused as a network, one of them would take all limits
/// with it, and read as one, its rule would match nothing.
#[test]
fn a_key_of_that_service_is_a_name_whatever_it_ends_in() {
    let text = "domain: d\ndescriptors:\n  - {key: ns/p/rule/0, value: ns/p/rule/0, rate_limit: {unit: hour, requests_per_unit: 2}}\n  \
                - {key: tenant/24, rate_limit: {unit: hour, requests_per_unit: 3}}\n  \
                - {key: a/999, rate_limit: {unit: hour, requests_per_unit: 4}}\n";
    let native = Some(Profile::Native);
    for (text, options) in [
        (text.to_owned(), Options { profile: native, ratelimit_files: true, ..Options::default() }),
        (format!("{text}profile: envoy\n"), Options { profile: native, ..Options::default() }),
        (format!("{text}profile: envoy\n"), Options::default()),
    ] {
        let rules = Ruleset::load(&[Source::new("t.yaml", text)], &options);
        let rules = rules.unwrap_or_else(|errors| panic!("{errors}"));
        let requests: [Entries<'_>; 3] =
            [&[("ns/p/rule/0", "ns/p/rule/0")], &[("tenant/24", "a")], &[("a/999", "b")]];
        assert_eq!(
            matched(&rules, &requests),
            ["ns/p/rule/0=ns/p/rule/0 2/1h []", "tenant/24 3/1h [a]", "a/999 4/1h [b]"]
        );
    }
}

/// What that service's reader of YAML takes must not be refused there either, and means the same.
#[test]
fn files_that_go_reads_are_read_the_same_in_files_of_that_service() {
    let first = "domain: d\ndescriptors:\n  - key: a\n    value: x\n    value: y\n    rate_limit: {unit: second, \
                 requests_per_unit: 010}\n  - key: b\n    rate_limit: {unlimited: true, unit: fortnight}\n";
    let text = format!("{first}---\ndomain: e\n");
    let load = |options: &Options| Ruleset::load(&[Source::new("t.yaml", text.as_str())], options);
    let rules = load(&Options { ratelimit_files: true, profile: Some(Profile::Envoy), ..Options::default() });
    let rules = rules.unwrap_or_else(|errors| panic!("{errors}"));
    let found: Vec<String> = rules.warnings().iter().map(ToString::to_string).collect();
    for part in ["one document", "duplicate key `value`", "unknown unit `fortnight`"] {
        assert!(found.iter().any(|warning| warning.contains(part)), "{part}: {found:#?}");
    }
    let [x, y, b]: [Entries<'_>; 3] = [&[("a", "x")], &[("a", "y")], &[("b", "1")]];
    assert_eq!(matched(&rules, &[x, y, b]), ["None", "a=y 8/1s []", "Unlimited"]);
    assert!(rules.domain("e").is_none());
    let errors = load(&Options::default()).expect_err("another file").to_string();
    assert!(errors.contains("duplicate key `value`"), "{errors}");
    let with = |unit: &str| {
        format!("domain: d\ndescriptors: [{{key: b, rate_limit: {{unlimited: true, unit: {unit}}}}}]\n")
    };
    let options = Options { ratelimit_files: true, ..Options::default() };
    Ruleset::load(&[Source::new("t.yaml", with("hour"))], &options).expect_err("that service refuses it too");
}
