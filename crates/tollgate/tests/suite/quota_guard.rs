//! Changes that take something away from a caller are confirmed, through the real binary and in every way they are
//! written; without confirmation nothing changes.

use crate::databases::Place;
use crate::harness::{Node, WebResponse, run};
use serde_json::{Value, json};

/// So slow that no unit comes back while a test runs.
const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    limit: 100/day
    tiers: {small: 10/day, large: 1000/day}
    descriptors:
      - {key: endpoint, value: POST /orders, limit: 50/minute}
      - {key: plan, name: watched, shadow: true, limit: 5/day}
  - key: api_key
    value: acme
    name: acme
    limit: 70/day
";

fn start(place: &Place) -> Node {
    Node::start(RULES, &place.sqlite("quotas"), &[])
}

fn own(descriptor: &str, count: u64) -> Value {
    json!({"overrides": [{"descriptor": descriptor, "requests_per_unit": count, "unit": "day"}]})
}

fn with(mut body: Value, name: &str, value: Value) -> Value {
    body[name] = value;
    body
}

fn uses(node: &Node, key: &str, requests: usize) {
    for _ in 0..requests {
        assert_eq!(node.server.check("d", &json!({"api_key": key})).status, 200);
    }
}

fn quota(node: &Node, key: &str) -> u16 {
    node.ask("GET", &format!("/admin/v1/quotas/{key}"), &[], &Value::Null).status
}

fn asked(response: &WebResponse, says: &str) {
    assert_eq!(response.status, 409, "{}", response.text());
    assert_eq!(response.json()["title"], "Confirmation required");
    assert!(response.text().contains(says), "{}", response.text());
}

#[test]
fn a_quota_of_nothing_or_below_use_is_confirmed() {
    let place = Place::new();
    let node = start(&place);
    asked(&node.put("nobody", &own("default", 0)), "would allow this caller nothing");
    assert_eq!(quota(&node, "nobody"), 404, "nothing changes");
    assert_eq!(node.put("nobody", &with(own("default", 0), "confirm", json!(true))).status, 200);
    assert_eq!(node.put("nobody", &own("default", 0)).status, 200, "it is nothing already");

    uses(&node, "busy", 40);
    asked(&node.put("busy", &own("default", 30)), "the caller has used 40");
    asked(&node.put("busy", &json!({"tier": "small"})), "the caller has used 40");
    assert_eq!(quota(&node, "busy"), 404, "nothing changes");
    assert_eq!(node.put("busy", &own("default", 41)).status, 200, "it covers what is used");
    assert_eq!(node.put("busy", &json!({"tier": "large"})).status, 200);
    let path = "/admin/v1/quotas/busy?confirm=true";
    assert_eq!(node.ask("PUT", path, &[], &own("default", 30)).status, 200, "confirmed by the query");
    let wrong = node.ask("PUT", "/admin/v1/quotas/busy?confirm=yes", &[], &own("default", 30));
    assert_eq!(wrong.status, 400, "{}", wrong.text());
}

/// A limit that refills, and a rule that needs an endpoint: counters do not show the caller's usage, its requests do.
#[test]
fn what_a_caller_uses_of_an_endpoint_is_confirmed() {
    let place = Place::new();
    let node = start(&place);
    for _ in 0..20 {
        node.server.check("d", &json!({"api_key": "orders", "endpoint": "POST /orders"}));
    }
    let draft = |count: u64| json!({"overrides": [{"descriptor": "endpoint=POST /orders", "requests_per_unit": count, "unit": "minute"}]});
    asked(&node.put("orders", &draft(5)), "the caller has used 20 of");
    assert_eq!(node.put("other", &draft(5)).status, 200, "which does not use it");
    assert_eq!(node.put("orders", &draft(40)).status, 200, "which is enough");
}

#[test]
fn deleting_a_quota_and_revoking_a_grant_are_confirmed() {
    let place = Place::new();
    let node = start(&place);
    assert_eq!(node.put("big", &json!({"tier": "large"})).status, 200);
    uses(&node, "big", 150);
    asked(&node.ask("DELETE", "/admin/v1/quotas/big", &[], &Value::Null), "the caller has used 150");
    assert_eq!(quota(&node, "big"), 200, "nothing changes");
    let confirmed = node.ask("DELETE", "/admin/v1/quotas/big?confirm=true&reason=left", &[], &Value::Null);
    assert_eq!(confirmed.status, 204, "{}", confirmed.text());

    uses(&node, "lucky", 100);
    let granted = json!({"units": 50, "reason": "launch"});
    let grant = node.ask("POST", "/admin/v1/usage/lucky/grant", &[], &granted).json()["id"].clone();
    uses(&node, "lucky", 1);
    let path = format!("/admin/v1/usage/lucky/grant/{}", grant.as_str().expect("an id"));
    asked(&node.ask("DELETE", &path, &[], &Value::Null), "passes by this grant alone");
    uses(&node, "lucky", 1);
    assert_eq!(node.ask("DELETE", &format!("{path}?confirm=true"), &[], &Value::Null).status, 204);
    assert_eq!(node.server.check("d", &json!({"api_key": "lucky"})).status, 429);
}

