//! Each warning where it is right, and silence where it would be wrong.

use crate::{Options, Ruleset, Source};

fn warnings(descriptors: &str) -> Vec<String> {
    let source = Source::new("t.yaml", format!("domain: d\ndescriptors:\n{descriptors}"));
    let rules = Ruleset::load(&[source], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"));
    rules
        .warnings()
        .iter()
        .map(|warning| format!("{}:{} {}", warning.line, warning.column, warning.message))
        .collect()
}

#[test]
fn lints_name_the_rule_and_its_location() {
    for (descriptors, expected) in [
        // can never match
        (
            "- {key: a, value: \"x*\", limit: 1/s}\n- {key: a, value: \"xy*\", limit: 1/s}",
            "4:3 `a=xy*` can never match: the earlier `a=x*` takes all its values",
        ),
        (
            "- {key: a, value: \"*\", limit: 1/s}\n- {key: a, limit: 1/s}",
            "4:3 `a` alone can never match: `a=*` takes every value",
        ),
        // does nothing
        ("- {key: a}", "3:3 `a` has no limit and nothing below it"),
        (
            "- {key: a, rate_limit: {unit: minute}}",
            "3:12 `rate_limit` has no `requests_per_unit`: it is 0, which turns everything away",
        ),
        (
            "- {key: a, limit: 1/s, replaces: [{name: nobody}]}",
            "3:3 no rule of this domain has the name `nobody`: nothing is replaced",
        ),
        // never bites
        (
            "- {key: a, limit: [10/second, 1000/minute]}",
            "3:31 `1000/1m` never bites: `10/1s` beside it is always reached first",
        ),
        (
            "- {key: a, algorithm: fixed_window, limit: [10/second, 600/minute]}",
            "3:56 `600/1m` never bites: `10/1s` beside it is always reached first",
        ),
        (
            "- {key: a, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
            "3:60 `20/1m` never bites for attributes: `10/1m` of `a` above it is always reached first",
        ),
        (
            "- {key: a, limit: 10/s, soft: 10}",
            "3:31 this soft mark is not below the limit: it never acts first",
        ),
        (
            "- {key: a, limit: 10/s, soft: 100%}",
            "3:31 this soft mark is not below the limit: it never acts first",
        ),
    ] {
        assert_eq!(warnings(descriptors), [expected], "{descriptors}");
    }
}

#[test]
fn effective_rules_have_no_lints() {
    for descriptors in [
        // an exact value beats an earlier wildcard; a narrower wildcard before a wider one is reached
        "- {key: a, value: \"x*\", limit: 1/s}\n- {key: a, value: xy, limit: 1/s}",
        "- {key: a, value: \"xy*\", limit: 1/s}\n- {key: a, value: \"x*\", limit: 1/s}",
        "- {key: a, value: \"x*z\", limit: 1/s}\n- {key: a, value: \"x*\", limit: 1/s}\n- {key: a, limit: 1/s}",
        "- {key: a, value: \"*b*\", limit: 1/s}\n- {key: a, value: \"*ab*\", limit: 1/s}",
        // an exception
        "- {key: a, value: x}\n- {key: a, limit: 1/s}",
        // each window is reached by somebody
        "- {key: a, limit: [10/second, 200/minute, 5000/day]}",
        "- {key: a, algorithm: fixed_window, limit: [10/second, 599/minute]}",
        "- {key: a, limit: [{count: 10, period: second, burst: 700}, 601/minute]}",
        // where denied requests are counted all the same, the looser window is reached
        "- {key: a, shadow: true, limit: [10/second, 1000/minute]}",
        "- {key: a, quota_mode: true, limit: [10/second, 1000/minute]}",
        "- {key: a, action: degrade, limit: [10/second, 1000/minute]}",
        "- {key: a, limit: 10/minute, descriptors: [{key: b, shadow: true, limit: 20/minute}]}",
        // a parent that never denies, or counts other units, or is looser
        "- {key: a, shadow: true, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, action: degrade, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, cost: tokens, limit: 10/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, limit: 100/minute, descriptors: [{key: b, limit: 20/minute}]}",
        "- {key: a, limit: 10/s, soft: 80%}",
        "- {key: a, limit: 1/s, replaces: [{name: n}]}\n- {key: b, limit: 1/s, name: n}",
    ] {
        assert_eq!(warnings(descriptors), Vec::<String>::new(), "{descriptors}");
    }
}
