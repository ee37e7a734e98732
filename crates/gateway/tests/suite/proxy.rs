//! The gateway as a plain proxy: what reaches the upstream, what comes back, and what a denial costs.

use crate::harness::{Gateway, Origin, WebConnection, eventually, plain, request};
use tollgate_testing::ports::free_address;

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 2 per 3650d, algorithm: fixed_window}
";

fn with_key(method: &str, path: &str, more: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nhost: api.test\r\nx-api-key: k\r\n{more}\r\n").into_bytes()
}

/// A denied client gets the standard headers, and the upstream does not see the request.
#[test]
fn a_denial_costs_the_upstream_nothing() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    for left in [1, 0] {
        let answer = gateway.exchange(&with_key("GET", "/a", "connection: close\r\n"));
        assert_eq!((answer.status, answer.text().as_str()), (200, "hello 0"));
        assert!(answer.header("ratelimit").is_some_and(|field| field.contains(&format!("r={left}"))));
    }
    let before = (origin.connections(), origin.requests());
    // A body is announced and never sent: the response does not wait for it.
    let mut open = gateway.open();
    open.send(&with_key("POST", "/a", "content-length: 1000000\r\n")).expect("sent");
    let denied = open.response().expect("an answer");
    assert_eq!(denied.status, 429);
    assert!(denied.header("retry-after").is_some() && denied.header("date").is_some());
    assert_eq!(denied.header("content-type"), Some("application/problem+json"));
    assert_eq!(denied.header("x-ratelimit-denied-by"), Some("per-key"));
    assert_eq!((origin.connections(), origin.requests()), before);
    // Without a key no rule applies.
    assert_eq!(gateway.get("/a").status, 200);
}

/// Denied clients keep their connection, so that a client that backs off need not reconnect.
#[test]
fn many_requests_share_a_connection_on_both_sides() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let mut open = gateway.open();
    let statuses: Vec<u16> = (0..5)
        .map(|_| {
            open.send(&with_key("GET", "/a", "")).expect("sent");
            open.response().expect("an answer").status
        })
        .collect();
    assert_eq!(statuses, [200, 200, 429, 429, 429]);
    assert_eq!(origin.connections(), 1);
    // Pipelined, with responses in order.
    let mut both = request("GET", "/first", b"");
    both = String::from_utf8(both).expect("text").replace("connection: close\r\n", "").into_bytes();
    both.extend(request("GET", "/status/404", b""));
    open.send(&both).expect("sent");
    assert_eq!(open.response().expect("the first").status, 200);
    assert_eq!(open.response().expect("the second").status, 404);
}

/// Hop-by-hop headers are not forwarded, and claims of untrusted clients are overwritten.
#[test]
fn fields_of_one_hop_do_not_travel_and_forged_ones_are_overwritten() {
    let origin = Origin::start();
    let untrusting = "identity: {trusted: [\"10.0.0.0/8\"], trusted_headers: {tier_key: x-tier}}";
    let gateway = Gateway::start_with(RULES, untrusting, &plain(origin.address, ""));
    let answer = gateway.exchange(
        b"GET /head HTTP/1.1\r\nHost: api.test\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 5\r\n\
          TE: gzip\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\nUpgrade: h2c\r\n\
          X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-Proto: gopher\r\nX-Forwarded-Host: evil\r\nForwarded: for=6.6.6.6\r\n\
          X-Tier: gold\r\nX-RateLimit-Degraded: forged\r\nX-Kept: yes\r\n\r\n",
    );
    let head = answer.text().to_ascii_lowercase();
    for gone in
        ["x-secret", "keep-alive", "te:", "proxy-", "upgrade", "6.6.6.6", "gopher", "evil", "gold", "forged"]
    {
        assert!(!head.contains(gone), "{gone} in\n{head}");
    }
    for there in
        ["host: api.test", "x-kept: yes", "x-forwarded-for: 127.0.0.1", "x-forwarded-proto: http\r\n"]
    {
        assert!(head.contains(there), "no {there} in\n{head}");
    }
    for gone in ["x-hop", "keep-alive"] {
        assert_eq!(answer.header(gone), None);
    }
    // A trusted proxy's headers are accepted, and its address is appended.
    let trusting = Gateway::start(RULES, &plain(origin.address, ", host_header: inner.test"));
    let head = trusting
        .exchange(
            b"GET /head HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\nX-Forwarded-For: 198.51.100.7\r\n\
              X-Forwarded-Proto: https\r\n\r\n",
        )
        .text()
        .to_ascii_lowercase();
    assert!(head.contains("x-forwarded-for: 198.51.100.7, 127.0.0.1\r\n"), "{head}");
    assert!(head.contains("x-forwarded-proto: https\r\n") && head.contains("host: inner.test\r\n"), "{head}");
    assert!(head.contains("x-forwarded-host: api.test\r\n"), "{head}");
}

