//! The field `request` of `/v1/check` and `/v1/reserve`: the caller is identified as forward auth and the gateway do.

use crate::harness::{Server, WebResponse};
use serde_json::{Value, json};

const RULES: &str = "
domain: web
descriptors:
  - key: remote_address
    name: per-address
    limit: 1000/hour
    descriptors:
      - {key: endpoint, value: 'POST /login', name: logins, limit: 3/hour}
  - {key: api_key, name: per-key, limit: 2/hour}
  - {key: tenant, name: per-tenant, limit: 1/hour}
";
const OTHER: &str = "
domain: other
descriptors:
  - {key: endpoint, value: 'GET /only/{id}', name: only, limit: 1/hour}
";
const SETTINGS: &str = "identity: {trusted: [10.0.0.0/8]}\n";

fn head(method: &str, target: &str, peer: &str, headers: &[(&str, &str)]) -> Value {
    json!({"method": method, "target": target, "peer": peer, "headers": headers})
}

fn check(server: &Server, domain: &str, request: &Value) -> WebResponse {
    server.post("/v1/check", &json!({"domain": domain, "request": request}))
}

fn rules_of(response: &WebResponse) -> Vec<String> {
    let body: Value = serde_json::from_str(&response.text()).expect("JSON");
    let limits = body["limits"].as_array().expect("limits");
    limits.iter().map(|limit| limit["rule"].as_str().expect("a name").to_owned()).collect()
}

/// Spellings of one endpoint are one counter; the endpoints that rules name are routes; the query is ignored.
#[test]
fn a_head_is_identified_by_the_rules_of_its_domain() {
    let server = Server::start(&[RULES, OTHER], SETTINGS);
    for (target, status) in
        [("/login", 200), ("/login?next=/", 200), ("http://shop.example/login", 200), ("/login", 429)]
    {
        let response = check(&server, "web", &head("POST", target, "192.0.2.1", &[]));
        assert_eq!(response.status, status, "{target}: {}", response.text());
        assert!(rules_of(&response).contains(&"logins".to_owned()), "{}", response.text());
    }
    assert_eq!(check(&server, "other", &head("GET", "/only/1", "192.0.2.1", &[])).status, 200);
    assert_eq!(check(&server, "other", &head("GET", "/only/2", "192.0.2.1", &[])).status, 429);
    assert_eq!(check(&server, "unknown", &head("GET", "/only/2", "192.0.2.1", &[])).status, 200);
}

/// Forwarded addresses count only from trusted peers of the program; a key is found where the gateway finds it.
#[test]
fn addresses_and_keys_come_from_the_head() {
    let server = Server::start(&[RULES], SETTINGS);
    let login = |peer: &str, forwarded: &str| {
        check(&server, "web", &head("POST", "/login", peer, &[("X-Forwarded-For", forwarded)])).status
    };
    for _ in 0..3 {
        assert_eq!(login("10.1.1.1", "203.0.113.7"), 200);
    }
    assert_eq!(login("10.1.1.2", "203.0.113.7"), 429, "the client's address, through any trusted proxy");
    assert_eq!(login("203.0.113.7", "203.0.113.8"), 429, "an untrusted peer's word does not count");
    let keyed =
        |headers: &[(&str, &str)]| check(&server, "web", &head("GET", "/", "192.0.2.9", headers)).status;
    assert_eq!(keyed(&[("authorization", "Bearer key-1234567890")]), 200);
    assert_eq!(keyed(&[("X-API-Key", "key-1234567890")]), 200);
    assert_eq!(keyed(&[("x-api-key", " key-1234567890\t")]), 429);
    assert_eq!(keyed(&[("x-api-key", "one-1234567890"), ("x-api-key", "two-1234567890")]), 400, "ambiguous");
    assert_eq!(keyed(&[("authorization", "Basic ???")]), 401, "unreadable");
    assert_eq!(keyed(&[("cookie", &"c=1; ".repeat(6_000))]), 200, "only the body bounds a cookie");
}

