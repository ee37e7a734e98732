//! The RateLimit fields of a real server, read by a third-party parser.

use crate::harness::{self, Server, foreign_client};

const RULES: &str = r#"
domain: fields
descriptors:
  - {key: a, name: 'say "hi", \ back', limit: 3/hour}
  - key: b
    name: windows
    limit: [100/hour, 500/day]
    descriptors: [{key: a, name: stärke, concurrency: 9}]
"#;

/// A client ignores a field that it cannot parse, and is then denied without warning.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn every_response_has_standard_rate_limit_fields() {
    let server = Server::with_rules(RULES);
    let output = foreign_client("fields.py", &server);
    assert!(output.contains("fields ok"), "{output}");
}

/// Users of other APIs expect their own fields; a misspelled setting must be an error.
#[test]
fn fields_follow_the_settings_file() {
    let folder = harness::Folder::new();
    folder.write("rules.yaml", RULES);
    let text = "{http: '127.0.0.1:0', grpc: '127.0.0.1:0', rules: [rules.yaml], responses: {legacy: delta, ratelimit: none, denied_by: false, status: 403}}";
    let path = folder.write("tollgate.yaml", text);
    let server = Server::start(&["--config", path.to_str().expect("a plain path")]);
    let ask = || server.check("fields", &serde_json::json!({"a": "x"}));
    let answer = ask();
    assert_eq!(answer.header("x-ratelimit-limit"), Some("3"), "{:?}", answer.headers);
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("2"));
    assert_eq!(answer.header("x-ratelimit-reset"), Some("1200"));
    assert_eq!(answer.header("ratelimit"), None);
    ask();
    ask();
    let denied = ask();
    assert_eq!(denied.status, 429, "programs that ask /v1/check get the protocol's own status");
    assert_eq!(
        (denied.header("x-ratelimit-denied-by"), denied.header("retry-after").is_some()),
        (None, true)
    );
    let broken = folder.write("broken.yaml", text.replace("legacy", "legasy"));
    let run = harness::run(&["serve", "--config", broken.to_str().expect("a plain path")]);
    assert_eq!(run.code, Some(1), "{}", run.err);
    assert!(run.err.contains("legasy") && run.err.contains("broken.yaml"), "{}", run.err);
}
