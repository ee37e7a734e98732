//! One connection, many requests: whatever order, size or pace they come in, each is answered as if it were alone.

mod harness;

use harness::{Server, WebConnection, exchange};
use serde_json::json;

const RULES: &str = "
domain: d
descriptors:
  - {key: k, name: per-key, limit: 1000000/hour}
";

const BODY: &str = r#"{"domain":"d","attributes":{"k":"v"}}"#;

fn post(more: &str, body: &str) -> Vec<u8> {
    format!("POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: {}\r\n{more}\r\n{body}", body.len()).into()
}

/// Clients that send many requests at once must get as many answers, in order, and all of them.
#[test]
fn requests_that_come_together_are_all_answered_in_order() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    let mut all = Vec::new();
    for at in 0..1000 {
        match at % 4 {
            0 => all.extend_from_slice(&post("", BODY)),
            1 => all.extend_from_slice(b"GET /healthz HTTP/1.1\r\nhost: t\r\n\r\n"),
            2 => all.extend_from_slice(
                b"POST /v1/check HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\n{\"\r\n23\r\ndomain\":\"d\",\"attributes\":{\"k\":\"v\"}}\r\n0\r\nx-end: 1\r\n\r\n",
            ),
            // A body that nobody asked for, which looks like a request.
            _ => all.extend_from_slice(
                b"GET /check HTTP/1.1\r\nhost: t\r\ncontent-length: 36\r\n\r\nGET /metrics HTTP/1.1\r\nhost: t\r\n\r\n\r\n",
            ),
        }
    }
    // The server does not read on while answers wait to be read.
    let mut sender = open.again().expect("the same connection");
    let sending = std::thread::spawn(move || sender.send(&all).expect("sent"));
    for at in 0..1000 {
        let answer = open.response().expect("an answer");
        assert_eq!(answer.status, 200, "{at}: {}", answer.text());
        match at % 4 {
            0 | 2 => assert_eq!(answer.json()["limits"][0]["rule"], "per-key"),
            1 => assert_eq!(answer.text(), "ok\n"),
            _ => assert_eq!(answer.text(), "", "the body was not read as a request"),
        }
    }
    sending.join().expect("all is sent");
}

/// Bytes may come one by one, as over a bad line, and in the middle of anything.
#[test]
fn a_request_in_pieces_is_the_same_request() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    for byte in post("", BODY) {
        open.send(&[byte]).expect("sent");
    }
    let answer = open.response().expect("an answer");
    assert_eq!((answer.status, &answer.json()["allowed"]), (200, &json!(true)));
    assert!(answer.header("date").is_some_and(|date| date.ends_with(" GMT")));
}

/// curl waits a second before it sends a body of some size, unless it is told to go on; and must not be told to where the
/// body is refused.
#[test]
fn a_caller_that_waits_to_be_told_is_told() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    let request = post("expect: 100-continue\r\n", BODY);
    let (head, body) = request.split_at(request.len() - BODY.len());
    open.send(head).expect("sent");
    let told = open.read_until(b"\r\n\r\n").expect("an interim answer");
    assert_eq!(told, b"HTTP/1.1 100 Continue\r\n\r\n");
    open.send(body).expect("sent");
    assert_eq!(open.response().expect("an answer").status, 200);
    let refused =
        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 70000\r\nexpect: 100-continue\r\n\r\n";
    open.send(refused).expect("sent");
    assert_eq!(open.response().expect("an answer").status, 413);
    assert!(open.is_at_end(), "nobody can tell what follows");
}

/// Probes and old clients close, or say that they do not; both must work.
#[test]
fn connections_are_kept_as_the_caller_wants() {
    let server = Server::with_rules(RULES);
    let mut open = WebConnection::to(server.http).expect("a connection");
    for _ in 0..2 {
        open.send(b"GET /healthz HTTP/1.0\r\nconnection: keep-alive\r\n\r\n").expect("sent");
        let answer = open.response().expect("an answer");
        assert_eq!((answer.status, answer.header("connection")), (200, Some("keep-alive")));
    }
    open.send(b"HEAD /metrics HTTP/1.1\r\nhost: t\r\n\r\nGET /healthz HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        .expect("sent");
    let head = open.read_until(b"\r\n\r\n").expect("a head");
    assert!(String::from_utf8_lossy(&head).contains("content-length: "), "{head:?}");
    let answer = open.response().expect("an answer");
    assert_eq!((answer.text().as_str(), answer.header("connection")), ("ok\n", Some("close")));
    assert!(open.is_at_end());
    let mut old = WebConnection::to(server.http).expect("a connection");
    old.send(b"GET /healthz HTTP/1.0\r\n\r\n").expect("sent");
    assert_eq!(old.response().expect("an answer").status, 200);
    assert!(old.is_at_end());
}

/// What two readers could read in two ways is read by nobody, here as in the gateway.
#[test]
fn ambiguous_requests_are_refused_and_end_their_connection() {
    let server = Server::with_rules(RULES);
    let heads: [&[u8]; 10] = [
        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: +2\r\n\r\n{}",
        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length : 2\r\n\r\n{}",
        b"POST /v1/check HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /healthz HTTP/1.1\nhost: t\n\n",
        b"GET /healthz HTTP/1.1\r\nhost: t\r\n folded: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: t\r\nhost: u\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: t\r\nx: a\0b\r\n\r\n",
    ];
    for head in heads {
        let answer = exchange(server.http, head).expect("an answer");
        let shown = String::from_utf8_lossy(head);
        assert_eq!((answer.status, answer.header("connection")), (400, Some("close")), "{shown}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{shown}");
        assert_eq!(server.check("d", &json!({"k": "v"})).status, 200);
    }
}
