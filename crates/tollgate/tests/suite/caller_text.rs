//! Text and ids that callers and operators spell: nothing that a terminal obeys reaches one, and an id acts on the caller
//! that has it or fails.

use crate::databases::Place;
use crate::harness::{Node, eventually, run};
use serde_json::{Value, json};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, limit: 2/hour}
  - {key: tenant, limit: 2/hour}
";

/// Clears the screen, changes the title, reorders the line, forges another one.
const HOSTILE: &str = "a\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}31m\u{202e}\u{2066}\u{200b}\nforged\r\u{7f}";

fn is_safe(text: &str) -> bool {
    !text.chars().any(|c| c != '\n' && tollgate_observe::escape::is_unsafe(c))
}

#[test]
fn nothing_that_a_terminal_obeys_is_printed() {
    let place = Place::new();
    let db = place.sqlite("d");
    let node = Node::start(RULES, &db, &[]);
    let admin = format!("http://{}", node.admin);
    let id = eventually("a denial", || {
        let decision = node.server.check("d", &json!({"tenant": HOSTILE})).json();
        (decision["allowed"] == false).then(|| decision["decision_id"].as_str().expect("an id").to_owned())
    });
    eventually("the log", || {
        let path = format!("/admin/v1/decisions/{id}/why");
        (node.ask("GET", &path, &[], &Value::Null).status == 200).then_some(())
    });
    assert_eq!(node.put("key", &json!({"overrides": [{"descriptor": "default", "requests_per_unit": 5, "unit": "hour"}], "reason": "a\u{202e}b"})).status, 200);
    for words in [
        &["why", &id] as &[&str],
        &["top"],
        &["quota", "list"],
        &["quota", "export"],
        &["usage", "key"],
        &["emergency", "list"],
        &["rules", "list"],
    ] {
        for json in [&[] as &[&str], &["--json"]] {
            let output = run(&[words, json, &["--admin", &admin]].concat());
            assert_eq!(output.code, Some(0), "{words:?}: {}", output.err);
            assert!(is_safe(&output.out) && is_safe(&output.err), "{words:?}: {:?}", output.out);
            if !json.is_empty() && words[1..] != ["export"] {
                serde_json::from_str::<Value>(&output.out)
                    .unwrap_or_else(|error| panic!("{words:?}: {error}: {}", output.out));
            }
        }
    }
    let why = run(&["why", &id, "--admin", &admin]);
    assert!(why.out.contains(r"\u{1b}[2J") && why.out.contains(r"\nforged"), "{}", why.out);
    let audit = run(&["audit", "list", "--db", &db]);
    assert!(is_safe(&audit.out) && audit.out.contains("quota.put"), "{:?}", audit.out);
    assert!(is_safe(&node.server.log().replace('\t', " ")), "{:?}", node.server.log());
}

#[test]
fn an_id_selects_its_caller_or_fails() {
    let place = Place::new();
    let node = Node::start(RULES, &place.sqlite("d"), &[]);
    let listed = |attributes: &Value| {
        eventually("the caller in the lists", || {
            node.server.check("d", attributes);
            let top = node.ask("GET", "/admin/v1/top", &[], &Value::Null).json();
            let prefix = attributes.as_object()?.values().next()?.as_str()?[..2].to_owned();
            let found = top["by_rate"]
                .as_array()?
                .iter()
                .find(|one| one["key_masked"].as_str().is_some_and(|masked| masked.starts_with(&prefix)))?;
            Some(found["key_id"].as_str()?.to_owned())
        })
    };
    let id = listed(&json!({"api_key": "sk_live_0123456789"}));
    let body = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 500, "unit": "hour"}]});
    // An id in place of an API key, as one pastes it on the command line, means its caller.
    let admin = format!("http://{}", node.admin);
    let set = run(&["quota", "set", &id, "--limit", "500/hour", "--admin", &admin]);
    assert_eq!(set.code, Some(0), "{}", set.err);
    assert_eq!(node.ask("GET", "/admin/v1/quotas/sk_live_0123456789", &[], &Value::Null).status, 200);
    let block = json!({"action": "block", "target": {"kind": "api_key", "value": id}, "reason": "abuse"});
    assert_eq!(node.ask("POST", "/admin/v1/emergency", &[], &block).status, 201);
    let denied = node.server.check("d", &json!({"api_key": "sk_live_0123456789"}));
    assert_ne!(denied.status, 200, "{}", denied.text());

    // The id of a tenant is the hash of its name, which is also an API key with a quota.
    let tenant = listed(&json!({"tenant": "acme-corporation"}));
    assert_eq!(node.put("acme-corporation", &body).status, 200);
    for path in [format!("/admin/v1/quotas/by-id/{tenant}"), format!("/admin/v1/quotas/{tenant}")] {
        let refused = node.ask("PUT", &path, &[], &body);
        assert_eq!(refused.status, 409, "{path}: {}", refused.text());
        assert_eq!(refused.json()["title"], "No API key");
    }
    // The first digits of one caller's id do not make another id its own.
    let wrong = format!("{id}{}", "0".repeat(48));
    assert_eq!(node.ask("GET", &format!("/admin/v1/usage/by-id/{wrong}"), &[], &Value::Null).status, 404);
}
