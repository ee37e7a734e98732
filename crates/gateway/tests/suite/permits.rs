//! Actions other than deny: delayed requests, degraded requests, and concurrency permits.

use crate::harness::{self, Gateway, Origin, eventually, plain, request};

fn get(path: &str, key: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: t\r\nx-api-key: {key}\r\n\r\n").into_bytes()
}

/// Requests in the delay queue are served in order; one too many is denied with a retry time.
#[test]
fn early_requests_wait_and_late_ones_are_denied() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: path, name: paced, limit: 30/minute, burst: 3, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    // Pipelined on one connection they would wait for each other; on several they wait in the delay queue.
    let mut lines: Vec<_> = (0..5)
        .map(|_| {
            let mut open = gateway.open();
            open.send(&get("/paced", "k")).expect("sent");
            open
        })
        .collect();
    let mut statuses: Vec<u16> =
        lines.iter_mut().map(|open| open.response().expect("an answer").status).collect();
    statuses.sort_unstable();
    assert!(statuses.starts_with(&[200, 200, 200]) && statuses.ends_with(&[429]), "{statuses:?}");
    let passed = statuses.iter().filter(|status| **status == 200).count();
    assert_eq!(origin.requests(), passed, "denied requests do not reach the upstream");
}

/// Denials are written together with later responses; no response may get lost or out of order.
#[test]
fn denials_among_requests_that_come_together_keep_their_places() {
    let rules = "domain: d\ndescriptors:\n  - {key: path, value: /never, name: never, limit: 0/day}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    let mut open = gateway.open();
    let paths = ["/never", "/never", "/ok", "/never", "/ok", "/ok", "/never"];
    let all: Vec<u8> = paths.iter().flat_map(|path| get(path, "k")).collect();
    open.send(&all).expect("sent");
    for path in paths {
        let answer = open.response().expect("an answer");
        if path == "/ok" {
            assert_eq!((answer.status, answer.text().starts_with("hello")), (200, true), "{}", answer.text());
        } else {
            assert_eq!(
                (answer.status, answer.header("content-type")),
                (429, Some("application/problem+json"))
            );
        }
    }
    open.send(
        b"HEAD /never HTTP/1.1\r\nhost: t\r\n\r\nGET /never HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n",
    )
    .expect("sent");
    let head = open.read_until(b"\r\n\r\n").expect("a head");
    assert!(head.starts_with(b"HTTP/1.1 429 "), "{}", String::from_utf8_lossy(&head));
    let last = open.response().expect("an answer");
    assert_eq!((last.status, last.header("connection")), (429, Some("close")));
    assert!(open.is_at_end());
    assert_eq!(origin.requests(), 3, "a denial costs no upstream connection");
}

/// A client that leaves the delay queue costs those behind it nothing, and its request is not forwarded.
#[test]
fn a_caller_leaving_the_queue_releases_its_place() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: path, name: paced, limit: 1/hour, burst: 2, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    assert_eq!(gateway.get("/p").status, 200);
    let waits = || {
        let mut open = gateway.open();
        open.send(&get("/p", "k")).expect("sent");
        eventually("it to be held", || (gateway.metric("gateway_held_requests") == 1).then_some(()));
        open
    };
    // One hour each: if they were not released, the queue of two would be full at the third.
    for _ in 0..5 {
        drop(waits());
        eventually("it to be let go", || (gateway.metric("gateway_held_requests") == 0).then_some(()));
    }
    let stays = waits();
    assert_eq!(origin.requests(), 1);
    drop(stays);
}

/// Requests beyond the delay queue's size are shed (503), not denied.
#[test]
fn the_queue_is_bounded_as_a_whole() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: path, name: paced, limit: 1/hour, burst: 5, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &(plain(origin.address, "") + "  clients: {max_delayed: 1}\n"));
    assert_eq!(gateway.get("/p").status, 200);
    let mut first = gateway.open();
    first.send(&get("/p", "k")).expect("sent");
    eventually("it to be held", || (gateway.metric("gateway_held_requests") == 1).then_some(()));
    assert_eq!(gateway.get("/p").status, 503);
    assert_eq!(origin.requests(), 1);
}

