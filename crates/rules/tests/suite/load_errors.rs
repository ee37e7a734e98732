//! Every mistake in a rule file is refused, with its place and what to write instead. Without this an operator would
//! ship a rule that silently does nothing.

use tollgate_rules::{Options, Profile, Ruleset, Source};

/// Each error as `line:column message | help`.
fn errors_of(text: &str, options: &Options) -> Vec<String> {
    match Ruleset::load(&[Source::new("t.yaml", text)], options) {
        Ok(_) => Vec::new(),
        Err(errors) => errors
            .all()
            .iter()
            .map(|e| format!("{}:{} {} | {}", e.line, e.column, e.message, e.help.as_deref().unwrap_or("")))
            .collect(),
    }
}

/// The table holds descriptors, which start in line 3.
fn check(table: &[(&str, &str)], options: &Options) {
    for (descriptors, expected) in table {
        let text = format!("domain: d\ndescriptors:\n{descriptors}\n");
        let errors = errors_of(&text, options);
        assert!(!errors.is_empty(), "loaded, though it should say: {expected}\n{text}");
        assert!(errors.iter().any(|e| e.contains(expected)), "{text}\nwanted {expected}\ngot {errors:#?}");
        assert_eq!(errors.len(), 1, "one mistake, one error: {text}{errors:#?}");
    }
}

#[test]
fn mistakes_that_the_contract_names() {
    check(
        &[
            ("- {key: \"\", limit: 1/s}", "3:9 empty key"),
            ("- {value: v, limit: 1/s}", "3:3 empty key"),
            (
                "- {key: a, limit: 1/s}\n- {key: a, limit: 2/s}",
                "4:9 duplicate descriptor `a` at one level | the first is on line 3",
            ),
            ("- {key: a, value: b}\n- {key: a, value: b}", "4:9 duplicate descriptor `a=b`"),
            ("- {key: a, value: \"b*\"}\n- {key: a, value: \"b*\"}", "4:9 duplicate descriptor `a=b*`"),
            (
                "- key: a\n  descriptors:\n  - {key: b, limit: 1/s}\n  - {key: b, limit: 1/s}",
                "6:11 duplicate descriptor `b`",
            ),
            (
                "- {key: a, rate_limit: {unit: fortnight, requests_per_unit: 1}}",
                "3:31 unknown unit `fortnight` | write one of: second, minute",
            ),
            (
                "- {key: a, rate_limit: {unit: minuet, requests_per_unit: 1}}",
                "3:31 unknown unit `minuet` | did you mean `minute`?",
            ),
            (
                "- {key: a, rate_limit: {requests_per_unit: 1}}",
                "3:12 `rate_limit` has no unit | write `rate_limit: {unit: minute",
            ),
            ("- {key: a, rate_limit: {unlimited: true, unit: second}}", "3:48 `unlimited` with a unit"),
            (
                "- {key: a, rate_limit: {unit: second, requests_per_unit: 1, replaces: [{name: \"\"}]}}",
                "3:79 empty `replaces` entry",
            ),
            (
                "- {key: a, rate_limit: {unit: second, requests_per_unit: 1, replaces: [{}]}}",
                "3:72 empty `replaces` entry",
            ),
            (
                "- {key: a, rate_limit: {unit: second, requests_per_unit: 1, name: n, replaces: [{name: n}]}}",
                "3:88 the rule `n` cannot replace itself",
            ),
            (
                "- {key: a, value: b, share_threshold: true, limit: 1/s}",
                "3:39 `share_threshold` without a wildcard",
            ),
            ("- {key: a, share_threshold: true, limit: 1/s}", "3:29 `share_threshold` without a wildcard"),
            (
                "- {key: a, rate_limits: {}}",
                "3:12 unknown key `rate_limits` in a descriptor | did you mean `rate_limit`?",
            ),
            (
                "- {key: a, rate_limit: {unit: second, request_per_unit: 1}}",
                "3:39 unknown key `request_per_unit` in `rate_limit` | did you mean `requests_per_unit`?",
            ),
            (
                "- {key: a, rate_limit: {unit: second, replaces: [{name: n, colour: red}]}}",
                "3:60 unknown key `colour` in an entry of `replaces`",
            ),
        ],
        &Options::default(),
    );
}

