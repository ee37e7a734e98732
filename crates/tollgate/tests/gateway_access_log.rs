//! The access log of the gateway: a line for everything that came, also for what led nowhere, was refused or was left.

mod harness;

use harness::{Folder, Gateway, Origin, eventually, foreign, plain};
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

/// One line a request, with what an operator looks for, and no query: it may hold secrets.
#[test]
fn a_line_tells_what_happened() {
    let (gateway, origin) = start("", "");
    for _ in 0..3 {
        gateway.exchange(&with_key("GET", "/a?token=secret"));
    }
    let lines = lines(&gateway, 3);
    // A line is written when its answer has been: the order is that of the ends.
    let passed = lines.iter().find(|line| line["status"] == 200).expect("one that passed");
    assert_eq!((&passed["bytes"], &passed["upstream"]), (&7.into(), &origin.address.to_string().into()));
    let denied = lines.iter().find(|line| line["status"] == 429).expect("one that did not");
    assert_eq!(denied["denied_by"], "per-key");
    for line in &lines {
        assert!(line["path"] == "/a" && line["error"].is_null() && !line.to_string().contains("secret"));
    }
}

/// Whoever reads logs must not come by keys: some callers have theirs in the path too.
#[test]
fn a_key_in_the_path_is_not_told() {
    let (gateway, _origin) = start("", "");
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
    let lines = lines(&gateway, 5);
    assert_eq!(lines.iter().filter(|line| line["path"] == "/bot/send").count(), 1, "{lines:?}");
    assert_eq!(lines.iter().filter(|line| line["path"] == "/bot/1…").count(), 4, "{lines:?}");
    assert!(lines.iter().all(|line| !line.to_string().contains("PLANTED")), "{lines:?}");
}

/// Whoever reads the log from a pipe reads JSON and nothing else.
#[test]
fn on_the_standard_output_there_is_json_alone() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &(plain(origin.address, "") + "  access_log: \"-\"\n"));
    gateway.exchange(&with_key("GET", "/a"));
    let output = eventually("a line", || Some(gateway.output()).filter(|output| output.ends_with('\n')));
    let told: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert!(told.len() == 1 && told[0]["path"] == "/a", "{output}");
    assert!(gateway.log().contains("stands before your API"), "{}", gateway.log());
}

/// Somebody who looks for a wrong path, or for someone who tries paths, looks here.
#[test]
fn what_leads_nowhere_has_its_line() {
    let (gateway, _origin) = start(", methods: [GET]", "");
    let request =
        b"DELETE /lost?x=1 HTTP/1.1\r\nhost: t\r\nx-forwarded-for: 198.51.100.7\r\nconnection: close\r\n\r\n";
    assert_eq!(gateway.exchange(request).status, 404);
    let line = &lines(&gateway, 1)[0];
    assert_eq!(
        (&line["status"], &line["method"], &line["path"]),
        (&404.into(), &"DELETE".into(), &"/lost".into())
    );
    assert_eq!(line["remote_address"], "198.51.100.7", "through a trusted proxy");
    assert!(line["route"].is_null() && line["error"].is_null(), "{line}");
}

/// Attempts at smuggling, and broken clients, must be seen: by HTTP/1 and HTTP/2, and those that are merely slow.
#[test]
fn what_is_refused_as_bad_has_its_line() {
    let (gateway, origin) = start("", "  callers: {header_timeout: 300ms}\n");
    let twice = b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n";
    assert_eq!(gateway.exchange(twice).status, 400);
    let mut slow = gateway.open();
    slow.send(b"GET / HTTP/1.1\r\nhos").expect("sent");
    assert_eq!(slow.answer().expect("an answer").status, 408);
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
        assert!(line["path"].is_null(), "of what cannot be read nothing is told: {line}");
    }
    assert_eq!(origin.requests(), 0);
}

/// Callers who give up are the first sign of a slow upstream.
#[test]
fn callers_who_leave_early_have_their_line() {
    let (gateway, origin) = start(", timeout: 1h", "");
    let mut early = gateway.open();
    early.send(b"GET /hold HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    eventually("it at the upstream", || (origin.requests() == 1).then_some(()));
    drop(early);
    let line = &lines(&gateway, 1)[0];
    assert_eq!((&line["status"], &line["path"]), (&499.into(), &"/hold".into()), "{line}");
    assert!(line["error"].as_str().is_some_and(|error| error.contains("left before the answer")), "{line}");
    let mut midway = gateway.open();
    midway.send(b"GET /drip HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    origin.let_go(1);
    midway.read_until(b"drip\r\n").expect("the answer has begun");
    drop(midway);
    let line = &lines(&gateway, 2)[1];
    assert_eq!((&line["status"], &line["path"]), (&200.into(), &"/drip".into()), "{line}");
    assert!(line["error"].as_str().is_some_and(|error| error.contains("before the end")), "{line}");
    assert!(line["bytes"].as_u64() > Some(0), "{line}");
    // Whoever had all of it has not left early, whatever its framing; and an upstream's failure is the upstream's.
    for (at, (method, path)) in
        [("GET", "/a"), ("HEAD", "/a"), ("GET", "/status/204"), ("HEAD", "/none")].into_iter().enumerate()
    {
        let mut open = gateway.open();
        open.send(format!("{method} {path} HTTP/1.1\r\nhost: t\r\n\r\n").as_bytes()).expect("sent");
        open.read_until(b"\r\n\r\n").expect("a head");
        let line = &lines(&gateway, 3 + at)[2 + at];
        assert!(line["error"].is_null(), "{method} {path}: {line}");
    }
    let mut cut = gateway.open();
    cut.send(b"GET /part HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    assert!(cut.answer().is_err(), "half an answer is no answer");
    let line = &lines(&gateway, 7)[6];
    assert!(line["error"].as_str().is_some_and(|error| !error.contains("caller")), "{line}");
}

/// The end waits for what has not been written yet, and not for ever: what nobody took is told.
#[test]
fn the_end_waits_for_the_last_lines() {
    let (origin, folder) = (Origin::start(), Folder::new());
    let pipe = folder.join("access");
    foreign("mkfifo", &[pipe.to_str().expect("a plain path")]);
    // Both ends, so that nobody waits for the other one.
    let reader = std::fs::File::options().read(true).write(true).open(&pipe).expect("a pipe");
    let section = plain(origin.address, "") + &format!("  access_log: {}\n", pipe.display());
    let mut gateway = Gateway::start(RULES, &section);
    let mut caller = gateway.open();
    // More than a pipe holds.
    for _ in 0..2_000 {
        caller.send(b"GET /a HTTP/1.1\r\nhost: t\r\nx-api-key: k\r\n\r\n").expect("sent");
        caller.answer().expect("an answer");
    }
    drop(caller);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
    let log = gateway.log();
    assert!(log.contains("the access log did not take its last lines in time"), "{log}");
    drop(reader);
}
