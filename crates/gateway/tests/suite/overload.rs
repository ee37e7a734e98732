//! Shedding before an upstream: by priority, without a charge, with a reason; places in flight are given back however a
//! request ends.

use crate::harness::{Gateway, Origin, WebConnection, eventually, plain, request};
use std::io::{Read, Write};
use std::net::TcpListener;

/// One place in flight; critical requests have a second one in reserve.
const ONE: &str = "
domain: d
descriptors:
  - {key: global, name: all, limit: 100/hour}
overload:
  priorities: [{when: {path: '/*critical*'}, priority: critical}, {when: {path: '/*test*'}, priority: sheddable}]
  workers: {limit: 1}
";

fn held(gateway: &Gateway, origin: &Origin, path: &str) -> WebConnection {
    let before = origin.requests();
    let mut open = gateway.open();
    open.send(&request("GET", path, b"")).expect("sent");
    eventually("the upstream has the request", || (origin.requests() > before).then_some(()));
    open
}

#[test]
fn a_request_without_a_place_is_shed_and_charged_nothing_but_a_critical_one_passes() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    let mut first = held(&gateway, &origin, "/hold/1");
    let shed = gateway.get("/x");
    assert_eq!(shed.status, 503, "{}", shed.text());
    assert_eq!(shed.header("x-ratelimit-denied-by"), Some("overload/workers"));
    assert!(shed.header("retry-after").is_some_and(|wait| wait.parse::<u64>().is_ok_and(|wait| wait >= 1)));
    assert!(shed.text().contains("sheds requests"), "{}", shed.text());
    assert_eq!(gateway.get("/critical").status, 200, "the reserve is for critical requests");
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
    // The place is free again, and what was shed was not counted: two passed before this one.
    let passed = gateway.get("/x");
    assert_eq!((passed.status, passed.header("x-ratelimit-remaining")), (200, Some("97")));
}

#[test]
fn what_is_shed_does_not_reach_the_upstream() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    let mut first = held(&gateway, &origin, "/hold/1");
    let waiting: Vec<_> = (0..8)
        .map(|n| {
            let mut open = gateway.open();
            open.send(&request("GET", &format!("/{n}"), b"")).expect("sent");
            open
        })
        .collect();
    for mut line in waiting {
        assert_eq!(
            line.response().expect("an answer").status,
            503,
            "the place is taken for longer than one waits"
        );
    }
    assert_eq!(origin.requests(), 1);
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
}

#[test]
fn a_client_that_leaves_gives_its_place_back() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    drop(held(&gateway, &origin, "/hold/1"));
    eventually("the place is free", || (gateway.get("/x").status == 200).then_some(()));
}

#[test]
fn a_denied_request_gives_its_place_back() {
    let rules = ONE.replace("100/hour", "1/hour");
    let origin = Origin::start();
    let gateway = Gateway::start(&rules, &plain(origin.address, ""));
    let statuses: Vec<u16> = (0..5).map(|_| gateway.get("/x").status).collect();
    assert_eq!(statuses, [200, 429, 429, 429, 429], "429, not 503: the place was free each time");
}

#[test]
fn a_delayed_request_needs_a_place_after_its_delay() {
    let rules = ONE.replace(
        "{key: global, name: all, limit: 100/hour}",
        "{key: path, value: /paced, name: paced, limit: 20/minute, burst: 2, action: delay}",
    );
    let origin = Origin::start();
    let gateway = Gateway::start(&rules, &plain(origin.address, ""));
    // The second is delayed by three seconds, and then another one has the place.
    assert_eq!(gateway.get("/paced").status, 200);
    let mut second = gateway.open();
    second.send(&request("GET", "/paced", b"")).expect("sent");
    let mut other = held(&gateway, &origin, "/hold/1");
    let shed = second.response().expect("an answer");
    assert_eq!((shed.status, shed.header("x-ratelimit-denied-by")), (503, Some("overload/workers")));
    origin.release(1);
    assert_eq!(other.response().expect("an answer").status, 200);
}

