//! The gateway's access log: a line for every request, including those without a route, rejected ones and abandoned ones.

use crate::harness::{Gateway, Origin, eventually, plain};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 2 per 3650d, algorithm: fixed_window}
";

/// The log file, removed after the test.
struct Log(PathBuf);

impl Drop for Log {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn start(route: &str) -> (Gateway, Origin, Log) {
    let origin = Origin::start();
    let (gateway, log) = start_before(origin.address, route);
    (gateway, origin, log)
}

/// Starts a gateway before an upstream at this address.
fn start_before(upstream: SocketAddr, route: &str) -> (Gateway, Log) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("access-{}-{}.log", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let log = Log(std::env::temp_dir().join(name));
    let section = plain(upstream, route) + &format!("  access_log: {}\n", log.0.display());
    (Gateway::start(RULES, &section), log)
}

fn lines(log: &Log, count: usize) -> Vec<Value> {
    eventually("the lines", || {
        let text = std::fs::read_to_string(&log.0).unwrap_or_default();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(lines.len() <= count, "{text}");
        (lines.len() == count).then_some(lines)
    })
}

fn with_key(method: &str, path: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nhost: t\r\nx-api-key: k\r\nconnection: close\r\n\r\n").into_bytes()
}

/// One line per request with what operators need, and without the query, which may contain secrets.
#[test]
fn a_log_line_describes_the_request() {
    let (gateway, origin, log) = start("");
    for _ in 0..3 {
        gateway.exchange(&with_key("GET", "/a?token=secret"));
    }
    let lines = lines(&log, 3);
    // A line is written when its response is complete, so lines are in order of completion.
    let passed = lines.iter().find(|line| line["status"] == 200).expect("one that passed");
    assert_eq!((&passed["bytes"], &passed["upstream"]), (&7.into(), &origin.address.to_string().into()));
    let denied = lines.iter().find(|line| line["status"] == 429).expect("one that did not");
    assert_eq!(denied["denied_by"], "per-key");
    for line in &lines {
        assert!(line["path"] == "/a" && line["error"].is_null() && !line.to_string().contains("secret"));
    }
}

/// A reader of the log must not obtain keys, which some clients also put into the path.
#[test]
fn a_key_in_the_path_is_masked() {
    let (gateway, _origin, log) = start("");
    let key = "123456:PLANTED-abcdef";
    for path in ["/bot/123456:PLANTED-abcdef/send", "/bot/123456%3aPLANTED%2Dabcdef/send"] {
        for field in ["x-api-key: ", "authorization: Bearer "] {
            let head = format!("GET {path} HTTP/1.1\r\nhost: t\r\n{field}{key}\r\nconnection: close\r\n\r\n");
            gateway.exchange(head.as_bytes());
        }
    }
    gateway.exchange(
        b"GET /bot/send HTTP/1.1\r\nhost: t\r\nx-api-key: 123456:PLANTED\r\nconnection: close\r\n\r\n",
    );
    let lines = lines(&log, 5);
    assert_eq!(lines.iter().filter(|line| line["path"] == "/bot/send").count(), 1, "{lines:?}");
    assert_eq!(lines.iter().filter(|line| line["path"] == "/bot/1…").count(), 4, "{lines:?}");
    assert!(lines.iter().all(|line| !line.to_string().contains("PLANTED")), "{lines:?}");
}

/// Wrong paths, and clients that probe for paths, show up in the log.
#[test]
fn requests_without_a_route_are_logged() {
    let (gateway, _origin, log) = start(", methods: [GET]");
    let request =
        b"DELETE /lost?x=1 HTTP/1.1\r\nhost: t\r\nx-forwarded-for: 198.51.100.7\r\nconnection: close\r\n\r\n";
    assert_eq!(gateway.exchange(request).status, 404);
    let line = &lines(&log, 1)[0];
    assert_eq!(
        (&line["status"], &line["method"], &line["path"]),
        (&404.into(), &"DELETE".into(), &"/lost".into())
    );
    assert_eq!(line["remote_address"], "198.51.100.7", "through a trusted proxy");
    assert!(line["route"].is_null() && line["error"].is_null(), "{line}");
}

/// A failing upstream is found in the log, with its address and the cause; the client sees neither.
#[test]
fn failed_upstreams_are_logged_with_their_cause() {
    let gone = tollgate_testing::ports::free_address();
    let (gateway, log) = start_before(gone, "");
    let response = gateway.exchange(&with_key("GET", "/a"));
    assert_eq!(response.status, 502);
    assert!(!response.text().contains(&gone.to_string()), "{}", response.text());
    let line = &lines(&log, 1)[0];
    assert_eq!((&line["status"], &line["upstream"]), (&502.into(), &gone.to_string().into()), "{line}");
    assert!(line["error"].as_str().is_some_and(|error| error.contains("refused")), "{line}");
}

/// Clients that give up are the first sign of a slow upstream.
#[test]
fn requests_aborted_by_the_client_are_logged() {
    let (gateway, origin, log) = start(", timeout: 1h");
    let mut early = gateway.open();
    early.send(b"GET /hold HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    eventually("it at the upstream", || (origin.requests() == 1).then_some(()));
    drop(early);
    let line = &lines(&log, 1)[0];
    assert_eq!((&line["status"], &line["path"]), (&499.into(), &"/hold".into()), "{line}");
    assert!(
        line["error"].as_str().is_some_and(|error| error.contains("disconnected before the response")),
        "{line}"
    );
    let mut midway = gateway.open();
    midway.send(b"GET /drip HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    origin.release(1);
    midway.read_until(b"drip\r\n").expect("the response has begun");
    drop(midway);
    let line = &lines(&log, 2)[1];
    assert_eq!((&line["status"], &line["path"]), (&200.into(), &"/drip".into()), "{line}");
    assert!(line["error"].as_str().is_some_and(|error| error.contains("before the end")), "{line}");
    assert!(line["bytes"].as_u64() > Some(0), "{line}");
    // A client that received everything did not disconnect early, whatever the framing; upstream failures are logged as such.
    for (at, (method, path)) in
        [("GET", "/a"), ("HEAD", "/a"), ("GET", "/status/204"), ("HEAD", "/none")].into_iter().enumerate()
    {
        let mut open = gateway.open();
        open.send(format!("{method} {path} HTTP/1.1\r\nhost: t\r\n\r\n").as_bytes()).expect("sent");
        open.read_until(b"\r\n\r\n").expect("a head");
        let line = &lines(&log, 3 + at)[2 + at];
        assert!(line["error"].is_null(), "{method} {path}: {line}");
    }
    let mut cut = gateway.open();
    cut.send(b"GET /part HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    assert!(cut.response().is_err(), "a truncated response is an error");
    let line = &lines(&log, 7)[6];
    assert!(line["error"].as_str().is_some_and(|error| !error.contains("client")), "{line}");
}
