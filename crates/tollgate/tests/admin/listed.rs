//! Operators act on a listed caller by its id, without ever knowing the key.

use crate::databases::Place;
use crate::harness::{Node, eventually};
use crate::{RULES, node};
use serde_json::{Value, json};

const KEY: &str = "sk_live_PLANTED0123456789abcdef";

#[test]
fn a_listed_caller_is_acted_on_by_its_id() {
    let place = Place::new();
    let node = node(&place.sqlite("listed"));
    // Another node of the installation, which has not seen the caller.
    let elsewhere = Node::start(RULES, &place.sqlite("listed"), &[]);
    assert_eq!(node.passes("d", &json!({"api_key": KEY})), 3);
    let mut responses = String::new();
    let mut ask = |method: &str, path: &str, body: &Value| {
        let answer = node.ask(method, path, &[], body);
        responses.push_str(&answer.text());
        (answer.status, if answer.body.is_empty() { Value::Null } else { answer.json() })
    };
    let id = eventually("the caller in the list", || {
        let top = ask("GET", "/admin/v1/top", &Value::Null).1;
        Some(top["by_denials"].as_array()?.first()?["key_id"].as_str()?.to_owned())
    });
    let (status, usage) = ask("GET", &format!("/admin/v1/usage/by-id/{id}"), &Value::Null);
    assert_eq!((status, &usage["limits"][0]["used"]), (200, &json!(3)), "{usage}");
    assert!(usage.get("api_key").is_none());
    let quota = format!("/admin/v1/quotas/by-id/{id}");
    assert_eq!(ask("GET", &quota, &Value::Null).0, 404, "nothing is agreed yet");
    assert_eq!(elsewhere.ask("GET", &quota, &[], &Value::Null).status, 404, "and no caller is known there");
    let own = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 5, "unit": "hour"}], "reason": "t"});
    let (status, agreed) = ask("PUT", &quota, &own);
    assert_eq!(status, 200, "{agreed}");
    assert!(agreed["id"].as_str().is_some_and(|whole| whole.starts_with(&id)), "{agreed}");
    let (status, _) = ask("POST", &format!("/admin/v1/usage/by-id/{id}/reset"), &json!({"reason": "t"}));
    assert_eq!(status, 200);
    assert_eq!(node.passes("d", &json!({"api_key": KEY})), 5, "both act on the caller");
    let grant = json!({"units": 2, "reason": "t"});
    assert_eq!(ask("POST", &format!("/admin/v1/usage/by-id/{id}/grant"), &grant).0, 201);
    assert_eq!(node.passes("d", &json!({"api_key": KEY})), 2);
    let (_, granted) = ask("POST", &format!("/admin/v1/usage/by-id/{id}/grant"), &grant);
    let granted = format!("/admin/v1/usage/by-id/{id}/grant/{}", granted["id"].as_str().expect("an id"));
    assert_eq!(ask("DELETE", &granted, &Value::Null).0, 409, "the caller lives on it");
    assert_eq!(ask("DELETE", &format!("{granted}?confirm=true"), &Value::Null).0, 204);
    assert_eq!(node.passes("d", &json!({"api_key": KEY})), 0, "it was taken back");
    assert_eq!(ask("DELETE", &granted, &Value::Null).0, 404);
    // From when something is agreed, the id is known at every node, and all can be done there that needs no counter.
    let there = |method: &str, path: &str, body: &Value| {
        let answer = elsewhere.ask(method, path, &[], body);
        (answer.status, if answer.body.is_empty() { Value::Null } else { answer.json() })
    };
    let own = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 9, "unit": "hour"}], "reason": "t"});
    assert_eq!(there("PUT", &quota, &own).0, 200);
    assert_eq!(there("GET", &quota, &Value::Null).1["overrides"][0]["requests_per_unit"], 9);
    let (status, granted) = there("POST", &format!("/admin/v1/usage/by-id/{id}/grant"), &grant);
    assert_eq!((status, &granted["key_prefix"]), (201, &agreed["key_prefix"]), "{granted}");
    let granted = format!("/admin/v1/usage/by-id/{id}/grant/{}", granted["id"].as_str().expect("an id"));
    assert_eq!(there("DELETE", &granted, &Value::Null).0, 204);
    let (status, why) = there("GET", &format!("/admin/v1/usage/by-id/{id}"), &Value::Null);
    assert!(
        status == 404
            && why["detail"].as_str().is_some_and(|why| why.contains("the node that lists the caller")),
        "{why}"
    );
    assert_eq!(there("DELETE", &quota, &Value::Null).0, 204);
    assert_eq!(there("GET", &quota, &Value::Null).0, 404);
    // A decision of the log names whom it is about; the long id will do, too.
    let logged = ask("GET", "/admin/v1/decisions?verdict=deny&limit=1", &Value::Null).1;
    assert_eq!(logged["decisions"][0]["key_id"], id.as_str());
    let whole = agreed["id"].as_str().expect("an id");
    assert_eq!(ask("GET", &format!("/admin/v1/usage/by-id/{whole}"), &Value::Null).0, 200);
    for (path, status) in [("0123456789abcdef", 404), ("xyz", 400), ("0123456789abcdeg", 400)] {
        assert_eq!(ask("GET", &format!("/admin/v1/usage/by-id/{path}"), &Value::Null).0, status, "{path}");
    }
    ask("GET", "/admin/v1/audit", &Value::Null);
    assert!(!responses.contains("PLANTED") && !node.server.log().contains("PLANTED"), "{responses}");
}

