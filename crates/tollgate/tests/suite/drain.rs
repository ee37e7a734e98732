//! Ending without dropping anyone: rolling updates send SIGTERM while requests are under way.

use crate::harness::{Folder, LONG, Server, Stopwatch, WebConnection, eventually, note};
use serde_json::json;
use std::time::Duration;

const BODY: &[u8] = br#"{"domain":"sample","attributes":{"api_key":"k"}}"#;

fn head(path: &str, length: usize) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n").into_bytes()
}

/// A deployment must not fail the requests that it finds under way, nor hang on them.
#[test]
fn requests_under_way_are_answered_and_then_the_process_ends() {
    let mut server = Server::start(&[]);
    // Half a request: it is under way when the signal comes. So is a connection that has been answered and waits.
    let mut half = WebConnection::to(server.http).expect("a connection");
    half.send(&head("/v1/check", BODY.len())).expect("sent");
    half.send(&BODY[..10]).expect("sent");
    let mut idle = WebConnection::to(server.http).expect("a connection");
    idle.send(b"GET /readyz HTTP/1.1\r\nhost: test\r\n\r\n").expect("sent");
    assert_eq!(idle.response().expect("an answer").status, 200);
    // And one who has only just come, whose request may be on its way.
    let mut fresh = WebConnection::to(server.http).expect("a connection");

    let watch = Stopwatch::start();
    server.signal("TERM");
    let probe = eventually("a probe that reads `not ready`", || {
        let probe = server.get("/readyz?verbose");
        (probe.status == 503).then_some(probe)
    });
    assert_eq!(probe.json()["draining"], true);
    fresh.send(b"GET /readyz HTTP/1.1\r\nhost: test\r\n\r\n").expect("sent");
    assert_eq!(fresh.response().expect("an answer").status, 503);
    assert!(idle.is_at_end(), "a connection without a request is closed");
    assert!(!server.has_ended(), "the half request is waited for");

    half.send(&BODY[10..]).expect("the server still reads");
    let answer = half.response().expect("an answer");
    assert_eq!((answer.status, &answer.json()["allowed"]), (200, &true.into()));
    let status = server.wait();
    assert_eq!(status.code(), Some(0), "{}", server.log());
    note(&format!("drained after {} ms", watch.elapsed().as_millis()));
    server.wait_for_log("drained");
}

/// With nothing under way an end is quick: orchestrators restart hundreds of these one after another.
#[test]
fn an_idle_server_ends_at_once() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&[]);
        let watch = Stopwatch::start();
        server.signal(signal);
        assert_eq!(server.wait().code(), Some(0));
        assert!(watch.elapsed() < Duration::from_secs(5), "SIG{signal}: {:?}", watch.elapsed());
    }
}

/// A caller that never finishes its request cannot keep the process alive.
#[test]
fn a_request_that_never_ends_does_not_hold_the_process() {
    let mut server = Server::start(&[]);
    let mut half = WebConnection::to(server.http).expect("a connection");
    half.send(&head("/v1/check", 1000)).expect("sent");
    half.send(b"{").expect("sent");
    let watch = Stopwatch::start();
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    note(&format!("ended after {} ms", watch.elapsed().as_millis()));
    assert!(watch.elapsed() < LONG);
}

/// The decision log includes the last denials before shutdown.
#[test]
fn every_denial_is_in_the_log_at_the_end() {
    let folder = Folder::new();
    let log = folder.join("decisions.ndjson");
    let rules = "{domain: d, descriptors: [{key: k, limit: 1/hour, name: per-k}]}";
    let flags = ["--decision-log", log.to_str().expect("a plain path"), "--decision-log-allowed", "0"];
    for round in 1..=3 {
        let mut server = Server::start_with_rules(rules, &flags);
        let statuses: Vec<u16> = (0..41).map(|_| server.check("d", &json!({"k": "v"})).status).collect();
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 40);
        server.signal("TERM");
        assert_eq!(server.wait().code(), Some(0), "{}", server.log());
        let text = std::fs::read_to_string(&log).expect("a file");
        assert_eq!(text.lines().count(), 40 * round, "{}", server.log());
        assert!(
            text.lines().all(|line| line.contains("\"verdict\":\"deny\"") && line.ends_with('}')),
            "{text}"
        );
    }
}