#[test]
fn in_shadow_mode_nothing_is_shed() {
    let rules = format!("{ONE}  shadow: true\n");
    let origin = Origin::start();
    let gateway = Gateway::start(&rules, &plain(origin.address, ""));
    let mut first = held(&gateway, &origin, "/hold/1");
    assert_eq!(gateway.get("/x").status, 200);
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
}

#[test]
fn what_the_fleet_reserves_for_critical_requests_is_not_taken_by_others() {
    let rules = "
domain: d
overload:
  priorities: [{when: {path: '/*critical*'}, priority: critical}]
  fleet: {capacity: 2 in flight, reserve: {critical: 50%}}
";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    let mut first = held(&gateway, &origin, "/hold/1");
    let shed = gateway.get("/x");
    assert_eq!((shed.status, shed.header("x-ratelimit-denied-by")), (503, Some("overload/fleet")));
    assert_eq!(
        shed.header("retry-after").and_then(|wait| wait.parse::<u64>().ok()).map(|wait| wait <= 10),
        Some(true)
    );
    let mut second = held(&gateway, &origin, "/hold/critical");
    assert_eq!(gateway.get("/critical").status, 503, "the whole capacity is in use");
    origin.release(2);
    assert_eq!((first.response().expect("one").status, second.response().expect("two").status), (200, 200));
    eventually("the permits are released", || (gateway.get("/x").status == 200).then_some(()));
}

/// An upstream that answers with these bytes and keeps the connection open.
fn answering(answer: &'static [u8]) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut head = [0; 4096];
            if stream.read(&mut head).is_ok_and(|read| read > 0) {
                stream.write_all(answer).expect("sent");
                open.push(stream);
            }
        }
    });
    address
}

/// Otherwise callers that hold back the ends of many bodies have the upstream work on all of them at once, and critical requests
/// are shed until it has.
#[test]
fn the_ends_of_bodies_wait_for_a_place_and_leave_the_reserve_to_others() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    let heads = [
        "content-length: 4\r\n\r\nabc",
        "content-length: 4\r\n\r\nabc",
        "transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ];
    let ends = ["d", "d", "1\r\nd\r\n0\r\n\r\n"];
    let mut uploads: Vec<WebConnection> = Vec::new();
    for head in heads {
        let before = origin.requests();
        let mut open = gateway.open();
        open.send(format!("POST /hold/1 HTTP/1.1\r\nhost: t\r\n{head}").as_bytes()).expect("sent");
        eventually("the upstream has the head", || (origin.requests() > before).then_some(()));
        uploads.push(open);
    }
    eventually("places are given back", || (gateway.get("/x").status == 200).then_some(()));
    for (waiting, (upload, end)) in uploads.iter_mut().zip(ends).enumerate() {
        upload.send(end.as_bytes()).expect("sent");
        let state = || gateway.overload();
        eventually("the first to be at the upstream, the others to wait", || {
            (state().in_flight == 1 && state().waiting as usize == waiting).then_some(())
        });
    }
    assert_eq!(gateway.get("/x").status, 503, "new requests go after those that had a place");
    assert_eq!(gateway.get("/critical").status, 200, "the reserve is for critical requests");
    // One that leaves while it waits takes no place with it.
    let last = uploads.pop();
    drop(last);
    for left in [1, 0] {
        origin.release(1);
        assert_eq!(uploads.remove(0).response().expect("an answer").status, 200);
        eventually("the next to go on", || (gateway.overload().in_flight == left).then_some(()));
    }
    eventually("the place to be free", || (gateway.get("/x").status == 200).then_some(()));
}

