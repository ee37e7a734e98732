//! Many requests on one connection: each gets the response that it would get alone, whatever their order, size and
//! pace.

use crate::harness::{Server, WebConnection, exchange};
use serde_json::json;

const RULES: &str = "
domain: d
descriptors:
  - {key: k, name: per-key, limit: 1000000/hour}
";

const BODY: &str = r#"{"domain":"d","attributes":{"k":"v"}}"#;

fn post(more: &str, body: &str) -> Vec<u8> {
    format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n{more}\r\n{body}",
        body.len()
    )
    .into()
}

/// Clients that pipeline requests must receive all responses, in order.
#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    let mut all = Vec::new();
    for at in 0..1000 {
        match at % 4 {
            0 => all.extend_from_slice(&post("", BODY)),
            1 => all.extend_from_slice(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"),
            2 => all.extend_from_slice(
                b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\n{\"\r\n23\r\ndomain\":\"d\",\"attributes\":{\"k\":\"v\"}}\r\n0\r\nx-end: 1\r\n\r\n",
            ),
            // A body that is not read and looks like a request.
            _ => all.extend_from_slice(
                b"GET /check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 44\r\n\r\nGET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n\r\n",
            ),
        }
    }
    // The server does not read more while responses are unread.
    let mut sender = open.again().expect("the same connection");
    let sending = std::thread::spawn(move || sender.send(&all).expect("sent"));
    for at in 0..1000 {
        let response = open.response().expect("a response");
        assert_eq!(response.status, 200, "{at}: {}", response.text());
        match at % 4 {
            0 | 2 => assert_eq!(response.json()["limits"][0]["rule"], "per-key"),
            1 => assert_eq!(response.text(), "ok\n"),
            _ => assert_eq!(response.text(), "", "the body was not read as a request"),
        }
    }
    sending.join().expect("all requests are sent");
}

/// Bytes may arrive one by one.
#[test]
fn a_request_may_arrive_in_pieces() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    for byte in post("", BODY) {
        open.send(&[byte]).expect("sent");
    }
    let response = open.response().expect("a response");
    assert_eq!((response.status, &response.json()["allowed"]), (200, &json!(true)));
    assert!(response.header("date").is_some_and(|date| date.ends_with(" GMT")));
}

/// curl waits up to a second for `100 Continue` before it sends a large body; it must not be sent if the body is
/// rejected.
#[test]
fn continue_is_sent_to_clients_that_expect_it() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    let request = post("expect: 100-continue\r\n", BODY);
    let (head, body) = request.split_at(request.len() - BODY.len());
    open.send(head).expect("sent");
    let interim = open.read_until(b"\r\n\r\n").expect("an interim response");
    assert_eq!(interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    open.send(body).expect("sent");
    assert_eq!(open.response().expect("a response").status, 200);
    let rejected =
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 70000\r\nexpect: 100-continue\r\n\r\n";
    open.send(rejected).expect("sent");
    assert_eq!(open.response().expect("a response").status, 413);
    assert!(open.is_at_end(), "the rest of the connection is ambiguous");
}

/// Probes and HTTP/1.0 clients close the connection or request keep-alive; both must work.
#[test]
fn connections_stay_open_as_the_client_requests() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    for _ in 0..2 {
        open.send(b"GET /healthz HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").expect("sent");
        let response = open.response().expect("a response");
        assert_eq!((response.status, response.header("connection")), (200, Some("keep-alive")));
    }
    open.send(b"HEAD /metrics HTTP/1.1\r\nhost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .expect("sent");
    let head = open.read_until(b"\r\n\r\n").expect("a head");
    assert!(String::from_utf8_lossy(&head).contains("content-length: "), "{head:?}");
    let response = open.response().expect("a response");
    assert_eq!((response.text().as_str(), response.header("connection")), ("ok\n", Some("close")));
    assert!(open.is_at_end());
    let mut old = WebConnection::to(server.http).expect("a connection");
    old.send(b"GET /healthz HTTP/1.0\r\n\r\n").expect("sent");
    assert_eq!(old.response().expect("a response").status, 200);
    assert!(old.is_at_end());
}

/// Requests that two parsers could read in two ways are rejected, as in the gateway.
#[test]
fn ambiguous_requests_are_rejected_and_close_their_connection() {
    let server = Server::with_rules(RULES);
    let heads: [&[u8]; 10] = [
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: +2\r\n\r\n{}",
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length : 2\r\n\r\n{}",
        b"POST /v1/check HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /healthz HTTP/1.1\nhost: t\n\n",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n folded: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nhost: u\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: a\0b\r\n\r\n",
    ];
    for head in heads {
        let response = exchange(server.http, head).expect("a response");
        let shown = String::from_utf8_lossy(head);
        assert_eq!((response.status, response.header("connection")), (400, Some("close")), "{shown}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"), "{shown}");
        assert_eq!(server.check("d", &json!({"k": "v"})).status, 200);
    }
}