/// A caller that was upgraded has used as many units as before: shown so, served at once, and its quota can be deleted
/// again as long as the rule covers them.
#[test]
fn an_upgrade_is_neither_shown_nor_judged_as_more_use() {
    let place = Place::new();
    let rules = "{domain: d, descriptors: [{key: api_key, limit: 100/day, tiers: {large: 1000/day}}]}";
    let node = Node::start(rules, &place.sqlite("quotas"), &[]);
    uses(&node, "rising", 50);
    assert_eq!(node.put("rising", &json!({"tier": "large"})).status, 200);
    let usage = || {
        let report = node.ask("GET", "/admin/v1/usage/rising", &[], &Value::Null).json();
        let limit = &report["limits"][0];
        (limit["used"].clone(), limit["remaining"].clone())
    };
    assert_eq!(usage(), (json!(50), json!(950)));
    uses(&node, "rising", 5);
    assert_eq!(usage(), (json!(55), json!(945)));
    let deleted = node.ask("DELETE", "/admin/v1/quotas/rising", &[], &Value::Null);
    assert_eq!(deleted.status, 204, "{}", deleted.text());
    assert_eq!(usage(), (json!(55), json!(45)));
    uses(&node, "rising", 45);
    assert_eq!(node.server.check("d", &json!({"api_key": "rising"})).status, 429, "nothing was minted");
}

#[test]
fn an_import_with_such_a_line_changes_nothing() {
    let place = Place::new();
    let node = start(&place);
    uses(&node, "busy", 40);
    let lines = |last: &Value| {
        let all = [
            with(own("default", 200), "api_key", json!("first")),
            with(own("default", 5), "api_key", json!("busy")),
            last.clone(),
        ];
        all.map(|line| line.to_string()).join("\n")
    };
    let text = lines(&with(own("default", 0), "api_key", json!("none")));
    let file = node.rules.write("quotas.ndjson", &text);
    let file = file.to_str().expect("a plain path");
    let admin = format!("http://{}", node.admin);
    let import = |more: &[&str]| run(&[&["quota", "import", file, "--admin", &admin], more].concat());
    let refused = import(&[]);
    assert_eq!(refused.code, Some(1), "{}", refused.out);
    for says in [
        "line 2: rule `api_key` of domain `d` would allow",
        "line 3: rule `api_key`",
        "nothing was imported",
        "add --confirm",
    ] {
        assert!(refused.err.contains(says), "{says}: {}", refused.err);
    }
    for key in ["first", "busy", "none"] {
        assert_eq!(quota(&node, key), 404, "{key}");
    }
    let done = import(&["--confirm"]);
    assert_eq!(done.code, Some(0), "{}{}", done.out, done.err);
    assert_eq!((quota(&node, "first"), quota(&node, "none")), (200, 200));
}

#[test]
fn the_command_line_asks_as_well() {
    let place = Place::new();
    let node = start(&place);
    let admin = format!("http://{}", node.admin);
    let set = |more: &[&str]| {
        run(&[&["quota", "set", "key", "--limit", "0/hour", "--admin", &admin], more].concat())
    };
    let refused = set(&[]);
    assert_eq!(refused.code, Some(1), "{}", refused.out);
    assert!(refused.err.contains("add --confirm"), "{}", refused.err);
    assert_eq!(quota(&node, "key"), 404);
    let done = set(&["--confirm"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let delete = run(&["quota", "delete", "key", "--admin", &admin]);
    assert_eq!(delete.code, Some(0), "it gives: {}", delete.err);
}

#[test]
fn what_cannot_act_is_rejected() {
    let place = Place::new();
    let node = start(&place);
    for (key, body, field) in [
        ("key", own("watched", 500), "overrides[0].descriptor"),
        ("key", own("acme", 500), "overrides[0].descriptor"),
        ("key", own("nothing", 500), "overrides[0].descriptor"),
        ("key", json!({"tier": "gold"}), "tier"),
    ] {
        let refused = node.put(key, &body);
        assert_eq!((refused.status, &refused.json()["field"]), (422, &json!(field)), "{}", refused.text());
    }
    assert_eq!(node.put("acme", &own("acme", 500)).status, 200);
    let plain =
        Node::start("domain: d\ndescriptors: [{key: api_key, limit: 9/s}]\n", &place.sqlite("plain"), &[]);
    for tier in ["pro", "free", "gold"] {
        let refused = plain.put("key", &json!({"tier": tier}));
        assert_eq!((refused.status, &refused.json()["field"]), (422, &json!("tier")), "{}", refused.text());
    }
}