/// Otherwise a few callers have a backend ejected that is only busy.
#[test]
fn a_body_whose_end_finds_no_place_is_no_failure_of_the_upstream() {
    let origin = Origin::start();
    let pool = format!("[\"{}\"], eject: {{after: 1, for: 1h}}", origin.address);
    let section = plain(origin.address, ", timeout: 200ms")
        .replace(&format!("[\"{}\"]", origin.address), &pool)
        + "    - {path: \"/hold/{*rest}\", upstream: api, domain: d, timeout: 1h}\n";
    let gateway = Gateway::start(ONE, &section);
    let mut upload = gateway.open();
    upload.send(b"POST /u HTTP/1.1\r\nhost: t\r\ncontent-length: 4\r\n\r\nabc").expect("sent");
    eventually("the upstream has the head", || (origin.requests() == 1).then_some(()));
    eventually("the place is given back", || (gateway.overload().in_flight == 0).then_some(()));
    let _held = held(&gateway, &origin, "/hold/1");
    upload.send(b"d").expect("sent");
    let refused = upload.response().expect("an answer");
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")), "{}", refused.text());
    let usable = format!("gateway_endpoint_usable{{upstream=\"api\",address=\"{}\"}}", origin.address);
    assert_eq!(gateway.metric(&usable), 1);
}

/// HTTP/2 clients take the length of a body that does not come for an error.
#[test]
fn a_response_without_content_states_no_length() {
    let gateway = Gateway::start(ONE, &plain(answering(b"HTTP/1.1 204 No\r\ncontent-length: 5\r\n\r\n"), ""));
    let answer = gateway.get("/x");
    assert_eq!((answer.status, answer.header("content-length")), (204, None));
}

#[test]
fn tunnels_and_streams_hold_no_place() {
    let asked = b"GET /s HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let tunnel = b"HTTP/1.1 101 Yes\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let events = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nping\r\n";
    for (answer, status) in [(&tunnel[..], 101), (events, 200)] {
        let gateway = Gateway::start(ONE, &plain(answering(answer), ""));
        let mut open: Vec<WebConnection> = Vec::new();
        // All stay open; there is one place.
        for _ in 0..3 {
            let mut next = gateway.open();
            next.send(asked).expect("sent");
            assert_eq!(next.head().expect("a head").status, status);
            open.push(next);
        }
    }
}

#[test]
fn an_endpoint_that_priorities_name_is_known_behind_a_route_for_everything() {
    let naming = |endpoint: &str| ONE.replace("path: '/*critical*'", &format!("endpoint: '{endpoint}'"));
    let origin = Origin::start();
    let gateway = Gateway::start(&naming("GET /v1/charges/{id}"), &plain(origin.address, ""));
    let mut first = held(&gateway, &origin, "/hold/1");
    assert_eq!(gateway.get("/v1/charges").status, 503);
    assert_eq!(gateway.get("/v1/charges/7").status, 200, "the reserve is for critical requests");
    gateway.replace_rules(&naming("GET /v1/charges"));
    assert_eq!(gateway.get("/v1/charges/7").status, 503);
    assert_eq!(gateway.get("/v1/charges").status, 200, "published rules name other endpoints");
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
}

/// The path is a request's tenant here, and the method its tier.
#[test]
fn a_tenant_within_its_guarantee_of_the_fleet_is_served_while_another_has_all_of_it() {
    let rules = "
domain: d
tier_key: method
overload:
  fleet: {capacity: 4 in flight}
  fairness: {by: path, guarantees: {GET: 25% each}}
";
    let origin = Origin::start();
    let gateway = Gateway::start(rules, &plain(origin.address, ""));
    let hold = |method: &str, path: &str| {
        let before = origin.requests();
        let mut open = gateway.open();
        open.send(&request(method, path, b"")).expect("sent");
        eventually("the upstream has the request", || (origin.requests() > before).then_some(()));
        open
    };
    let mut open: Vec<WebConnection> = (1..=4).map(|n| hold("POST", &format!("/hold/{n}"))).collect();
    let post = || {
        let mut open = gateway.open();
        open.send(&request("POST", "/x", b"")).expect("sent");
        open.response().expect("an answer")
    };
    let shed = post();
    assert_eq!((shed.status, shed.header("x-ratelimit-denied-by")), (503, Some("overload/fleet")));
    open.push(hold("GET", "/hold/5"));
    assert_eq!(post().status, 503, "the capacity is still in use");
    origin.release(5);
    open.iter_mut().for_each(|one| assert_eq!(one.response().expect("an answer").status, 200));
    // The end of a response and the release of its permit are two events.
    eventually("what is given back is lent again", || (post().status == 200).then_some(()));
}
