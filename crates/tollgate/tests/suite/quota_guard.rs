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

/// The plan of a caller may come with its requests: what is taken from it is taken from that plan's limits.
#[test]
fn a_plan_in_the_request_is_judged_by() {
    let place = Place::new();
    let node = start(&place);
    let order = json!({"domain": "d", "attributes": {"api_key": "planned", "tier": "large"}, "cost": 150});
    assert_eq!(node.server.post("/v1/check", &order).status, 200);
    asked(&node.put("planned", &own("default", 120)), "the caller has used 150");
    let path = "/admin/v1/quotas/planned/preview";
    let preview = node.ask("POST", path, &[], &with(own("default", 120), "reason", json!("test"))).json();
    assert_eq!(preview["rules"][0]["before"]["limits"][0]["count"], 1000, "{preview}");
    assert_eq!(preview["rules"][0]["after"]["limits"][0]["count"], 120, "{preview}");
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
    ] {
        let refused = node.put(key, &body);
        assert_eq!((refused.status, &refused.json()["field"]), (422, &json!(field)), "{}", refused.text());
    }
    assert_eq!(node.put("acme", &own("acme", 500)).status, 200);
    // A plan may be sold before the rules have it.
    let plain =
        Node::start("domain: d\ndescriptors: [{key: api_key, limit: 9/s}]\n", &place.sqlite("plain"), &[]);
    for tier in ["pro", "free", "gold"] {
        let put = plain.put("key", &json!({"tier": tier}));
        assert_eq!(put.status, 200, "{}", put.text());
        assert!(put.json()["warnings"][0].as_str().is_some_and(|text| text.contains("has no effect until")));
    }
}

const WINDOWS: &str = "
domain: d
descriptors:
  - key: api_key
    limit: [5/hour, 100/day]
    tiers: {pro: [7/hour, 200/day], partner: unlimited}
    descriptors:
      - {key: endpoint, value: POST /orders, limit: 2/hour}
";

/// The number that denies, of a caller that uses all it may.
fn denied_at(node: &Node, attributes: &Value) -> usize {
    (0..300).take_while(|_| node.server.check("d", attributes).status == 200).count()
}

#[test]
fn an_override_removes_limits_of_other_periods_only_if_it_says_so() {
    let place = Place::new();
    let node = Node::start(WINDOWS, &place.sqlite("windows"), &[]);
    let day = |more: Value| {
        let mut own = json!({"descriptor": "default", "requests_per_unit": 150, "unit": "day"});
        own.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        json!({"overrides": [own]})
    };
    let put = node.put("a", &day(json!({})));
    assert_eq!(put.status, 200, "{}", put.text());
    assert_eq!(put.json()["warnings"], Value::Null, "{}", put.text());
    assert_eq!(denied_at(&node, &json!({"api_key": "a"})), 5);
    let usage = node.ask("GET", "/admin/v1/usage/a", &[], &Value::Null).json();
    let sources: Vec<_> = usage["limits"]
        .as_array()
        .expect("limits")
        .iter()
        .map(|one| {
            (
                one["count"].as_u64().unwrap_or(0),
                one["window"].as_str().unwrap_or(""),
                one["source"].as_str().unwrap_or(""),
            )
        })
        .collect();
    assert_eq!(sources, [(5, "1h", "rule"), (150, "1d", "override"), (2, "1h", "rule")]);
    assert_eq!(usage["usage"]["default"], json!({"used": 5, "limit": 5, "remaining": 0}));
    assert_eq!(usage["usage"]["endpoint:POST /orders"], json!({"used": 0, "limit": 2, "remaining": 2}));

    let all = day(json!({"replace": "all"}));
    asked(&node.put("a", &all), "would no longer have gcra 5/1h");
    assert_eq!(node.put("a", &with(all, "confirm", json!(true))).status, 200);
    assert_eq!(denied_at(&node, &json!({"api_key": "a"})), 145);
    // A tier that comes with the request has its own other limits.
    assert_eq!(node.put("b", &day(json!({}))).status, 200);
    assert_eq!(denied_at(&node, &json!({"api_key": "b", "tier": "pro"})), 7);
    // One of another period holds beside the rule's.
    let minute = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 3, "unit": "week"}]});
    let put = node.put("c", &minute);
    assert!(
        put.json()["warnings"][0].as_str().is_some_and(|text| text.contains("holds beside")),
        "{}",
        put.text()
    );
    assert_eq!(denied_at(&node, &json!({"api_key": "c"})), 3);
}

