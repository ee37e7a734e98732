//! Configurations that are printed for rules.

use super::load;
use crate::commands::doctor::{Report, check, document, snippet};
use tollgate_rules::{Options, Ruleset, Source};

#[test]
fn printed_configurations_have_what_envoy_accepts() {
    let sources: Vec<Source> = (0..13)
        .map(|at| {
            Source::new(
                format!("{at}"),
                format!("domain: d{at}\ndescriptors: [{{key: k{at}, limit: 1/s}}]\n"),
            )
        })
        .collect();
    let rules = Ruleset::load(&sources, &Options::default()).expect("valid rules");
    let printed = snippet::envoy(&rules);
    assert!(!printed.contains("stage:"), "{printed}");
    let documents = document::parse("f", &printed).expect("valid");
    let mut report = Report::default();
    check(&documents, Some(&rules), &mut report);
    assert!(report.findings.iter().all(|one| one.fix.is_none()), "{:#?}\n{printed}", report.findings);

    let printed = snippet::envoy(&load(
        "domain: d\ndescriptors: [{key: global, limit: 1/s}, {key: masked_remote_address, value: 10.0.0.0/8, limit: 1/s}]\n",
    ));
    for part in [
        r#"{"generic_key":{"descriptor_key":"global","descriptor_value":"aggregate"}}"#,
        r#"{"masked_remote_address":{"v4_prefix_mask_len":8}}"#,
    ] {
        assert!(printed.contains(part), "{printed}");
    }
}
