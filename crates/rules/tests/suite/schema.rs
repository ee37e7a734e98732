//! The schema for editors and the reference know every key that the language does. Without this an editor would
//! underline what loads, and a reader would not find it.

use tollgate_rules::{Options, Ruleset, Source};

const REFERENCE: &str = include_str!("../../../../docs/rules/reference.md");

#[test]
fn the_examples_of_the_reference_load() {
    let blocks: Vec<&str> =
        REFERENCE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!blocks.is_empty());
    for text in blocks {
        let rules = Ruleset::load(&[Source::new("docs/rules/reference.md", text)], &Options::default());
        let rules = rules.unwrap_or_else(|errors| panic!("{errors}"));
        assert!(rules.warnings().is_empty(), "{:?}", rules.warnings());
    }
}

/// The keys that a place may have, as the language's own error lists them.
fn known(text: &str) -> Vec<String> {
    let errors = Ruleset::load(&[Source::new("t", text)], &Options::default()).expect_err("an unknown key");
    let help = errors.all()[0].help.clone().expect("the keys there are");
    help.split_once(": ").expect("a list").1.split(", ").map(ToOwned::to_owned).collect()
}

#[test]
fn every_key_of_the_language_is_in_the_schema() {
    for text in [
        "{zzzzzzzz: 1, domain: d}",
        "{domain: d, descriptors: [{key: k, zzzzzzzz: 1}]}",
        "{domain: d, descriptors: [{key: k, rate_limit: {unlimited: true, zzzzzzzz: 1}}]}",
        "{domain: d, descriptors: [{key: k, limit: {count: 1, unit: day, zzzzzzzz: 1}}]}",
        "{domain: d, descriptors: [{key: k, concurrency: {limit: 1, zzzzzzzz: 1}}]}",
        "{domain: d, overload: {zzzzzzzz: 1}}",
        "{domain: d, overload: {priorities: [{zzzzzzzz: 1, when: {a: b}, priority: normal}]}}",
        "{domain: d, overload: {fleet: {capacity: 5 in flight, zzzzzzzz: 1}}}",
        "{domain: d, overload: {workers: {zzzzzzzz: 1}}}",
        "{domain: d, overload: {workers: {}, fairness: {by: t, zzzzzzzz: 1}}}",
        "{domain: d, overload: {adapt: {signals: {a: 1}, order: [free], zzzzzzzz: 1}}}",
        "{domain: d, overload: {adapt: {signals: {a: {above: 1, zzzzzzzz: 1}}, order: [free]}}}",
    ] {
        let keys = known(text);
        assert!(keys.len() > 1, "{keys:?}");
        for key in keys {
            assert!(
                tollgate_rules::schema().contains(&format!("\"{key}\": {{")),
                "`{key}` is not in the schema"
            );
        }
    }
}
