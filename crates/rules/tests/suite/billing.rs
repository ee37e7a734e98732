//! Rules whose consumption is billed, and who is billed.

use tollgate_rules::{Options, Ruleset, Source};

/// Each rule with the attribute that is billed; `-` if it is not billed, `request` for the request's caller.
fn billed(text: &str) -> Vec<String> {
    let rules = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default());
    let rules = rules.unwrap_or_else(|errors| panic!("{errors}"));
    let found: Vec<String> = rules
        .rules()
        .iter()
        .map(|rule| {
            let billed = match &rule.billing {
                None => "-",
                Some(billing) => billing.caller_key.as_deref().unwrap_or("request"),
            };
            format!("{} {billed}", rule.name)
        })
        .collect();
    assert_eq!(rules.has_billing(), found.iter().any(|rule| !rule.ends_with(" -")));
    found
}

#[test]
fn rules_are_billed_to_whom_they_count() {
    let text = "
domain: d
descriptors:
  - {key: api_key, limit: 5/m, billing: true, name: key}
  - {key: tenant, limit: 5/m, name: free}
  - key: endpoint
    billing: true
    descriptors:
      - {key: tenant, limit: 5/m, name: nested}
      - {key: user, limit: 5/m, billing: false, name: out}
      - {key: plan, value: pro, name: group, descriptors: [{key: api_key, limit: 5/m, name: deep}]}
  - {key: global, limit: 5/m, billing: true, name: all}
  - {key: plan, value: pro, limit: 5/m, billing: true, name: fixed}
";
    assert_eq!(
        billed(text),
        ["key api_key", "free -", "nested tenant", "out -", "deep api_key", "all request", "fixed request"]
    );
    let whole = "
domain: d
billing: true
descriptors:
  - {key: api_key, limit: 5/m, name: key}
  - {key: user, limit: 5/m, billing: false, name: out}
  - {key: path, concurrency: 5, name: held}
";
    assert_eq!(billed(whole), ["key api_key", "out -", "held request"]);
    assert_eq!(billed("{domain: d, descriptors: [{key: api_key, limit: 5/m}]}"), ["api_key -"]);
}

/// Otherwise an operator waits for numbers that never come.
#[test]
fn billing_without_a_rate_is_refused() {
    for descriptor in [
        "{key: a, billing: true, concurrency: 5}",
        "{key: a, billing: true, rate_limit: {unlimited: true}}",
        "{key: a, billing: true}",
    ] {
        let text = format!("{{domain: d, descriptors: [{descriptor}]}}");
        let errors = Ruleset::load(&[Source::new("t.yaml", text)], &Options::default());
        let errors = errors.expect_err(descriptor).to_string();
        assert!(errors.contains("`billing` on a rule without a rate has no effect"), "{errors}");
    }
}
