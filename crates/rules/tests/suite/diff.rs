//! The diff of rule sets shows every change: one that is not shown would be published unreviewed.

use tollgate_rules::{Options, Ruleset, Source};

fn rules(descriptors: &str) -> Ruleset {
    let text = format!("domain: d\ndescriptors:\n{descriptors}");
    Ruleset::load(&[Source::new("t", text)], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"))
}

const BEFORE: &str = "  - {key: user, limit: 5/minute}\n  - {key: path, value: /a, limit: 1/hour}\n";

#[test]
fn each_rule_is_reported_once() {
    let before = rules(BEFORE);
    let after = rules("  - {key: user, limit: 7/minute}\n  - {key: path, value: /b, limit: 1/hour}\n");
    let changes: Vec<_> = before
        .diff(&after)
        .into_iter()
        .map(|change| (change.rule, change.before.is_some(), change.after.is_some()))
        .collect();
    let of = |rule: &str, before, after| (rule.to_owned(), before, after);
    assert_eq!(
        changes,
        [of("d: path=/a", true, false), of("d: path=/b", false, true), of("d: user", true, true)]
    );
    let number = before.diff(&after).pop().expect("a change");
    assert!(number.before.expect("before").contains("5/1m") && number.after.expect("after").contains("7/1m"));
    assert_eq!(before.diff(&rules(BEFORE)), []);
}

/// Whatever a rule may say, saying it is a change.
#[test]
fn every_option_of_a_rule_is_compared() {
    for setting in [
        "name: n",
        "class: security",
        "on_error: open",
        "action: degrade",
        "priority: 3",
        "cost: 5",
        "shadow_mode: true",
        "soft: 50%",
        "tiers: {pro: 9/minute}",
        "mode: central",
        "split: 4",
        "metadata: {a: b}",
        "detailed_metric: true",
        "value_to_metric: true",
        "algorithm: fixed_window",
    ] {
        let after = rules(&format!(
            "  - {{key: user, limit: 5/minute, {setting}}}\n  - {{key: path, value: /a, limit: 1/hour}}\n"
        ));
        assert_eq!(rules(BEFORE).diff(&after).len(), 1, "{setting}");
    }
}
