//! Known API keys, wherever a request head is read: an invented key has the limit of callers without one, not one of its own.

use crate::databases::Place;
use crate::harness::{Folder, Gateway, Origin, Server, eventually, exchange, plain, request, run};
use serde_json::{Value, json};
use std::net::SocketAddr;

const RULES: &str = "domain: d
descriptors:
  - {key: remote_address, name: anonymous, algorithm: fixed_window, limit: 12/year}
  - {key: api_key, name: per-key, limit: 5000/day, replaces: [{name: anonymous}]}
";

fn get(address: SocketAddr, path: &str, key: &str) -> u16 {
    let head =
        format!("GET {path} HTTP/1.1\r\nhost: t\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n");
    exchange(address, head.as_bytes()).expect("an answer").status
}

fn head(address: SocketAddr, key: &str) -> u16 {
    let head = json!({"method": "GET", "target": "/a", "peer": "127.0.0.1", "headers": [["X-Api-Key", key]]});
    let body = json!({"domain": "d", "request": head}).to_string();
    exchange(address, &request("POST", "/v1/check", body.as_bytes())).expect("an answer").status
}

/// Sends one HTTP/2 request on a connection of its own.
fn http2(address: SocketAddr, key: &str) -> u16 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(address).await.expect("a connection");
        let (send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        let serving = tokio::spawn(connection);
        let request = http::Request::get("http://h/a").header("x-api-key", key).body(()).expect("a request");
        let mut send = send.ready().await.expect("a stream");
        let (answer, _) = send.send_request(request, true).expect("sent");
        let status = answer.await.expect("an answer").status().as_u16();
        serving.abort();
        status
    })
}

/// A request with this key by each of the doors.
fn by_all_doors(gateway: &Gateway, key: &str) -> [u16; 4] {
    [
        get(gateway.address(), "/a", key),
        http2(gateway.address(), key),
        get(gateway.http, "/check/a", key),
        head(gateway.http, key),
    ]
}

fn put_quota(admin: SocketAddr, key: &str) -> u16 {
    let body = json!({"overrides": [{"descriptor": "default", "requests_per_unit": 9000, "unit": "day"}]});
    let path = format!("/admin/v1/quotas/{key}");
    exchange(admin, &request("PUT", &path, body.to_string().as_bytes())).expect("an answer").status
}

/// Whoever invented a key for each request passed the limit of callers without one, as often as it liked.
#[test]
fn invented_keys_share_the_limit_of_their_address() {
    let (folder, origin, place) = (Folder::new(), Origin::start(), Place::new());
    folder.write("keys.txt", "listed\n");
    let more = format!(
        "db: {}\nidentity: {{api_key: {{known: {{file: keys.txt, quotas: true}}}}}}",
        place.sqlite("known")
    );
    let gateway = Gateway::start_in(folder, RULES, &more, &plain(origin.address, ""));
    let statuses: Vec<u16> =
        (0..5).flat_map(|at| by_all_doors(&gateway, &format!("invented-{at}"))).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 12, "{statuses:?}");
    assert!(statuses[12..].iter().all(|status| *status == 429), "{statuses:?}");
    assert_eq!(by_all_doors(&gateway, "listed"), [200; 4]);
    assert_eq!(gateway.figure("gateway_unknown_keys_total"), 10);
    assert_eq!(gateway.figure("ratelimit_unknown_keys_total"), 10);

    // A quota makes a key known, and a line in the file.
    assert_eq!(by_all_doors(&gateway, "customer"), [429; 4]);
    assert_eq!(put_quota(gateway.admin, "customer"), 200);
    eventually("the quota's key", || (by_all_doors(&gateway, "customer") == [200; 4]).then_some(()));
    gateway.folder.write("keys.txt", "listed\nadded\n");
    eventually("the added key", || (by_all_doors(&gateway, "added") == [200; 4]).then_some(()));
    gateway.folder.write("keys.txt", "added\nhalf a li");
    let error = || gateway.details()["keys"]["error"].as_str().map(ToOwned::to_owned);
    let error = eventually("the error of the broken list", error);
    assert!(error.contains("keys.txt: line 2") && !error.contains("half"), "{error}");
    assert_eq!(by_all_doors(&gateway, "listed"), [200; 4], "the last good list stays");
    gateway.folder.write("keys.txt", "added\n");
    eventually("the removed key", || (by_all_doors(&gateway, "listed") == [429; 4]).then_some(()));

    // What is said of a request is what is decided.
    let explained = |key: &str| -> Value {
        let head =
            json!({"method": "GET", "target": "/a", "peer": "127.0.0.1", "headers": [["x-api-key", key]]});
        let body = json!({"domain": "d", "request": head}).to_string();
        exchange(gateway.admin, &request("POST", "/admin/v1/explain", body.as_bytes()))
            .expect("an answer")
            .json()
    };
    assert!(explained("invented").to_string().contains("anonymous"), "{}", explained("invented"));
    assert!(!gateway.log().contains("invented-1"), "keys are secrets");
}

#[test]
fn unknown_keys_are_denied_if_configured() {
    let (folder, origin) = (Folder::new(), Origin::start());
    folder.write("keys.txt", "listed\n");
    let more = "identity: {api_key: {known: {file: keys.txt}, unknown: deny}}";
    let gateway = Gateway::start_in(folder, RULES, more, &plain(origin.address, ""));
    assert_eq!(by_all_doors(&gateway, "invented"), [401; 4]);
    assert_eq!(by_all_doors(&gateway, "listed"), [200; 4]);
}

/// Nobody was told that a limit for callers without a key limits nobody who invents one.
#[test]
fn a_limit_that_an_invented_key_passes_is_a_warning() {
    const WARNING: &str = "a request with an invented `api_key` is not held to the limit `anonymous`";
    let folder = Folder::new();
    folder.write("keys.txt", "listed\n");
    let rules = folder.write("rules.yaml", RULES);
    let start = |identity: &str| {
        let settings = format!("rules: [rules.yaml]\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n{identity}\n");
        let path = folder.write("tollgate.yaml", settings);
        let path = path.to_str().expect("a plain path").to_owned();
        (Server::start(&["--config", &path]).log(), path)
    };
    for (identity, warned) in [
        ("", true),
        ("identity: {trusted: [10.0.0.0/8]}", true),
        ("identity: {api_key: {known: {file: keys.txt}}}", false),
        ("identity: {api_key: {unknown: key}}", false),
        ("identity: {api_key: {header: null, bearer: false}}", false),
    ] {
        let (log, config) = start(identity);
        assert_eq!(
            log.contains(WARNING) && log.contains("known: {file: keys.txt}"),
            warned,
            "{identity}: {log}"
        );
        let rules = rules.to_str().expect("a plain path");
        let validated = run(&["validate", rules, "--config", &config]);
        assert_eq!(validated.code, Some(0), "{}", validated.err);
        assert_eq!(validated.out.contains(&format!("warning: {WARNING}")), warned, "{}", validated.out);
        let alone = run(&["check", rules]);
        assert!(alone.out.contains(&format!("note: {WARNING}")), "{}", alone.out);
    }
}
