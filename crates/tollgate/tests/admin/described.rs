//! The admin API is what its OpenAPI document says: asked by Schemathesis, which knows nothing but the document.

use crate::databases::Place;
use crate::harness::program;
use crate::node;
use serde_json::Value;
use std::process::Command;

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs Schemathesis: make test")]
fn responses_match_the_openapi_document() {
    let place = Place::new();
    let node = node(&place.sqlite("described"));
    let document = node.ask("GET", "/admin/v1/openapi.json", &[], &Value::Null);
    assert_eq!((document.status, &document.json()["openapi"]), (200, &"3.1.0".into()));
    let program =
        program("TOLLGATE_TEST_SCHEMATHESIS", ".venv/schemathesis/bin/schemathesis", "Schemathesis");
    let ran = Command::new(program)
        .arg("run")
        .arg(format!("http://{}/admin/v1/openapi.json", node.admin))
        .args([
            "--phases",
            "examples,coverage,fuzzing",
            "--max-examples",
            "10",
            "--seed",
            "1",
            "--generation-database",
            "none",
        ])
        // A stream of events has no end.
        .args(["--exclude-path", "/admin/v1/events"])
        // The first token would end the access of all other requests.
        .args(["--exclude-path", "/admin/v1/tokens"])
        // What is well formed may still name rules, keys and revisions that are not there.
        .args(["--exclude-checks", "positive_data_acceptance"])
        .args(["--max-time", "60", "--request-timeout", "30", "--no-color"])
        .current_dir(place.path())
        .output()
        .expect("Schemathesis runs");
    assert!(
        ran.status.success(),
        "{}{}",
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr)
    );
}
