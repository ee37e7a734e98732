//! Endpoints that rules name, behind routes that are wider, narrower or for other paths: a rule that the gateway resolves
//! otherwise than `/check` would be no limit here.

use crate::harness::{Gateway, Origin, plain, request};
use std::net::SocketAddr;

const RULES: &str = "
domain: d
descriptors:
  - {key: endpoint, value: POST /api/v1/orders, name: orders, limit: 2/hour}
  - {key: endpoint, value: 'GET /users/{id}', name: users, limit: 1/hour}
  - {key: endpoint, value: 'GET /wide/{*rest}', name: wide, limit: 2/hour}
  - {key: endpoint, value: 'DELETE /files/*', name: files, limit: 1/hour}
  - {key: endpoint, value: 'PURGE /cache', name: purges, limit: 1/hour}
";

fn send(gateway: &Gateway, line: &str) -> (u16, Option<String>) {
    let (method, path) = line.split_once(' ').expect("a method and a path");
    let answer = gateway.exchange(&request(method, path, b""));
    (answer.status, answer.header("x-ratelimit-denied-by").map(str::to_owned))
}

fn routes(upstream: SocketAddr, routes: &[&str]) -> String {
    let each: String =
        routes.iter().map(|route| format!("    - {{upstream: api, domain: d, {route}}}\n")).collect();
    format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams: {{api: {{addresses: [\"{upstream}\"]}}}}\n  routes:\n{each}"
    )
}

#[test]
fn rules_on_endpoints_hold_behind_any_route() {
    let origin = Origin::start();
    for section in [
        plain(origin.address, ""),
        routes(origin.address, &["path: '/{version}/{*rest}'"]),
        routes(
            origin.address,
            &[
                "path: '/wide/{id}'",
                "path: '/api/{version}/{*rest}'",
                "path: '/users/{user}'",
                "path: '/{*rest}'",
            ],
        ),
        routes(origin.address, &["path: '/{*rest}', methods: [GET, POST]", "path: '/{*rest}'"]),
    ] {
        let gateway = Gateway::start(RULES, &section);
        for (line, denied_by) in [
            ("POST /api/v1/orders", None),
            ("POST /api//v1/%6Frders/", None),
            ("POST /api/v1/orders", Some("orders")),
            ("GET /api/v1/orders", None),
            ("GET /users/1", None),
            ("HEAD /users/2", Some("users")),
            ("GET /wide/1", None),
            ("GET /wide/1/2", None),
            ("GET /wide/3", Some("wide")),
            ("DELETE /files/1", None),
            ("DELETE /files/1/2", Some("files")),
            ("PURGE /cache", None),
            ("PURGE /cache", Some("purges")),
        ] {
            let (status, rule) = send(&gateway, line);
            let expected = (if denied_by.is_some() { 429 } else { 200 }, denied_by);
            assert_eq!((status, rule.as_deref()), expected, "{line} by\n{section}");
        }
    }
}

/// Routes group what no rule names; the finer ones still match a rule's pattern, each with a counter of its own.
#[test]
fn routes_are_the_endpoints_of_other_requests() {
    let rules = "
domain: d
descriptors:
  - {key: endpoint, name: each, limit: 2/hour}
  - {key: endpoint, value: POST /login, name: logins, limit: 1/hour}
";
    let pattern =
        "domain: d\ndescriptors:\n  - {key: endpoint, value: 'GET /api/*', name: each, limit: 1/hour}\n";
    let origin = Origin::start();
    let section = routes(origin.address, &["path: '/api/users/{id}'", "path: '/{*rest}'"]);
    let gateway = Gateway::start(rules, &section);
    let passes = |line: &str| send(&gateway, line).0 == 200;
    assert!(passes("GET /api/users/1") && passes("GET /api/users/2") && !passes("GET /api/users/3"));
    assert!(
        passes("GET /a") && passes("GET /b") && !passes("GET /c"),
        "the route for everything is one endpoint"
    );
    assert!(passes("POST /login") && !passes("POST /login"));
    let gateway = Gateway::start(pattern, &section);
    let passes = |line: &str| send(&gateway, line).0 == 200;
    assert!(passes("GET /api/users/1") && !passes("GET /api/users/2"));
    assert!(
        passes("GET /api/orders") && !passes("GET /api/other/3"),
        "what the pattern alone names is one endpoint"
    );
}

#[test]
fn published_rules_name_other_endpoints() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    assert_eq!(send(&gateway, "POST /api/v2/orders").0, 200);
    gateway.replace_rules(&RULES.replace("/api/v1/orders", "/api/v2/orders"));
    let answers =
        ["v2", "v2", "v2", "v1"].map(|version| send(&gateway, &format!("POST /api/{version}/orders")).0);
    assert_eq!(answers, [200, 200, 429, 200]);
}

/// Each domain has its own names for the paths of its routes.
#[test]
fn the_domain_of_the_route_names_the_endpoint() {
    let origin = Origin::start();
    let section =
        routes(origin.address, &["path: '/{*rest}'"]) + "    - {upstream: api, path: '/free/{*rest}'}\n";
    let rules = "domain: d\ndescriptors:\n  - {key: endpoint, value: 'GET /free/x', limit: 0/hour}\n  - {key: endpoint, value: 'GET /x', limit: 0/hour}\n";
    let gateway = Gateway::start(rules, &section);
    assert_eq!((send(&gateway, "GET /free/x").0, send(&gateway, "GET /x").0), (200, 429));
}