#[test]
fn what_is_unlimited_is_admitted_and_shown_so() {
    let place = Place::new();
    let node = Node::start(WINDOWS, &place.sqlite("unlimited"), &[]);
    let own = json!({"overrides": [{"descriptor": "default", "limit": "unlimited"}]});
    let put = node.put("a", &own);
    assert_eq!(put.status, 200, "{}", put.text());
    assert_eq!(put.json()["quotas"]["default"], json!({"limit": "unlimited"}));
    assert_eq!(denied_at(&node, &json!({"api_key": "a"})), 300);
    assert_eq!(denied_at(&node, &json!({"api_key": "t", "tier": "partner"})), 300);
    assert_eq!(denied_at(&node, &json!({"api_key": "a", "endpoint": "POST /orders"})), 2);
    let usage = node.ask("GET", "/admin/v1/usage/a", &[], &Value::Null).json();
    assert_eq!(usage["unlimited"], json!([{"rule": "api_key", "descriptor": "api_key"}]), "{usage}");
    assert_eq!(usage["usage"]["default"]["unlimited"], true);
    let answer = node.server.check("d", &json!({"api_key": "a"}));
    assert!(answer.header("ratelimit").is_none() && answer.header("x-ratelimit-limit").is_none());
    let measured = node.server.get("/metrics").text();
    assert!(
        measured.lines().any(|line| {
            let is_count = line.starts_with("ratelimit_rule_checks_total{");
            is_count && line.contains("rule=\"api_key\",verdict=\"allow\"") && !line.ends_with(" 0")
        }),
        "{measured}"
    );
    let set = ["quota", "set", "b", "--limit", "unlimited", "--admin"];
    let admin = format!("http://{}", node.admin);
    let set = run(&[&set[..], &[&admin]].concat());
    assert!(set.code == Some(0) && set.out.contains("default=unlimited"), "{}{}", set.out, set.err);
    let usage = run(&["usage", "b", "--admin", &admin]);
    assert!(usage.out.contains("unlimited"), "{}{}", usage.out, usage.err);
}

/// Before the change is made, as it would be charged.
#[test]
fn a_preview_shows_the_limits_before_and_after() {
    let place = Place::new();
    let node = Node::start(WINDOWS, &place.sqlite("preview"), &[]);
    let draft = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 9, "unit": "day", "replace": "all"}]});
    let preview = node.ask("POST", "/admin/v1/quotas/a/preview?tier=pro", &[], &draft);
    assert_eq!(preview.status, 200, "{}", preview.text());
    let preview = preview.json();
    let counts = |rule: usize, side: &str| -> Vec<u64> {
        let limits = preview["rules"][rule][side]["limits"].as_array().expect("limits");
        limits.iter().filter_map(|one| one["count"].as_u64()).collect()
    };
    assert_eq!((counts(0, "before"), counts(0, "after")), (vec![7, 200], vec![9]), "{preview}");
    assert_eq!((counts(1, "before"), counts(1, "after")), (vec![2], vec![2]));
    assert_eq!(preview["rules"][1]["reference"], "endpoint:POST /orders");
    assert!(preview["confirm"][0].as_str().is_some_and(|text| text.contains("no longer have")), "{preview}");
    assert_eq!(quota(&node, "a"), 404, "nothing changes");
    let admin = format!("http://{}", node.admin);
    let shown = run(&["quota", "set", "a", "--limit", "9/day", "--preview", "--admin", &admin]);
    assert!(shown.code == Some(0) && shown.out.contains("5/1h, 9/1d"), "{}{}", shown.out, shown.err);
    assert_eq!(quota(&node, "a"), 404, "nothing changes");
}
