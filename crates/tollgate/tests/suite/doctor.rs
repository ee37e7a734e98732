//! `tollgate doctor` as an operator runs it: exit codes, several files, a running server, JSON.

use crate::harness::{Folder, Server, run, run_with};
use serde_json::Value;
use std::path::Path;

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/envoy").join(name);
    path.to_str().expect("a plain path").to_owned()
}

#[test]
fn exit_codes_distinguish_success_problems_and_bad_input() {
    let folder = Folder::new();
    let write = |name: &str, text: &str| folder.write(name, text).to_str().expect("a plain path").to_owned();
    let (rules, envoy) = (example("rules.yaml"), example("envoy.yaml"));
    let fine = run(&["doctor", "--rules", &rules, &envoy]);
    assert_eq!(fine.code, Some(0), "{}{}", fine.out, fine.err);
    assert!(fine.out.contains("0 problems"), "{}", fine.out);

    // The rules may be among the files, in several documents.
    let other =
        write("other.yaml", "domain: other\ndescriptors: [{key: k, limit: 1/s}]\n---\nkind: Service\n");
    let sick = run(&["doctor", &envoy, &other]);
    assert_eq!(sick.code, Some(1), "{}{}", sick.out, sick.err);
    assert!(sick.out.contains("problem: no rules for domain `edge`"), "{}", sick.out);
    assert!(sick.out.contains("fix: the rules have other"), "{}", sick.out);
    let sick = run(&["doctor", "--json", &envoy, &other]);
    let report: Value = serde_json::from_str(&sick.out).expect("JSON");
    assert_eq!((sick.code, &report["ok"]), (Some(1), &Value::Bool(false)), "{report}");
    assert!(
        report["findings"].as_array().is_some_and(|all| all.iter().any(|one| one["level"] == "problem")),
        "{report}"
    );

    // Rules that are written as in an example, with counts such as `100k`, and an example with two filters.
    let llm = |name: &str| example(&format!("../envoy-llm/{name}"));
    let fine = run(&["doctor", &llm("rules.yaml"), &llm("llm.yaml"), &llm("envoy.yaml")]);
    assert_eq!(fine.code, Some(0), "{}{}", fine.out, fine.err);
    let nothing = write("nothing.yaml", "static_resources: {clusters: [{name: up}]}\n");
    assert_eq!(run(&["doctor", &nothing]).code, Some(1));

    // Beside the service, rules are read as it reads them.
    let istio = example("../../deploy/examples/istio.yaml");
    let fine = run(&["doctor", &istio]);
    assert_eq!(fine.code, Some(0), "{}{}", fine.out, fine.err);
    assert!(fine.out.contains("rule `PATH=/productpage`, fixed_window 10/1m"), "{}", fine.out);
    assert!(fine.out.contains("rules are all files below /data/ratelimit/config"), "{}", fine.out);
    // And without it, as far as nothing else can read them.
    let theirs = "domain: d\ndescriptors: [{key: ns/p/rule/0, value: ns/p/rule/0, rate_limit: {unit: hour, requests_per_unit: 010}}]\n";
    let theirs =
        run(&["doctor", "--rules", &write("theirs.yaml", theirs), &write("none.yaml", "kind: Service\n")]);
    assert_eq!(theirs.code, Some(0), "{}{}", theirs.out, theirs.err);
    assert!(theirs.out.contains("`tollgate serve` refuses these rules"), "{}", theirs.out);

    let broken = write("broken.yaml", "a: [\n");
    let wrong_rules = write("rules.yaml", "domain: d\ndescriptors: [{key: k, limit: 1/fortnight}]\n");
    let big = write("big.yaml", &format!("a: {}\n", "x".repeat(9 << 20)));
    for args in [
        &["doctor", &broken][..],
        &["doctor", "/nowhere"],
        &["doctor"],
        &["doctor", "--print-envoy"],
        &["doctor", "--rules", &wrong_rules, &envoy],
        &["doctor", &big],
        &["doctor", "--server", "--admin", "http://127.0.0.1:9"],
    ] {
        let run = run(args);
        assert_eq!(run.code, Some(2), "{args:?}: {}{}", run.out, run.err);
        assert!(!run.err.is_empty(), "{args:?}");
    }
}

#[test]
fn a_running_server_is_examined() {
    let server = Server::start(&["--rules", &example("rules.yaml")]);
    let url = format!("http://{}", server.admin.expect("an admin address"));
    let doctor = |args: &[&str]| run_with(args, &[("TOLLGATE_ADMIN_URL", &url)]);
    let fine = doctor(&["doctor", "--server", &example("envoy.yaml")]);
    assert_eq!(fine.code, Some(0), "{}{}", fine.out, fine.err);
    assert!(fine.out.contains("3 rules from files") && fine.out.contains("rule `logins`"), "{}", fine.out);
    let printed = doctor(&["doctor", "--server", "--print-envoy"]);
    assert!(
        printed.code == Some(0) && printed.out.contains("domain: \"edge\""),
        "{}{}",
        printed.out,
        printed.err
    );

    // A management server that does not run.
    let waiting =
        Server::start(&["--rules-from", "xds", "--xds-server", "127.0.0.1:9", "--xds-wait", "false"]);
    let url = format!("http://{}", waiting.admin.expect("an admin address"));
    let sick = run_with(&["doctor", "--server"], &[("TOLLGATE_ADMIN_URL", &url)]);
    assert_eq!(sick.code, Some(1), "{}{}", sick.out, sick.err);
    assert!(
        sick.out.contains("no configuration has come from the management server 127.0.0.1:9"),
        "{}",
        sick.out
    );
}
