//! Rule files among the documents, and policies.

use super::{POLICY, findings, problems};
use crate::commands::doctor::finding::{Level, Report};
use crate::commands::doctor::{document, rule_texts, workload};
use tollgate_rules::{Options, Profile, Ruleset, Source};

fn sources(text: &str) -> Vec<Source> {
    document::parse("f.yaml", text).expect("documents").iter().flat_map(rule_texts).collect()
}

/// Values mean what is written: not what another format makes of them.
#[test]
fn rules_among_the_documents_keep_their_text() {
    let text = "kind: Service\n---\n# first\ndomain: d\ndescriptors:\n  - {key: a, value: 1.10, limit: {count: 100k, period: minute}}\n  \
        - {key: b, value: 0x1F, limit: 1/s}\n---\ndomain: e\ndescriptors: []\n";
    let sources = sources(text);
    let rules = Ruleset::load(&sources, &Options::default()).expect("valid rules");
    let values: Vec<String> =
        rules.domain("d").expect("a domain").outline().into_iter().map(|node| node.element).collect();
    assert_eq!(values, ["a=1.10", "b=0x1F"]);
    assert!(rules.domain("e").is_some());
}

#[test]
fn errors_in_rules_name_the_lines_of_the_file() {
    let text = "kind: Service\n---\ndomain: d\ndescriptors:\n  - {key: a, limit: 1/fortnight}\n";
    let error = Ruleset::load(&sources(text), &Options::default()).expect_err("a wrong limit").to_string();
    assert!(error.contains(":5:"), "{error}");
    let error = document::parse("f", "a: 1\n---\nb: [\n").expect_err("no YAML").to_string();
    assert!(error.contains("f:3:") || error.contains("f:4:"), "{error}");
}

#[test]
fn marks_within_values_do_not_split() {
    let text =
        "%YAML 1.2\n---\nkind: A\ntext: |\n  ---\n  x\nmore: '--- x'\n...\n---\nkind: B\n--- {kind: C}\n";
    let kinds: Vec<String> = document::parse("f", text)
        .expect("documents")
        .iter()
        .map(|document| document.value["kind"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(kinds, ["A", "B", "C"]);
}

/// The words must not say the opposite of what the policy does.
#[test]
fn selectors_of_a_policy_are_described_as_they_act() {
    let from = "- clientSelectors: [{sourceCIDR: {type: Distinct, value: 0.0.0.0/0}}]";
    assert!(POLICY.contains(from));
    for (selectors, part) in [
        (
            "[{sourceCIDR: {value: 10.0.0.0/8, invert: true}}]",
            "for all addresses outside 10.0.0.0/8 together",
        ),
        (
            "[{sourceCIDR: {type: Distinct, value: 10.0.0.0/8, invert: true}}]",
            "for each address outside 10.0.0.0/8",
        ),
        ("[{methods: [{value: GET, invert: true}]}]", "for method not GET"),
        ("[{methods: [{value: GET}, {value: POST}]}]", "for method GET or POST"),
        ("[{path: {value: /a, invert: true}}]", "for path not below /a"),
        ("[{path: {type: Exact, value: /a}}, {methods: [{value: GET}]}]", "for path = /a and method GET"),
    ] {
        let text = POLICY.replacen(from, &format!("- clientSelectors: {selectors}"), 1);
        let (problems, _, notes) = findings(&text, None);
        assert_eq!(problems, Vec::<String>::new());
        assert!(notes.iter().any(|note| note.contains(part)), "`{part}` in {notes:#?}");
    }
    for (from, to, part) in [
        ("value: 0.0.0.0/0", "value: 1.2.3.4/33", "`sourceCIDR.value: 1.2.3.4/33` is no network"),
        ("type: Global", "type: global", "`type: global` is unknown"),
        ("type: Distinct}", "type: distinct}", "`type: distinct` is unknown"),
    ] {
        assert!(POLICY.contains(from), "{from}");
        let found = problems(&POLICY.replacen(from, to, 1), None);
        assert!(found.iter().any(|problem| problem.contains(part)), "{to}: {found:#?}");
        assert!(!found.iter().any(|problem| problem.contains("is empty")), "{to}: {found:#?}");
    }
    let cost = POLICY.replacen("shared: true", "cost: {request: {from: Number, number: 10}}", 1);
    let (_, _, notes) = findings(&cost, None);
    assert!(notes.iter().any(|note| note.contains("each request costs 10")), "{notes:#?}");
}

/// What somebody who changes the image of a running service must know before.
#[test]
fn the_environment_of_a_rate_limit_service_is_examined() {
    let text = "apiVersion: apps/v1\nkind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n      - image: proxy\n      \
                - image: docker.io/envoyproxy/ratelimit:abc\n        env:\n        - {name: RUNTIME_ROOT, value: /data}\n        \
                - {name: RUNTIME_SUBDIRECTORY, value: ratelimit}\n        - {name: QUOTA_MODE, value: \"true\"}\n        \
                - {name: REDIS_URL, valueFrom: {secretKeyRef: {name: a, key: b}}}\n        - {name: REDIS_POOL_SIZE, value: \"20\"}\n";
    let examine = |text: &str| {
        let mut report = Report::default();
        let document = document::parse("f.yaml", text).expect("a document").remove(0);
        assert_eq!(document.kind, document::Kind::Workload);
        let options = workload::check(&document.value, "f.yaml", &mut report);
        let said = report.findings.into_iter().map(|finding| (finding.level, finding.message));
        (options, said.collect::<Vec<_>>())
    };
    let (options, said) = examine(text);
    let options = options.expect("the service");
    assert!(options.ratelimit_files && options.quota_mode && !options.merge_domains);
    assert_eq!(options.profile, Some(Profile::Envoy));
    let has = |level, part: &str| said.iter().any(|(own, text)| *own == level && text.contains(part));
    assert!(has(Level::Note, "rules are all files below /data/ratelimit/config"), "{said:?}");
    assert!(has(Level::Warning, "REDIS_POOL_SIZE has no effect"), "{said:?}");
    assert!(!said.iter().any(|(_, text)| text.contains("REDIS_URL")), "{said:?}");

    let (options, said) = examine(&text.replacen("\"true\"", "maybe", 1));
    assert!(options.is_none() && said[0].0 == Level::Problem && said[0].1.contains("QUOTA_MODE"), "{said:?}");
    let tollgate =
        text.replacen("envoyproxy/ratelimit:abc", "tollgate:1\n        command: [/bin/ratelimit]", 1);
    let native = tollgate.replacen("QUOTA_MODE, value: \"true\"", "TOLLGATE_PROFILE, value: native", 1);
    assert_eq!(examine(&native).0.and_then(|options| options.profile), Some(Profile::Native));
    let (options, said) = examine(&text.replacen("envoyproxy/ratelimit", "envoyproxy/envoy", 1));
    assert!(options.is_none() && said.is_empty(), "{said:?}");
}
