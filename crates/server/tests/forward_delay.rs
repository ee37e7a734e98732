//! `action: delay` at `/check`: the answer comes when the request's turn does, so a proxy that waits for it paces its
//! callers; who would wait for too long is denied, and whoever leaves gives its turn back.

mod harness;

use harness::{Server, Stopwatch, WebConnection, eventually};
use serde_json::json;

fn serve(limit: &str, forward: &str) -> Server {
    let rules = format!("domain: d\ndescriptors:\n  - {{key: path, name: paced, {limit}, action: delay}}\n");
    Server::start(&[&rules], &format!("forward_auth: {{{forward}}}\n"))
}

fn asks(server: &Server) -> WebConnection {
    let mut open = WebConnection::to(server.http).expect("a connection");
    open.send(b"GET /check/p HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    open
}

fn left(server: &Server) -> u64 {
    let look = json!({"domain": "d", "attributes": {"path": "/p"}, "cost": 0});
    server.post("/v1/check", &look).json()["limits"][0]["remaining"].as_u64().expect("a number")
}

/// Without it a proxy passes a burst on that the rule says to spread out.
#[test]
fn answers_come_when_it_is_their_turn() {
    let server = serve("limit: 20/second, burst: 50", "max_delay_ms: 60000");
    let watch = Stopwatch::start();
    let mut asked: Vec<WebConnection> = (0..11).map(|_| asks(&server)).collect();
    for open in &mut asked {
        let answer = open.response().expect("an answer");
        assert_eq!(answer.status, 200);
        assert!(answer.header("ratelimit").is_some());
    }
    // Eleven at twenty a second: the last cannot have come before half a second was over.
    assert!(watch.elapsed() >= std::time::Duration::from_millis(500), "{:?}", watch.elapsed());
}

/// A proxy gives up after its own time, and then nobody would know of a turn that was taken.
#[test]
fn whoever_would_wait_for_too_long_is_denied_and_takes_nothing() {
    let server = serve("limit: 1/hour, burst: 3", "");
    assert_eq!(server.get("/check/p").status, 200);
    let before = left(&server);
    for _ in 0..5 {
        let denied = server.get("/check/p");
        assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("paced")));
        let wait: u64 = denied.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
        assert!((3_000..=3_595).contains(&wait), "an hour, less the five seconds it may be held: {wait}");
        assert_eq!(left(&server), before);
    }
    assert_eq!(server.get("/check/p?deny_status=403").status, 403);
}

/// Two that came together: the first is answered although the second waits for longer than any client would for both.
#[test]
fn an_answer_does_not_wait_for_one_that_is_held_behind_it() {
    let server = serve("limit: 1 per 50s, burst: 3", "max_delay_ms: 60000");
    let mut open = asks(&server);
    open.send(b"GET /check/p HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    assert_eq!(open.response().expect("the first").status, 200);
    let mut both = WebConnection::to(server.http).expect("a connection");
    both.send(b"GET /check/q HTTP/1.1\r\nhost: t\r\n\r\nGET /check/q HTTP/1.1\r\nhost: t\r\n\r\n")
        .expect("sent");
    assert_eq!(both.response().expect("the first of both").status, 200);
}

#[test]
fn whoever_leaves_gives_its_turn_back() {
    let server = serve("limit: 1 per 50s, burst: 3", "max_delay_ms: 60000");
    assert_eq!(server.get("/check/p").status, 200);
    let before = left(&server);
    for _ in 0..4 {
        let waits = asks(&server);
        eventually("its turn to be taken", || (left(&server) < before).then_some(()));
        drop(waits);
        eventually("its turn to be given back", || (left(&server) == before).then_some(()));
    }
}

/// However many are held back, those who are not are still answered.
#[test]
fn those_who_wait_are_bounded() {
    let server = serve("limit: 1 per 20s, burst: 5", "max_delay_ms: 60000, max_delayed: 1");
    assert_eq!(server.get("/check/p").status, 200);
    let before = left(&server);
    let _waits = asks(&server);
    eventually("its turn to be taken", || (left(&server) < before).then_some(()));
    let turned_away = server.get("/check/p");
    assert_eq!((turned_away.status, turned_away.header("retry-after").is_some()), (503, true));
    assert_eq!(left(&server), before - 1, "it has taken nothing");
    assert_eq!(server.get("/check/other").status, 200);
    let refused = Server::refusal("forward_auth: {max_delay_ms: 3600000}");
    assert!(refused.contains("max_delay_ms") && refused.contains("60000"), "{refused}");
}