/// Bodies are streamed: a response starts before its request has ended, and trailers are forwarded.
#[test]
fn bodies_are_passed_on_while_they_come() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let mut open = gateway.open();
    open.send(
        b"POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n3\r\none\r\n",
    )
    .expect("sent");
    let mut seen = open.read_until(b"one\r\n").expect("the first piece comes back before the second is sent");
    open.send(b"3\r\ntwo\r\n").expect("sent");
    seen.extend(open.read_until(b"two\r\n").expect("the second piece"));
    open.send(
        b"0\r\nx-sum: 42\r\ncontent-length: 7\r\nx-forwarded-for: 6.6.6.6\r\nX_RateLimit_Degraded: r\r\nx-api-key: k\r\n\r\n",
    )
    .expect("sent");
    seen.extend(open.read_until(b"\r\n\r\n").expect("the end"));
    let text = String::from_utf8(seen).expect("text");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(
        text.ends_with("0\r\nx-sum: 42\r\n\r\n"),
        "trailers with framing or identity headers are dropped: {text}"
    );
    // The connection stays usable.
    open.send(&with_key("GET", "/a", "")).expect("sent");
    assert_eq!(open.response().expect("an answer").text(), "hello 0");
    // A large body with a declared length.
    let body: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let answer = gateway.exchange(&request("POST", "/echo", &body));
    assert_eq!(answer.body, body);
}

/// A client that gets a response in the middle of its body can read it, and then the end: a reset would lose both.
#[test]
fn an_answer_before_the_body_is_read_arrives() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    for more in ["", "connection: close\r\n"] {
        let mut open = gateway.open();
        open.send(&with_key("POST", "/early", &format!("content-length: 200000\r\n{more}"))).expect("sent");
        open.send(&[b'x'; 100_000]).expect("sent");
        let answer = open.response().expect("an answer");
        assert_eq!((answer.status, answer.text().as_str()), (413, "early"));
        assert!(open.is_at_end(), "an end, and no reset");
    }
}

/// With `Expect: 100-continue` a client gets `100` if allowed and the denial if not, without having sent its body.
#[test]
fn expectations_are_answered_before_the_body() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let mut open = gateway.open();
    for _ in 0..2 {
        open.send(&with_key("POST", "/a", "expect: 100-continue\r\ncontent-length: 4\r\n")).expect("sent");
        assert_eq!(open.read_until(b"\r\n\r\n").expect("a go-ahead"), b"HTTP/1.1 100 Continue\r\n\r\n");
        open.send(b"body").expect("sent");
        assert_eq!(open.response().expect("an answer").text(), "hello 4");
    }
    assert!(origin.heads().iter().all(|head| !head.contains("expect")));
    open.send(&with_key("POST", "/a", "expect: 100-continue\r\ncontent-length: 4\r\n")).expect("sent");
    assert_eq!(open.response().expect("an answer").status, 429);
    assert!(open.is_at_end(), "the body may or may not follow, so the connection is closed");
}