/// An id that is pasted in the place of a key acts on that caller or fails; it is never taken for an unknown key.
#[test]
fn an_unknown_id_is_no_api_key() {
    let place = Place::new();
    let node = node(&place.sqlite("unknown"));
    let (short, long) = ("0123456789abcdef", "0123456789abcdef".repeat(4));
    let quota = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 7, "unit": "hour"}], "reason": "t"});
    let (grant, reset) = (json!({"units": 2, "reason": "t"}), json!({"reason": "t"}));
    for id in [short, long.as_str()] {
        let block = json!({"action": "block", "target": {"kind": "api_key", "value": id}, "reason": "t", "ttl_seconds": 60});
        for (method, path, body) in [
            ("GET", format!("/admin/v1/quotas/{id}"), &Value::Null),
            ("PUT", format!("/admin/v1/quotas/{id}"), &quota),
            ("DELETE", format!("/admin/v1/quotas/{id}"), &Value::Null),
            ("GET", format!("/admin/v1/usage/{id}"), &Value::Null),
            ("POST", format!("/admin/v1/usage/{id}/reset"), &reset),
            ("POST", format!("/admin/v1/usage/{id}/grant"), &grant),
            ("POST", "/admin/v1/emergency".to_owned(), &block),
        ] {
            let rejected = node.ask(method, &path, &[], body);
            assert_eq!(rejected.status, 404, "{method} {path}: {}", rejected.text());
            assert!(rejected.text().contains("`?key=api_key`"), "{}", rejected.text());
        }
        assert_eq!(node.passes("d", &json!({"api_key": "other"})), 3, "nothing was blocked");
        node.ask("POST", "/admin/v1/usage/other/reset", &[], &reset);
        // A key may look like an id; then the request must say that it is a key, until the key is known.
        let path = format!("/admin/v1/quotas/{id}");
        assert_eq!(node.ask("PUT", &format!("{path}?key=api_key"), &[], &quota).status, 200);
        assert_eq!(node.ask("GET", &path, &[], &Value::Null).status, 200, "it has a quota");
        assert_eq!(node.passes("d", &json!({"api_key": id})), 7);
        assert_eq!(
            node.ask("DELETE", &format!("{path}?confirm=true&key=api_key"), &[], &Value::Null).status,
            204
        );
        // It has been seen by now, and its requests show that it is a key.
        eventually("the caller in a list", || {
            (node.ask("GET", &format!("/admin/v1/usage/{id}"), &[], &Value::Null).status == 200).then_some(())
        });
        assert_eq!(node.ask("POST", "/admin/v1/emergency?key=api_key", &[], &block).status, 201);
        assert_eq!(node.passes("d", &json!({"api_key": id})), 0, "it is blocked");
        assert_eq!(node.ask("GET", &format!("{path}?key=user_id"), &[], &Value::Null).status, 404);
    }
}
