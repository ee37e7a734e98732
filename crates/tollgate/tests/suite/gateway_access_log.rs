//! The access log of the gateway as a process: on its standard output, at its end, and what is refused before it is a request.

use crate::harness::{Folder, Gateway, Origin, eventually, foreign, plain};
use serde_json::Value;

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 2 per 3650d, algorithm: fixed_window}
";

fn start(route: &str, more: &str) -> (Gateway, Origin) {
    let origin = Origin::start();
    let section = plain(origin.address, route) + "  access_log: access.log\n" + more;
    (Gateway::start(RULES, &section), origin)
}

fn lines(gateway: &Gateway, count: usize) -> Vec<Value> {
    let path = gateway.folder.join("access.log");
    eventually("the lines", || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(lines.len() <= count, "{text}");
        (lines.len() == count).then_some(lines)
    })
}

fn with_key(method: &str, path: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nhost: t\r\nx-api-key: k\r\nconnection: close\r\n\r\n").into_bytes()
}

/// A reader of the log from a pipe gets JSON and nothing else.
#[test]
fn standard_output_is_only_json() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &(plain(origin.address, "") + "  access_log: \"-\"\n"));
    gateway.exchange(&with_key("GET", "/a"));
    let output = eventually("a line", || Some(gateway.output()).filter(|output| output.ends_with('\n')));
    let records: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert!(records.len() == 1 && records[0]["path"] == "/a", "{output}");
    gateway.wait_for_log("gateway is listening");
}

/// Attempts at smuggling, and broken clients, must be seen: by HTTP/1 and HTTP/2, and those that are merely slow.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs curl: make test")]
fn malformed_requests_are_logged() {
    let (gateway, origin) = start("", "  clients: {header_timeout: 2s}\n");
    let twice = b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n";
    assert_eq!(gateway.exchange(twice).status, 400);
    let mut slow = gateway.open();
    slow.send(b"GET / HTTP/1.1\r\nhos").expect("sent");
    assert_eq!(slow.response().expect("an answer").status, 408);
    let target = format!("http://{}/a/../b", gateway.address());
    let status = foreign(
        "curl",
        &["-s", "-o", "/dev/null", "-w", "%{http_code}", "--http2-prior-knowledge", "--path-as-is", &target],
    );
    assert_eq!(status, "400");
    let lines = lines(&gateway, 3);
    for status in [400, 408] {
        let line = lines.iter().find(|line| line["status"] == status).expect("a line");
        assert_eq!(line["remote_address"], "127.0.0.1");
        assert!(line["error"].as_str().is_some_and(|error| error.len() > 10), "{line}");
        assert!(line["bytes"].as_u64().is_some_and(|bytes| bytes > 10), "the body that was sent: {line}");
        assert!(line["path"].is_null(), "a malformed request has no path: {line}");
    }
    assert_eq!(origin.requests(), 0);
}

/// Shutdown waits for lines not written yet, and not for ever: lost lines are reported.
#[test]
fn the_end_waits_for_the_last_lines() {
    let (origin, folder) = (Origin::start(), Folder::new());
    let pipe = folder.join("access");
    foreign("mkfifo", &[pipe.to_str().expect("a plain path")]);
    // Both ends, so that neither waits for the other one.
    let reader = std::fs::File::options().read(true).write(true).open(&pipe).expect("a pipe");
    let section = plain(origin.address, "") + &format!("  access_log: {}\n", pipe.display());
    let mut gateway = Gateway::start(RULES, &section);
    let mut caller = gateway.open();
    // More than a pipe holds.
    for _ in 0..2_000 {
        caller.send(b"GET /a HTTP/1.1\r\nhost: t\r\nx-api-key: k\r\n\r\n").expect("sent");
        caller.response().expect("an answer");
    }
    drop(caller);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    let log = gateway.log();
    assert!(log.contains("access log lines lost at shutdown"), "{log}");
    drop(reader);
}