#[test]
fn wrong_types() {
    check(
        &[
            ("  key: a", "3:3 `descriptors` must be a list, not a mapping | write it as in"),
            (
                "- a",
                "3:3 a descriptor must be a mapping, not `a` | write it as in `{key: user, limit: 100/minute}`",
            ),
            ("- {key: [a]}", "3:9 `key` must be text, not a list"),
            ("- {key: a, value: {b: c}}", "3:19 `value` must be text, not a mapping"),
            ("- {key: a, rate_limit: 5}", "3:24 `rate_limit` must be a mapping, not `5`"),
            (
                "- {key: a, rate_limit: {unit: minute, requests_per_unit: \"5\"}}",
                "3:58 `requests_per_unit` must be a number without quotes, not the text \"5\"",
            ),
            (
                "- {key: a, rate_limit: {unit: minute, requests_per_unit: -1}}",
                "3:58 `requests_per_unit` must be from 0 to 4294967295, not -1",
            ),
            (
                "- {key: a, rate_limit: {unit: minute, requests_per_unit: 4294967296}}",
                "must be from 0 to 4294967295",
            ),
            (
                "- {key: a, rate_limit: {unit: minute, requests_per_unit: 1.5}}",
                "must be a whole number, not `1.5`",
            ),
            (
                "- {key: a, rate_limit: {unlimited: maybe}}",
                "3:36 `unlimited` must be true or false, not `maybe`",
            ),
            ("- {key: a, shadow_mode: \"true\", limit: 1/s}", "`shadow_mode` must be true or false"),
            (
                "- {key: a, rate_limit: {unit: minute, requests_per_unit: 1, replaces: {name: n}}}",
                "`replaces` must be a list",
            ),
            ("- {key: a, metadata: [x]}", "`metadata` must be a mapping"),
            ("- {key: a, metadata: text}", "`metadata` must be a mapping, not `text`"),
        ],
        &Options::default(),
    );
}

