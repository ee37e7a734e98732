//! `tollgate top`: at a terminal, and once for those who have none.

use crate::harness::{Server, eventually, program, run};
use serde_json::json;
use std::path::Path;
use std::process::Command;

const RULES: &str = "{domain: d, descriptors: [{key: api_key, name: per-key, limit: 2/hour}]}";

/// `top` must show that its server hangs, and stay quittable; no exit may leave the terminal unusable.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Python: make test")]
fn top_reports_a_hanging_server_and_quits_on_request() {
    let server = Server::with_rules(RULES);
    let python = program("TOLLGATE_TEST_PYTHON", ".venv/foreign/bin/python", "Python");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/terminal.py");
    let admin = server.admin.expect("an admin address").to_string();
    let sat = Command::new(python)
        .arg(script)
        .args([env!("CARGO_BIN_EXE_tollgate"), &admin, &server.id().to_string()])
        .output()
        .expect("it runs");
    let output = String::from_utf8_lossy(&sat.stdout).into_owned() + &String::from_utf8_lossy(&sat.stderr);
    assert!(sat.status.success() && output.contains("went by a key\nwent by a signal"), "{output}");
}

/// A script that mails what goes on must not mail half of it.
#[test]
fn once_prints_what_the_screen_shows() {
    let server = Server::with_rules(RULES);
    let admin = server.admin.expect("an admin address").to_string();
    let text = eventually("a second with denials", || {
        for _ in 0..5 {
            server.check("d", &json!({"api_key": "sk_live_PLANTED0123456789abcdef"}));
        }
        let output = run(&["top", "--admin", &admin]);
        assert_eq!(output.code, Some(0), "{}", output.err);
        (!output.out.contains(" 0/s denied") && output.out.contains("TOP DENIED")).then_some(output.out)
    });
    for word in
        ["/s allowed", "/s denied", "p50 ", "p99 ", "store memory", "RULE", "per-key", "CALLER", "sk_liv…"]
    {
        assert!(text.contains(word), "{word} is missing\n{text}");
    }
    assert!(!text.contains("PLANTED"), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("other ")), "nothing counts for no rule: {text}");
}