/// Degraded requests are marked for the upstream, and soft limits warn before.
#[test]
fn degraded_and_warned_requests_are_marked_for_the_upstream() {
    let rules = "domain: d\ndescriptors:\n  - {key: api_key, name: fair-use, limit: 2 per 3650d, algorithm: fixed_window, action: degrade}\n  - {key: path, name: watched, limit: 100/hour, algorithm: fixed_window, soft: {at: 4, action: warn}}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    let mut open = gateway.open();
    for at in 1..=6 {
        open.send(&get("/head", "k")).expect("sent");
        let answer = open.response().expect("an answer");
        let head = answer.text();
        assert_eq!(answer.status, 200);
        assert_eq!(head.contains("x-ratelimit-degraded: fair-use\r\n"), at > 2, "{at}: {head}");
        assert_eq!(head.contains("x-ratelimit-warning: watched\r\n"), at > 4, "{at}: {head}");
        assert_eq!(answer.header("x-ratelimit-warning").is_some(), at > 4, "{at}");
    }
}

const SLOTS: &str =
    "domain: d\ndescriptors:\n  - {key: api_key, name: slots, concurrency: {limit: 2, ttl: 60s}}\n";

/// A permit is held from the decision to the last byte of the response, however that ends.
#[test]
fn a_slot_is_free_when_its_request_has_ended() {
    let origin = Origin::start();
    let gateway = Gateway::start(SLOTS, &plain(origin.address, ", timeout: 1h"));
    let held = |path: &str| {
        let before = origin.requests();
        let mut open = gateway.open();
        open.send(&get(path, "k")).expect("sent");
        eventually("the request at the upstream", || (origin.requests() > before).then_some(()));
        open
    };
    let free = |what: &str| {
        eventually(what, || {
            let mut open = gateway.open();
            open.send(&get("/a", "k")).expect("sent");
            (open.response().expect("an answer").status == 200).then_some(())
        });
    };
    let (mut first, second) = (held("/hold"), held("/hold"));
    let denied = gateway.exchange(&get("/a", "k"));
    assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("slots")));
    assert_eq!(gateway.exchange(&get("/a", "other")).status, 200);
    // Abandoned before the response.
    drop(second);
    eventually("the upstream to see the disconnect", || (origin.lost() == 1).then_some(()));
    free("the permit of the abandoned request");
    // Completed.
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
    // Abandoned in the middle of the response, while another request holds the second permit.
    let mut drips = held("/drip");
    origin.release(1);
    drips.read_until(b"drip\r\n").expect("the response has begun");
    let other = held("/hold");
    assert_eq!(gateway.exchange(&get("/a", "k")).status, 429);
    drop(drips);
    free("the permit of the request abandoned midway");
    // Failed by the upstream.
    assert_eq!(gateway.exchange(&get("/cut", "k")).status, 502);
    free("the permit of the failed request");
    drop(other);
}

/// A request that outlasts its permit's TTL keeps the permit: the TTL is for gateways that crash.
#[test]
fn long_requests_keep_their_slots() {
    let origin = Origin::start();
    let gateway =
        Gateway::start(&SLOTS.replace("ttl: 60s", "ttl: 4s"), &plain(origin.address, ", timeout: 1h"));
    let mut lines: Vec<_> = (0..2)
        .map(|_| {
            let mut open = gateway.open();
            open.send(&get("/hold", "k")).expect("sent");
            open
        })
        .collect();
    eventually("both at the upstream", || (origin.requests() == 2).then_some(()));
    let watch = harness::Stopwatch::start();
    // Well beyond the TTL of 4 s.
    while watch.elapsed() < std::time::Duration::from_millis(5_500) {
        assert_eq!(gateway.exchange(&get("/a", "k")).status, 429, "after {:?}", watch.elapsed());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    origin.release(2);
    for open in &mut lines {
        assert_eq!(open.response().expect("an answer").status, 200);
    }
}

/// Outbound: many calls to one destination are paced, and another destination does not wait for them.
#[test]
fn webhooks_are_paced_by_destination() {
    let rules = "domain: d\ndescriptors:\n  - {key: path, name: per-destination, limit: 20/second, burst: 50, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    let watch = harness::Stopwatch::start();
    let mut calls: Vec<_> = (0..11)
        .map(|_| {
            let mut open = gateway.open();
            open.send(&request("POST", "/hooks/slow", b"event")).expect("sent");
            open
        })
        .collect();
    assert_eq!(gateway.exchange(&request("POST", "/hooks/other", b"event")).status, 200);
    for open in &mut calls {
        assert_eq!(open.response().expect("an answer").status, 200);
    }
    // Eleven at 20 per second: the last cannot have gone out before half a second.
    assert!(watch.elapsed() >= std::time::Duration::from_millis(500), "{:?}", watch.elapsed());
    assert_eq!(origin.requests(), 12);
}
