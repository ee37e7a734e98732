//! `action: delay` at `/check`: the response is delayed, so that a proxy that waits for it paces its callers. A request
//! whose delay would be too long is denied, and a client that disconnects is refunded.

use crate::harness::{Server, Stopwatch, WebConnection, eventually};
use serde_json::json;

fn serve(limit: &str, forward: &str) -> Server {
    let rules = format!("domain: d\ndescriptors:\n  - {{key: path, name: paced, {limit}, action: delay}}\n");
    Server::start(&[&rules], &format!("forward_auth: {{{forward}}}\n"))
}

fn send_check(server: &Server) -> WebConnection {
    let mut open = WebConnection::to(server.http).expect("a connection");
    open.send(b"GET /check/p HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    open
}

fn remaining(server: &Server) -> u64 {
    let peek = json!({"domain": "d", "attributes": {"path": "/p"}, "cost": 0});
    server.post("/v1/check", &peek).json()["limits"][0]["remaining"].as_u64().expect("a number")
}

/// Otherwise a proxy would forward a burst that the rule is meant to spread out.
#[test]
fn responses_are_delayed() {
    let server = serve("limit: 20/second, burst: 50", "max_delay_ms: 60000");
    let watch = Stopwatch::start();
    let mut connections: Vec<WebConnection> = (0..11).map(|_| send_check(&server)).collect();
    for open in &mut connections {
        let response = open.response().expect("a response");
        assert_eq!(response.status, 200);
        assert!(response.header("ratelimit").is_some());
    }
    // Eleven requests at twenty per second: the last response takes at least half a second.
    assert!(watch.elapsed() >= std::time::Duration::from_millis(500), "{:?}", watch.elapsed());
}

/// A proxy times out before a long delay ends, and the charge would be lost.
#[test]
fn a_request_with_a_long_delay_is_denied_and_charges_nothing() {
    let server = serve("limit: 1/hour, burst: 3", "");
    assert_eq!(server.get("/check/p").status, 200);
    let before = remaining(&server);
    for _ in 0..5 {
        let denied = server.get("/check/p");
        assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("paced")));
        let wait: u64 = denied.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
        assert!((3_000..=3_595).contains(&wait), "an hour, less the maximum delay of five seconds: {wait}");
        assert_eq!(remaining(&server), before);
    }
    assert_eq!(server.get("/check/p?deny_status=403").status, 403);
}

/// Of two pipelined requests, the first receives its response although the second is delayed.
#[test]
fn a_response_does_not_wait_for_a_delayed_one_after_it() {
    let server = serve("limit: 1 per 50s, burst: 3", "max_delay_ms: 60000");
    let mut open = send_check(&server);
    open.send(b"GET /check/p HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    assert_eq!(open.response().expect("the first").status, 200);
    let mut both = WebConnection::to(server.http).expect("a connection");
    both.send(b"GET /check/q HTTP/1.1\r\nhost: t\r\n\r\nGET /check/q HTTP/1.1\r\nhost: t\r\n\r\n")
        .expect("sent");
    assert_eq!(both.response().expect("the first of both").status, 200);
}

#[test]
fn a_client_that_disconnects_is_refunded() {
    let server = serve("limit: 1 per 50s, burst: 3", "max_delay_ms: 60000");
    assert_eq!(server.get("/check/p").status, 200);
    let before = remaining(&server);
    for _ in 0..4 {
        let waiting = send_check(&server);
        eventually("the charge", || (remaining(&server) < before).then_some(()));
        drop(waiting);
        eventually("the refund", || (remaining(&server) == before).then_some(()));
    }
}

/// However many requests are delayed, others are still served.
#[test]
fn the_number_of_delayed_requests_is_bounded() {
    let server = serve("limit: 1 per 20s, burst: 5", "max_delay_ms: 60000, max_delayed: 1");
    assert_eq!(server.get("/check/p").status, 200);
    let before = remaining(&server);
    let _waiting = send_check(&server);
    eventually("the charge", || (remaining(&server) < before).then_some(()));
    let shed = server.get("/check/p");
    assert_eq!((shed.status, shed.header("retry-after").is_some()), (503, true));
    assert_eq!(shed.header("x-ratelimit-reason"), Some("too many requests are delayed already"));
    assert!(
        shed.header("x-ratelimit-denied-by").is_some() && shed.text().contains("overloaded"),
        "{}",
        shed.text()
    );
    assert_eq!(remaining(&server), before - 1, "the shed request is not charged");
    assert_eq!(server.get("/check/other").status, 200);
    let error = Server::settings_error("forward_auth: {max_delay_ms: 3600000}");
    assert!(error.contains("max_delay_ms") && error.contains("60000"), "{error}");
}
