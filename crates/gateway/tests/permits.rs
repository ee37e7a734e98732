//! Rules that do more than deny: requests that wait for their turn, pass in a lesser way, or are counted while they last.

mod harness;

use harness::{Gateway, Origin, eventually, plain, request};

fn get(path: &str, key: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: t\r\nx-api-key: {key}\r\n\r\n").into_bytes()
}

/// A queue is worth its wait: those in it are served in their turn, the one too many is told to come back.
#[test]
fn what_is_too_early_waits_and_what_is_too_late_is_denied() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: path, name: paced, limit: 4/second, burst: 3, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    // Pipelined on one connection they would wait for each other; on several they wait for their turn.
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
    assert_eq!(origin.requests(), passed, "who was denied did not reach the upstream");
}

/// Denials are sent together with those behind them; nobody's answer may get lost, or into another's place.
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

/// A caller that leaves the queue does not cost those behind it anything, and its request is not carried out.
#[test]
fn whoever_leaves_the_queue_gives_its_turn_back() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: path, name: paced, limit: 1/hour, burst: 2, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    assert_eq!(gateway.get("/p").status, 200);
    let waits = || {
        let mut open = gateway.open();
        open.send(&get("/p", "k")).expect("sent");
        eventually("it to be held", || (gateway.figure("gateway_held_requests") == 1).then_some(()));
        open
    };
    // An hour each, if it were not given back: the queue of two would be full at the third.
    for _ in 0..5 {
        drop(waits());
        eventually("it to be let go", || (gateway.figure("gateway_held_requests") == 0).then_some(()));
    }
    let stays = waits();
    assert_eq!(origin.requests(), 1);
    drop(stays);
}

/// More waiting requests than the gateway will hold are turned away as load, not as the caller's fault.
#[test]
fn the_queue_is_bounded_as_a_whole() {
    let rules =
        "domain: d\ndescriptors:\n  - {key: path, name: paced, limit: 1/hour, burst: 5, action: delay}\n";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &(plain(origin.address, "") + "  clients: {max_delayed: 1}\n"));
    assert_eq!(gateway.get("/p").status, 200);
    let mut first = gateway.open();
    first.send(&get("/p", "k")).expect("sent");
    eventually("it to be held", || (gateway.figure("gateway_held_requests") == 1).then_some(()));
    assert_eq!(gateway.get("/p").status, 503);
    assert_eq!(origin.requests(), 1);
}

/// The upstream is told to serve less, and the caller is warned before it comes to that.
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
    "domain: d\ndescriptors:\n  - {key: api_key, name: slots, concurrency: {limit: 2, ttl: 2s}}\n";

/// Slots are counted from the decision to the last byte of the answer, however that ends.
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
    // Left by its caller, before there is an answer.
    drop(second);
    eventually("the upstream to hear of it", || (origin.lost() == 1).then_some(()));
    free("the slot of the one that left");
    // Answered.
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
    // Left in the middle of the answer, while another holds the second slot.
    let mut drips = held("/drip");
    origin.release(1);
    drips.read_until(b"drip\r\n").expect("the answer has begun");
    let other = held("/hold");
    assert_eq!(gateway.exchange(&get("/a", "k")).status, 429);
    drop(drips);
    free("the slot of the one that left in the middle");
    // Failed by the upstream.
    assert_eq!(gateway.exchange(&get("/cut", "k")).status, 502);
    free("the slot of the one that failed");
    drop(other);
}

/// A request that lasts longer than its permit keeps its slot: the deadline is for gateways that die.
#[test]
fn long_requests_keep_their_slots() {
    let origin = Origin::start();
    let gateway = Gateway::start(SLOTS, &plain(origin.address, ", timeout: 1h"));
    let mut lines: Vec<_> = (0..2)
        .map(|_| {
            let mut open = gateway.open();
            open.send(&get("/hold", "k")).expect("sent");
            open
        })
        .collect();
    eventually("both at the upstream", || (origin.requests() == 2).then_some(()));
    let watch = harness::Stopwatch::start();
    // Beyond the deadline of 2 s, and then some.
    while watch.elapsed() < std::time::Duration::from_millis(3_200) {
        assert_eq!(gateway.exchange(&get("/a", "k")).status, 429, "after {:?}", watch.elapsed());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    origin.release(2);
    for open in &mut lines {
        assert_eq!(open.response().expect("an answer").status, 200);
    }
}

/// Outbound: many calls to one destination are spread out, and another destination does not wait for them.
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
    // Eleven at twenty a second: the last cannot have gone before half a second was over.
    assert!(watch.elapsed() >= std::time::Duration::from_millis(500), "{:?}", watch.elapsed());
    assert_eq!(origin.requests(), 12);
}
