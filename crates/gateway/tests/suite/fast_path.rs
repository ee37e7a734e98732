//! The fast path: most heads are copied from the bytes of the client connection into those of an idle upstream connection.
//! Requests that have to open a connection take the general path. Both are indistinguishable to clients and upstreams, also
//! in failure; the gateway counts the fast path, so each test asserts which one ran.

use crate::harness::{Gateway, Origin, WebConnection, WebResponse, eventually, plain};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 1000 per 3650d, algorithm: fixed_window}
  - {key: path, value: /hold/one, name: at-once, concurrency: 1}
";

/// Two gateways for one upstream: with idle connections, and without any.
fn both(origin: &Origin, route: &str) -> [Gateway; 2] {
    let section = plain(origin.address, route);
    let general = section.replace("addresses:", "idle_connections: 0, addresses:");
    [Gateway::start(RULES, &section), Gateway::start(RULES, &general)]
}

/// Returns the number of requests that took the fast path.
fn fast(gateway: &Gateway) -> u64 {
    gateway.metric("gateway_fast_path_total")
}

fn exchange(open: &mut WebConnection, first: &str, fields: &str) -> WebResponse {
    open.send(format!("{first} HTTP/1.1\r\nhost: api.test\r\n{fields}\r\n").as_bytes()).expect("sent");
    let bodiless = first.starts_with("HEAD") || first.ends_with("/204") || first.ends_with("/304");
    if bodiless { open.head() } else { open.response() }.expect("an answer")
}

fn sorted(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_ascii_lowercase).collect();
    lines.sort();
    lines
}

/// Returns what a client sees, except for values that count down.
fn seen(answer: &WebResponse) -> (u16, Vec<String>, Vec<String>) {
    let fields = answer.headers.iter().filter(|(name, _)| name != "ratelimit");
    let text: String = fields.map(|(name, value)| format!("{name}: {value}\n")).collect();
    (answer.status, sorted(&text), sorted(&answer.text()))
}

#[test]
fn both_ways_look_the_same_from_both_ends() {
    let origin = Origin::start();
    let section = plain(origin.address, ", strip_prefix: /v1").replace("/{*rest}", "/v1/{*rest}");
    let [gateway, general] = ["addresses:", "idle_connections: 0, addresses:"]
        .map(|addresses| Gateway::start(RULES, &section.replace("addresses:", addresses)));
    let (mut open, mut open_general) = (gateway.open(), general.open());
    exchange(&mut open, "GET /v1/warm", "");
    assert_eq!(fast(&gateway), 0, "there was no idle connection");
    let many: String = (0..60).map(|n| format!("X-Field-{n}: {}\r\n", "v".repeat(250))).collect();
    let cases = [
        ("GET /v1/head", ""),
        ("GET /v1/head?a=b&c=%20", "x-api-key: k\r\nAccept: */*\r\nx-twice: 1\r\nX-Twice: 2\r\nx-empty:\r\n"),
        ("GET http://api.test/v1/head", "x-api-key: k\r\n"),
        ("GET /v1/head", "connection: x-secret\r\nx-secret: 1\r\nkeep-alive: 5\r\nte: trailers\r\n"),
        (
            "GET /v1/head",
            "x-forwarded-for: 198.51.100.7\r\nx-forwarded-proto: https\r\nforwarded: for=1.1.1.1\r\n",
        ),
        (
            "GET /v1/head",
            "proxy-authorization: Basic x\r\nx-ratelimit-degraded: forged\r\nx-ratelimit-warning: f\r\n",
        ),
        ("GET /v1/head", many.as_str()),
        ("POST /v1/head", "x-api-key: k\r\n"),
        ("POST /v1/head", "content-length: 0\r\n"),
        ("DELETE /v1/head", ""),
        ("GET /v1/status/204", "x-api-key: k\r\n"),
        ("GET /v1/status/304", ""),
        ("GET /v1/status/404", "x-api-key: k\r\n"),
        ("GET /v1/status/503", ""),
    ];
    for (at, (first, fields)) in cases.into_iter().enumerate() {
        let before = origin.connections();
        let fast_response = exchange(&mut open, first, fields);
        assert_eq!(origin.connections(), before, "{first}: the idle connection is taken");
        assert_eq!(fast(&gateway), at as u64 + 1, "{first}: the fast path");
        let response = exchange(&mut open_general, first, fields);
        assert_eq!(seen(&fast_response), seen(&response), "{first} {fields}");
        let heads = origin.heads();
        let [.., one, other] = &heads[..] else { panic!("two requests were received") };
        assert_eq!(sorted(one), sorted(other), "{first} {fields}");
        if first.ends_with("/204") || first.ends_with("/304") {
            // The upstream announces a body that these cannot have, so the connection was not reused.
            exchange(&mut open, "GET /v1/warm", "");
            assert_eq!(fast(&gateway), at as u64 + 1, "there was no idle connection");
        }
    }
    // The upstream writes a body after the head of a HEAD response, so the connection cannot be reused.
    let head = exchange(&mut open, "HEAD /v1/a", "");
    assert_eq!(fast(&gateway), cases.len() as u64 + 1);
    let other = exchange(&mut open_general, "HEAD /v1/a", "");
    assert_eq!(seen(&head), seen(&other));
    assert_eq!(head.header("content-length"), Some("7"));
    assert_eq!(fast(&general), 0, "without idle connections nothing takes the fast path");
}