#[test]
fn invalid_extensions_are_explained() {
    check(
        &[
            (
                "- {key: a, limit: 1/s, rate_limit: {unit: second, requests_per_unit: 1}}",
                "3:12 a rule has `rate_limit` or `limit`, not both",
            ),
            (
                "- {key: a, limit: 100}",
                "3:19 `100` is not a limit: it has no period | write it as in `limit: 100/minute`",
            ),
            ("- {key: a, limit: 1/eon}", "`eon` is not a period"),
            ("- {key: a, limit: []}", "3:19 `limit` must have from 1 to 16 limits, not 0"),
            ("- {key: a, limit: [[1/s]]}", "3:20 a list inside a list"),
            ("- {key: a, limit: {count: 5}}", "3:19 a limit needs a `period`"),
            ("- {key: a, limit: {period: 5s}}", "3:19 a limit needs a `count`"),
            ("- {key: a, limit: {count: 5, period: 5s, unit: minute}}", "3:42 a limit has one period"),
            ("- {key: a, limit: {count: 5, calendar: week}}", "a calendar period is a `day` or a `month`"),
            (
                "- {key: a, limit: {count: 5, calendar: day, zone: Mars/Base}}",
                "there is no time zone `Mars/Base`",
            ),
            ("- {key: a, limit: {count: 5, period: 5s, zone: UTC}}", "3:48 a zone without a calendar period"),
            (
                "- {key: a, limit: {count: 5, period: 5s, brust: 3}}",
                "3:42 unknown key `brust` in a limit | did you mean `burst`?",
            ),
            ("- {key: a, limit: 1/100us}", "a period of 100us is out of range"),
            (
                "- {key: a, limit: [10/s, 20/second]}",
                "3:26 two limits of one rule with the same algorithm, period and cost",
            ),
            ("- {key: a, limit: 1/s, candidate: [10/s, 20/second]}", "3:42 two limits of one rule"),
            ("- {key: a, tiers: {free: [10/s, 20/second]}}", "3:33 two limits of one rule"),
            ("- {key: a, limit: [1/s, 2/m], burst: 5}", "3:38 `burst` beside several limits"),
            (
                "- {key: a, limit: 1/s, algorithm: fixed_window, burst: 5}",
                "3:56 `burst` has no meaning for any limit of this rule",
            ),
            ("- {key: a, limit: 1/s, slots: 5}", "3:31 `slots` has no meaning for any limit"),
            ("- {key: a, limit: 1/s, jitter: true}", "3:32 `jitter` has no meaning for any limit"),
            ("- {key: a, burst: 5}", "3:19 `burst` has no meaning for any limit"),
            ("- {key: a, limit: {count: 1, unit: day, slots: 5}}", "3:48 `slots` has no meaning for gcra"),
            ("- {key: a, limit: 1/s, algorithm: strict_window, slots: 1000}", "1000 slots are out of range"),
            (
                "- {key: a, limit: 1/s, algorithm: gcar}",
                "3:35 unknown algorithm `gcar` | did you mean `gcra`?",
            ),
            ("- {key: a, limit: 1/s, algorithm: concurrency}", "write `concurrency: 20`"),
            (
                "- {key: a, limit: {count: 9, calendar: day, algorithm: gcra}}",
                "calendar periods need fixed_window, not gcra",
            ),
            (
                "- {key: a, limit: 1/s, action: delay, algorithm: gcra}",
                "only leaky_bucket can delay, not gcra",
            ),
            ("- {key: a, limit: 1/s, action: refuse}", "3:32 unknown action `refuse`"),
            (
                "- {key: a, limit: 1/s, class: vip}",
                "3:31 unknown class `vip` | write one of: comfort, security, cost, strict",
            ),
            ("- {key: a, limit: 1/s, on_error: ajar}", "3:34 unknown policy for `on_error` `ajar`"),
            ("- {key: a, limit: 1/s, mode: rented}", "3:30 unknown mode `rented`"),
            (
                "- {key: a, limit: 1/s, algorithm: sliding_log, mode: leased}",
                "3:54 sliding_log cannot be leased",
            ),
            ("- {key: a, limit: 1/s, fallback: 5}", "3:34 `5` is not a share of a limit"),
            ("- {key: a, limit: 1/s, fallback: 60%}", "3:34 `60%` is not a share of a limit"),
            ("- {key: a, limit: 1/s, split: 1}", "3:31 a counter is split into 2 to 256"),
            ("- {key: a, limit: 1/s, mode: remote}", "unknown mode `remote`"),
            (
                "- {key: a, limit: 1/s, region: global}",
                "3:32 unknown mode of `region` `global` | write one of: shared, split, owner, leased",
            ),
            ("- {key: a, limit: 1/s, region: {owner: eu}}", "3:32 `region` has no `mode`"),
            (
                "- {key: a, limit: 1/s, region: {mode: split, owner: eu}}",
                "3:53 `owner` has no meaning for `mode: split`",
            ),
            (
                "- {key: a, limit: 1/s, region: {mode: owner, weights: {eu: 1}}}",
                "3:55 `weights` has no meaning for `mode: owner`",
            ),
            (
                "- {key: a, limit: 1/s, region: {mode: owner, owner: 'a|b'}}",
                "3:53 `a|b` is no name of a region",
            ),
            ("- {key: a, limit: 1/s, region: {mode: owner, owner: eu, home: h}}", "`home` beside `owner`"),
            (
                "- {key: a, limit: 1/s, region: {mode: split, weights: {eu: 0}}}",
                "`weights` must name up to 64",
            ),
            ("- {key: a, limit: 1/s, mode: local, region: owner}", "`region: owner` with `mode: local`"),
            ("- {key: a, limit: 1/s, soft: 0}", "a soft mark of 0"),
            ("- {key: a, limit: 1/s, soft: 0%}", "from 1% up"),
            ("- {key: a, limit: 1/s, soft: {action: warn}}", "`soft` has no mark"),
            ("- {key: a, soft: 80%}", "3:18 `soft` without a limit"),
            ("- {key: a, concurrency: {ttl: 5s}}", "`concurrency` has no `limit`"),
            ("- {key: a, concurrency: {limit: 5, ttl: soon}}", "`ttl` must be a length of time, not `soon`"),
            ("- {key: a, concurrency: {limit: 5, ttl: 5M}}", "`ttl: 5M` may mean `5 minutes` or `5 months`"),
            ("- {key: a, limit: 10/M}", "`10/M` is not a limit: `M` may mean `minute` or `month`"),
            ("- {key: a, limit: {count: 10, period: M}}", "`period: M` may mean `minute` or `month`"),
            ("- {key: a, limit: 1.2345k/day}", "`1.2345k` is not a count: it is not a whole number"),
            ("- {key: a, limit: 1/s, priority: high}", "`priority` must be a whole number"),
            ("- {key: a, limit: 1/s, cost: -5}", "`cost` must be from 0"),
            ("- {key: a, limit: 1/s, shadow: true, shadow_mode: true}", "two words for one thing"),
            (
                "- {key: a, name: n, rate_limit: {unit: second, requests_per_unit: 1, name: m}}",
                "3:76 the rule has two names",
            ),
            ("- {key: a, unit: second}", "3:12 `unit` belongs inside `rate_limit`"),
            ("- {key: ip/24, value: 10.0.0.0, limit: 1/s}", "3:23 a key with a prefix takes no `value`"),
            ("- {key: ip/200, limit: 1/s}", "3:9 `ip/200` has no such prefix"),
            ("- {key: a, limit: 2000000000000/s}", "can be at most"),
        ],
        &Options::default(),
    );
}