/// What the program itself knows goes before what the head says.
#[test]
fn stated_attributes_are_added_and_go_first() {
    let server = Server::start(&[RULES], SETTINGS);
    let post = |attributes: Value| {
        let body =
            json!({"domain": "web", "attributes": attributes, "request": head("GET", "/", "192.0.2.1", &[])});
        server.post("/v1/check", &body)
    };
    let response = post(json!({"tenant": "acme"}));
    assert_eq!(rules_of(&response), ["per-address", "per-tenant"], "{}", response.text());
    assert_eq!(post(json!({"tenant": "acme"})).status, 429);
    let response = post(json!({"tenant": "b", "remote_address": "198.51.100.1"}));
    let body: Value = serde_json::from_str(&response.text()).expect("JSON");
    assert_eq!(body["limits"][0]["remaining"], 999, "another address than the head's: {body}");
}

/// The same head, reserved and given back.
#[test]
fn a_head_can_be_reserved() {
    let server = Server::start(&[RULES], SETTINGS);
    let key = head("GET", "/", "192.0.2.1", &[("x-api-key", "key-1234567890")]);
    let body = json!({"domain": "web", "request": key, "cost": 2});
    let response = server.post("/v1/reserve", &body);
    assert_eq!(response.status, 200, "{}", response.text());
    let reserved: Value = serde_json::from_str(&response.text()).expect("JSON");
    assert_eq!(check(&server, "web", &key).status, 429);
    assert_eq!(server.post("/v1/cancel", &json!({"reservation": reserved["reservation"]})).status, 200);
    assert_eq!(check(&server, "web", &key).status, 200);
}

/// Whatever cannot be a request head is named, and nothing is charged.
#[test]
fn bad_heads_are_refused_with_their_field() {
    let server = Server::start(&[RULES], SETTINGS);
    let ok = head("POST", "/login", "192.0.2.1", &[]);
    let with = |field: &str, value: Value| {
        let mut head = ok.clone();
        head[field] = value;
        head
    };
    let many: Vec<_> = (0..300).map(|n| (format!("x-{n}"), "1")).collect();
    for (request, field) in [
        (with("peer", json!("192.0.2.1:80")), "request.peer"),
        (with("peer", json!(1)), "request.peer"),
        (with("method", json!("G T")), "request.method"),
        (with("method", json!("")), "request.method"),
        (with("target", json!("")), "request.target"),
        (with("target", json!("/a b")), "request.target"),
        (with("target", json!("/a\u{0}")), "request.target"),
        (with("target", json!("/\u{20ac}")), "request.target"),
        (with("target", json!("/\u{ff}")), "request.target"),
        (with("headers", json!([["x y", "1"]])), "request.headers[0]"),
        (with("headers", json!([["a", "1"], ["b", "1\r\nc: d"]])), "request.headers[1]"),
        (with("headers", json!([["a", "\u{20ac}"]])), "request.headers[0]"),
        (with("headers", json!([["a", "1", "2"]])), "request.headers[0]"),
        (with("headers", json!({"a": "1"})), "request.headers"),
        (with("headers", json!(many)), "request.headers"),
        (with("body", json!("")), "request.body"),
        (json!("GET /"), "request"),
    ] {
        let response = check(&server, "web", &request);
        let body: Value = serde_json::from_str(&response.text()).expect("JSON");
        assert_eq!((response.status, &body["field"]), (400, &json!(field)), "{request}: {body}");
    }
    let both = json!({"domain": "web", "request": ok, "descriptors": [{"entries": [["api_key", "a"]]}]});
    assert_eq!(server.post("/v1/check", &both).status, 400);
    for status in [200, 200, 200, 429] {
        assert_eq!(check(&server, "web", &ok).status, status, "nothing was charged before");
    }
}