/// A request on a connection that turned out to be closed is retried if it is idempotent.
#[test]
fn a_connection_that_is_closed_under_a_request_ends_alike() {
    let origin = Origin::start();
    let [gateway, general] = both(&origin, "");
    // The general path opens a connection first, which cannot be stale: one attempt less.
    for (gateway, first, most, is_fast) in [
        (&gateway, "GET /cut", 3, 1),
        (&general, "GET /cut", 2, 0),
        (&gateway, "POST /cut", 1, 1),
        (&general, "POST /cut", 1, 0),
    ] {
        let mut open = gateway.open();
        assert_eq!(exchange(&mut open, "GET /warm", "").status, 200);
        let (before, fast_before) = (origin.requests(), fast(gateway));
        let answer = exchange(&mut open, first, "");
        assert_eq!(answer.status, 502, "{first}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(origin.requests() - before, most, "{first}");
        assert_eq!(fast(gateway) - fast_before, is_fast, "{first}: the fast path");
        assert_eq!(exchange(&mut open, "GET /after", "").status, 200, "the client connection stays usable");
    }
}

/// Disconnects are noticed, timeouts are reported, and permits are free when the response has arrived.
#[test]
fn waits_end_alike() {
    let origin = Origin::start();
    // Only what the upstream holds back has a short timeout.
    let slow = both(&origin, "}\n    - {path: \"/hold/{*rest}\", upstream: api, domain: d, timeout: 1s");
    for gateway in &slow {
        let mut open = gateway.open();
        assert_eq!(exchange(&mut open, "GET /warm", "").status, 200);
        // If the permit were not released, the second request would be denied.
        for _ in 0..2 {
            assert_eq!(exchange(&mut open, "GET /hold/one", "").status, 504);
        }
    }
    eventually("the upstream to see all disconnects", || (origin.lost() == 4).then_some(()));
    // A timeout that has elapsed on the upstream connection does not affect the next request's body.
    let late = both(&origin, ", timeout: 900ms");
    for gateway in &late {
        let mut dripping = gateway.open();
        assert_eq!(exchange(&mut dripping, "GET /warm", "").status, 200);
        let lost = origin.lost();
        assert_eq!(exchange(&mut slow[0].open(), "GET /hold/a", "").status, 504, "the timeout has elapsed");
        eventually("the held request to be gone", || (origin.lost() > lost).then_some(()));
        dripping.send(b"GET /drip HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
        dripping.read_until(b"\r\n\r\n").expect("a head");
        origin.release(1);
        dripping.read_until(b"drip\r\n").expect("the first of its body");
        let lost = origin.lost();
        drop(dripping);
        eventually("the dripping request to be gone", || (origin.lost() > lost).then_some(()));
    }
    assert_eq!(fast(&late[0]), 1);
    for gateway in &both(&origin, "") {
        let mut open = gateway.open();
        assert_eq!(exchange(&mut open, "GET /warm", "").status, 200);
        let (lost, requests) = (origin.lost(), origin.requests());
        let mut leaving = gateway.open();
        leaving.send(b"GET /hold/one HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
        eventually("the request at the upstream", || (origin.requests() > requests).then_some(()));
        assert_eq!(exchange(&mut open, "GET /hold/one", "").status, 429, "one concurrent request");
        drop(leaving);
        eventually("the upstream to see the disconnect", || (origin.lost() > lost).then_some(()));
        origin.release(2);
        eventually("the permit to be released", || {
            (exchange(&mut open, "GET /hold/one", "").status == 200).then_some(())
        });
        assert_eq!(
            exchange(&mut open, "GET /hold/one", "").status,
            200,
            "free when the response has arrived"
        );
    }
    assert_eq!((fast(&slow[1]), fast(&late[1])), (0, 0), "the general path");
}