#[test]
fn the_envoy_profile_rejects_what_would_change_its_arithmetic() {
    check(
        &[
            (
                "- {key: a, limit: 1/s, algorithm: gcra}",
                "3:35 `algorithm` would change the arithmetic of `profile: envoy`",
            ),
            ("- {key: a, limit: 1/s, burst: 4}", "3:31 `burst` would change"),
            ("- {key: a, limit: {count: 1, unit: day, jitter: true}}", "3:49 `jitter` would change"),
            ("- {key: a, concurrency: 4}", "3:25 `concurrency` would change"),
            ("- {key: a, limit: 1/s, action: throttle}", "3:32 `action: delay` would change"),
            ("- {key: a, limit: 1/day in UTC}", "3:19 a calendar period would change"),
        ],
        &Options { profile: Some(Profile::Envoy), ..Options::default() },
    );
    let file = "domain: d\nprofile: envoy\nalgorithm: gcra\ndescriptors: []\n";
    let errors = errors_of(file, &Options::default());
    assert!(errors[0].starts_with("3:12 `algorithm` would change"), "{errors:?}");
}

/// Alerts search the logs of envoyproxy/ratelimit for its own words.
#[test]
fn reasons_have_the_words_of_envoyproxy_ratelimit_beside() {
    let limit = "rate_limit: {unit: hour, requests_per_unit: 1, name: x, replaces: ";
    for (descriptor, reason) in [
        (format!("{{key: a, {limit}[{{name: ''}}]}}}}"), "should not have an empty replaces entry"),
        (
            format!("{{key: a, {limit}[{{name: x}}]}}}}"),
            "replaces should not contain name of same descriptor",
        ),
        (
            "{key: a, value: b, share_threshold: true}".to_owned(),
            "share_threshold can only be used with wildcard values (ending with '*'), but found key 'a_b'",
        ),
        ("{key: '', value: b}".to_owned(), "descriptor has empty key"),
    ] {
        let text = format!("domain: d\nprofile: envoy\ndescriptors: [{descriptor}]\n");
        let errors = Ruleset::load(&[Source::new("t.yaml", text.as_str())], &Options::default());
        let errors = errors.expect_err(&text);
        assert_eq!(errors.all()[0].envoy_reason.as_deref(), Some(reason), "{text}");
    }
}

#[test]
fn files_that_are_no_rule_file() {
    let deep = format!("domain: d\ndescriptors: {}", "[".repeat(200));
    let bomb = format!(
        "domain: d\nx: &a [{}]\ny: &b [{}]\nz: &c [{}]\nw: [{}]\n",
        "1,".repeat(50),
        "*a,".repeat(50),
        "*b,".repeat(50),
        "*c,".repeat(50)
    );
    let hoard = format!("domain: {}{}{}", "&a [".repeat(60), "1,".repeat(20_000), "]".repeat(60));
    let nested =
        (0..40).fold("descriptors: []".to_owned(), |inner, _| format!("descriptors: [{{key: a, {inner}}}]"));
    let nested = format!("{{domain: d, {nested}}}");
    for (text, expected) in [
        ("", "1:1 the file is empty"),
        ("# only a comment\n", "1:1 the file is empty"),
        ("descriptors: []\n", "1:1 empty domain"),
        ("domain: \"\"\n", "1:9 empty domain"),
        ("domain: [a]\n", "1:9 `domain` must be text"),
        ("- a\n", "1:1 a rule file must be a mapping, not a list"),
        ("domain: d\ndescriptors: []\nlimits: []\n", "3:1 unknown key `limits` in a rule file"),
        ("domain: d\nprofile: envoi\n", "2:10 unknown profile `envoi` | did you mean `envoy`?"),
        ("domain: d\ndomain: e\n", "2:1 duplicate key `domain` in one mapping"),
        ("domain: d\n---\ndomain: e\n", "a rule file holds one document"),
        ("domain: d\ndescriptors:\n\t- key: a\n", "3:2 not valid YAML: tabs"),
        ("domain: [d\n", "not valid YAML"),
        ("domain: !secret d\n", "the tag"),
        ("? [a]\n: b\n", "a key must be text, not a list"),
        ("domain: d\ndescriptors: *nowhere\n", "not valid YAML"),
        (&deep, "nested too deeply"),
        (&bomb, "the aliases repeat too much"),
        (&hoard, "the anchors hold too much"),
        (&nested, "nested"),
    ] {
        let errors = errors_of(text, &Options::default());
        assert!(
            errors.iter().any(|e| e.contains(expected)),
            "{text:.80}\nwanted {expected}\ngot {errors:#?}"
        );
    }
}