/// Responses without bodies, old clients, and paths without a route.
#[test]
fn the_odd_answers_are_framed_rightly() {
    let origin = Origin::start();
    let section = plain(origin.address, ", methods: [GET, HEAD, POST]");
    let gateway = Gateway::start(RULES, &section);
    let mut open = gateway.open();
    for status in [204, 304] {
        open.send(&with_key("GET", &format!("/status/{status}"), "")).expect("sent");
        let text = String::from_utf8(open.read_until(b"\r\n\r\n").expect("a head")).expect("text");
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")) && !text.contains("chunked"), "{text}");
    }
    let old = gateway.exchange(b"GET /drop HTTP/1.0\r\n\r\n");
    assert_eq!((old.status, old.header("connection")), (200, Some("close")));
    let lost = gateway.exchange(&request("DELETE", "/a", b""));
    assert_eq!((lost.status, lost.header("content-type")), (404, Some("application/problem+json")));
    // Truncated by the upstream: the client must notice.
    let mut open = gateway.open();
    open.send(&request("GET", "/part", b"")).expect("sent");
    assert!(open.response().is_err(), "a truncated response is an error");
    assert_eq!(gateway.get("/a").status, 200);
}

/// Idempotent requests are retried once on another backend; others are never retried.
#[test]
fn only_harmless_requests_are_tried_again() {
    let origin = Origin::start();
    let (dead, live) = (free_address(), origin.address);
    let section = format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams: {{api: {{addresses: [\"{dead}\", \"{live}\"], eject: {{after: 0}}}}, cut: {{addresses: [\"{live}\"]}}}}\n  routes:\n    - {{path: \"/{{*rest}}\", upstream: api}}\n    - {{path: /cut, upstream: cut}}\n"
    );
    let gateway = Gateway::start(RULES, &section);
    for _ in 0..20 {
        assert_eq!(gateway.get("/a").status, 200, "the request is retried on the live backend");
    }
    let posts: Vec<u16> = (0..40).map(|_| gateway.exchange(&request("POST", "/a", b"x")).status).collect();
    assert!(posts.contains(&200) && posts.contains(&502) && posts.len() == 40, "{posts:?}");
    // The upstream reads the request and does not respond: one more attempt for a GET, none for a POST.
    let before = origin.requests();
    assert_eq!(gateway.get("/cut").status, 502);
    assert_eq!(origin.requests() - before, 2);
    let before = origin.requests();
    assert_eq!(gateway.exchange(&request("POST", "/cut", b"x")).status, 502);
    assert_eq!(origin.requests() - before, 1);
}

/// A rolling update: requests in flight complete, idle connections are closed, the process ends.
#[test]
fn draining_answers_requests_on_open_connections() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &plain(origin.address, ""));
    let mut idle = gateway.open();
    idle.send(&with_key("GET", "/a", "")).expect("sent");
    assert_eq!(idle.response().expect("an answer").status, 200);
    let (mut silent, mut fresh) = (gateway.open(), gateway.open());
    let mut held = gateway.open();
    held.send(&with_key("GET", "/hold", "")).expect("sent");
    eventually("the request at the upstream", || (origin.requests() == 2).then_some(()));
    gateway.drain();
    assert!(idle.is_at_end());
    // A request that was sent as draining began.
    fresh.send(b"GET /a HTTP/1.1\r\nhost: api.test\r\n\r\n").expect("sent");
    let answer = fresh.response().expect("an answer");
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    assert!(silent.is_at_end());
    eventually("no new connections", || WebConnection::to(gateway.address()).is_err().then_some(()));
    origin.release(1);
    let answer = held.response().expect("an answer");
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    eventually("the end", || gateway.has_ended().then_some(()));
}

/// A request to an upstream that does not respond times out with a status for the upstream.
#[test]
fn slow_upstreams_are_given_up() {
    let origin = Origin::start();
    // Only what the upstream holds back has short timeouts.
    let section = plain(origin.address, "")
        + "    - {path: /hold, upstream: api, domain: d, timeout: 500ms}\n    - {path: /drip, upstream: api, domain: d, idle_timeout: 2s}\n";
    let gateway = Gateway::start(RULES, &section);
    assert_eq!(gateway.get("/hold").status, 504);
    eventually("its connection to be closed", || (origin.lost() == 1).then_some(()));
    let mut drip = gateway.open();
    origin.release(1);
    drip.send(&with_key("GET", "/drip", "")).expect("sent");
    drip.read_until(b"drip\r\n").expect("the first piece");
    assert!(drip.is_at_end(), "an idle timeout within a response ends it");
    assert_eq!(gateway.get("/a").status, 200);
}
