//! Resources as Envoy Gateway sends them, and as a hostile server might.

use super::*;
use crate::xds::proto::ratelimit::config::ratelimit::v3::RateLimitReplace;
use tollgate_rules::{Diagnostics, Options, Profile, Ruleset};

fn limited(key: &str, value: &str, unit: RateLimitUnit, count: u32) -> RateLimitDescriptor {
    RateLimitDescriptor {
        key: key.to_owned(),
        value: value.to_owned(),
        rate_limit: Some(RateLimitPolicy {
            unit: unit.into(),
            requests_per_unit: count,
            ..RateLimitPolicy::default()
        }),
        ..RateLimitDescriptor::default()
    }
}

fn config(domain: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
    RateLimitConfig { name: domain.to_owned(), domain: domain.to_owned(), descriptors }
}

fn load(resources: &[RateLimitConfig]) -> Result<Ruleset, Diagnostics> {
    Ruleset::load(&sources(resources), &Options::default())
}

/// The error of one resource with this descriptor.
fn refused(descriptor: RateLimitDescriptor) -> String {
    load(&[config("d", vec![descriptor])]).expect_err("refused").to_string()
}

#[test]
fn a_resource_reads_as_a_rule_file() {
    let route = "httproute/default/r/rule/0/match/0/*";
    let mut outer = limited(route, route, RateLimitUnit::Hour, 3);
    outer.rate_limit = None;
    let mut inner = limited("rule-0-match-0", "", RateLimitUnit::Week, 5);
    inner.shadow_mode = true;
    outer.descriptors = vec![inner, limited("masked_remote_address", "10.0.0.0/8", RateLimitUnit::Day, 9)];
    let text = &sources(&[config("default/eg/http", vec![outer])])[0];
    assert_eq!(text.name, "xds/default/eg/http");
    assert_eq!(
        text.text,
        "domain: \"default/eg/http\"\nprofile: envoy\ndescriptors:\n  - key: \"httproute/default/r/rule/0/match/0/*\"\n    \
         value: \"httproute/default/r/rule/0/match/0/*\"\n    descriptors:\n      - key: \"rule-0-match-0\"\n        \
         rate_limit: {unit: \"week\", requests_per_unit: 5}\n        shadow_mode: true\n      \
         - key: \"masked_remote_address\"\n        value: \"10.0.0.0/8\"\n        \
         rate_limit: {unit: \"day\", requests_per_unit: 9}\n"
    );
    let rules = Ruleset::load(std::slice::from_ref(text), &Options::default()).expect("valid");
    assert_eq!(rules.domain("default/eg/http").map(tollgate_rules::Domain::profile), Some(Profile::Envoy));
    assert_eq!(rules.rules().len(), 2);
}

/// Each answer of a server would look like a new revision otherwise.
#[test]
fn the_order_of_resources_does_not_matter() {
    let (a, b) = (
        config("a", vec![limited("k", "", RateLimitUnit::Second, 1)]),
        config("b", vec![limited("k", "", RateLimitUnit::Second, 2)]),
    );
    let both = [a.clone(), b.clone()];
    assert_eq!(sources(&both), sources(&[b, a]));
}

#[test]
fn text_of_any_kind_survives() {
    for text in
        ["*", "a: b # c", "\"\\", "line\nbreak\u{2028}\u{85}", "\u{0}\u{7f}\u{feff}", "😀 'x' {[", "%q", " "]
    {
        let mut descriptor = limited("k", text, RateLimitUnit::Minute, 1);
        if let Some(limit) = &mut descriptor.rate_limit {
            limit.name = "named".to_owned();
        }
        let rules =
            load(&[config("d", vec![descriptor])]).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        let domain = rules.domain("d").expect("a domain");
        let named: Vec<&str> = domain.literal_values().collect();
        assert_eq!(named, if text == "*" { vec![] } else { vec![text] }, "{text:?}");
    }
}

#[test]
fn what_the_original_refuses_is_refused() {
    let unknown = limited("k", "", RateLimitUnit::Unknown, 1);
    assert!(refused(unknown.clone()).contains("unknown"), "{}", refused(unknown));
    let mut future = limited("k", "", RateLimitUnit::Hour, 1);
    future.rate_limit.as_mut().expect("a limit").unit = 99;
    assert!(refused(future).contains("99"));
    let mut both = limited("k", "", RateLimitUnit::Hour, 1);
    both.rate_limit.as_mut().expect("a limit").unlimited = true;
    assert!(refused(both).contains("unlimited"));
    assert!(refused(limited("", "", RateLimitUnit::Hour, 1)).contains("key"));
    let twice = config("d", vec![]);
    let error = load(&[twice.clone(), twice]).expect_err("refused").to_string();
    assert!(error.contains("xds/d"), "{error}");
    let error = load(&[config("", vec![])]).expect_err("refused").to_string();
    assert!(error.contains("empty domain"), "{error}");
}

#[test]
fn every_field_arrives() {
    let mut descriptor = limited("k", "v", RateLimitUnit::Unknown, 7);
    descriptor.quota_mode = true;
    descriptor.detailed_metric = true;
    let limit = descriptor.rate_limit.as_mut().expect("a limit");
    limit.unlimited = true;
    limit.name = "free".to_owned();
    limit.replaces = vec![RateLimitReplace { name: "paid".to_owned() }];
    let list = prost_types::ListValue {
        values: vec![
            Value { kind: Some(Kind::NumberValue(1.5)) },
            Value { kind: Some(Kind::StringValue("2".to_owned())) },
            Value { kind: Some(Kind::NumberValue(f64::NAN)) },
            Value { kind: Some(Kind::NumberValue(-1e300)) },
        ],
    };
    let fields = [
        ("a b".to_owned(), Value { kind: Some(Kind::BoolValue(true)) }),
        ("l".to_owned(), Value { kind: Some(Kind::ListValue(list)) }),
        ("n".to_owned(), Value { kind: None }),
    ];
    descriptor.metadata = Some(Struct { fields: fields.into_iter().collect() });
    let file = &sources(&[config("d", vec![descriptor])])[0];
    assert!(
        file.text.ends_with(
            "rate_limit: {unlimited: true, name: \"free\", replaces: [{name: \"paid\"}]}\n    quota_mode: true\n    \
             detailed_metric: true\n    metadata: {\"a b\": true, \"l\": [1.5, \"2\", \"NaN\", -1e300], \"n\": null}\n"
        ),
        "{}",
        file.text
    );
    Ruleset::load(std::slice::from_ref(file), &Options::default()).expect("valid");
}

#[test]
fn resources_of_one_domain_are_joined_on_request() {
    let part = |key: &str| config("d", vec![limited(key, "", RateLimitUnit::Hour, 1)]);
    let all = sources(&[part("a"), config("d", vec![]), part("b"), config("e", vec![])]);
    let options = Options { merge_domains: true, ..Options::default() };
    let rules = Ruleset::load(&all, &options).expect("valid");
    assert_eq!((rules.domains().count(), rules.rules().len()), (2, 2));
    assert!(Ruleset::load(&all, &Options::default()).is_err(), "not asked for");
}

/// Nesting beyond what rules may have is an error of the loader, not of the stack.
#[test]
fn deep_nesting_is_refused() {
    let mut descriptor = limited("k", "", RateLimitUnit::Hour, 1);
    for _ in 0..90 {
        descriptor =
            RateLimitDescriptor { key: "k".to_owned(), descriptors: vec![descriptor], ..Default::default() };
    }
    assert!(refused(descriptor).contains("nested"));
}