#[test]
fn one_domain_in_two_files_is_rejected_and_both_are_named() {
    let files = [Source::new("one.yaml", "domain: d\n"), Source::new("two.yaml", "\ndomain: d\n")];
    let errors = Ruleset::load(&files, &Options::default()).expect_err("the same domain twice");
    let text = errors.to_string();
    assert!(
        text.contains("duplicate domain `d`")
            && text.contains("two.yaml:2:9")
            && text.contains("`one.yaml` has it"),
        "{text}"
    );
}

#[test]
fn all_errors_are_reported_at_once_up_to_a_maximum() {
    let text = "domain: d\ndescriptors:\n- {key: a, limit: x}\n- {kee: b}\n- {key: c, class: d}\n";
    let errors = errors_of(text, &Options::default());
    assert_eq!(errors.len(), 4, "{errors:#?}"); // `kee` is unknown, and so the key is missing
    let many = format!("domain: d\ndescriptors:\n{}", "- {}\n".repeat(1_000));
    let errors =
        Ruleset::load(&[Source::new("t", many)], &Options::default()).expect_err("a thousand mistakes");
    assert_eq!(errors.all().len(), 100);
    assert!(errors.to_string().ends_with("... and 900 more errors"));
}

#[test]
fn an_error_shows_its_line_and_points_at_the_column() {
    let text = "domain: d\ndescriptors:\n  - key: user\n    rate_limits: {unit: minute}\n";
    let errors =
        Ruleset::load(&[Source::new("rules/api.yaml", text)], &Options::default()).expect_err("unknown key");
    let wanted = "\
error: unknown key `rate_limits` in a descriptor
  --> rules/api.yaml:4:5
  |
4 |     rate_limits: {unit: minute}
  |     ^^^^^^^^^^^
  = help: did you mean `rate_limit`?";
    assert_eq!(errors.to_string(), wanted);
}

#[test]
fn mistakes_in_a_response_are_found_when_rules_are_loaded() {
    check(
        &[
            ("- {key: a, limit: 1/s, response: {status: 200}}", "3:43 "),
            ("- {key: a, limit: 1/s, response: {statuss: 403}}", "did you mean `status`?"),
            (
                "- {key: a, limit: 1/s, response: {body: '{\"r\": \"{{rules}}\"}'}}",
                "3:41 unknown field of `body` `rules` | did you mean `rule`?",
            ),
            (
                "- {key: a, limit: 1/s, response: {body: '{\"r\": {{rule}}}'}}",
                "3:41 `body` is not JSON once its fields are filled in",
            ),
            ("- {key: a, limit: 1/s, response: {body: '{{rule'}}", "3:41 `{{` without `}}`"),
            (
                "- {key: a, limit: 1/s, response: {content_type: text/plain}}",
                "3:49 `content_type` without a `body`",
            ),
            (
                "- {key: a, limit: 1/s, response: {body: '{}', content_type: text/plane}}",
                "3:61 unknown content_type `text/plane` | did you mean `text/plain`?",
            ),
            (
                "- {key: a, limit: 1/s, action: delay, soft: {at: 80%, action: delay}}",
                "3:45 `soft: {action: delay}` has no effect: `action: delay` delays",
            ),
        ],
        &Options::default(),
    );
}
