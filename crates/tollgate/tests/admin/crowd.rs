//! Floods of idle connections: a client that sends a request is served all the same.

use crate::databases::Place;
use crate::harness::{WebConnection, run};
use crate::node;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Command;

/// The response to a new client at this address, within less time than a connection may be idle after a request.
fn health(from: &str, url: &str) -> String {
    let asked = Command::new("curl")
        .args(["-s", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", "--interface", from, url])
        .output()
        .expect("curl runs");
    String::from_utf8_lossy(&asked.stdout).into_owned()
}

/// How a crowd finds the server.
enum Server {
    Runs,
    /// It does not run while most of the crowd connects and sends what it sends, as on a busy machine: it then closes
    /// connections whose bytes it has not read.
    Waits,
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs curl: make test")]
fn idle_connections_do_not_block_new_ones() {
    for server in [Server::Runs, Server::Waits] {
        crowd_does_not_block_new_connections(&server);
    }
}

fn crowd_does_not_block_new_connections(server: &Server) {
    let place = Place::new();
    let node = node(&place.sqlite("crowd"));
    let mut looks_on = WebConnection::to(node.admin).expect("a connection");
    looks_on.send(b"GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    looks_on.read_until(b"event: tick\n").expect("a tick");
    let mut crowd = Vec::new();
    let mut grow = |many: usize| {
        crowd.extend((0..many).map(|_| WebConnection::to(node.admin).expect("a connection")));
    };
    grow(200);
    // Those before it have been accepted.
    assert_eq!(node.ask("GET", "/healthz", &[], &Value::Null).status, 200);
    if let Server::Waits = server {
        node.server.signal("STOP");
    }
    grow(400);
    // Half a head is nothing, too.
    crowd.iter_mut().step_by(2).for_each(|one| drop(one.send(b"GET /healthz HTTP/1.1\r\nhost:")));
    if let Server::Waits = server {
        node.server.signal("CONT");
    }
    let url = format!("http://{}/healthz", node.admin);
    assert_eq!(health("127.0.0.2", &url), "200", "from another address");
    assert_eq!(health("127.0.0.1", &url), "200", "from the same address");
    // The server may have closed it with the half head unread, which resets it.
    assert!(crowd[0].is_closed(), "the oldest idle connection was closed");
    looks_on.read_until(b"event: tick\n").expect("who was let in and is being answered stays");
    assert!(crowd[599].is_at_end(), "no connection is waited for indefinitely");
}

/// A client of the event stream that has received its first event.
pub(crate) fn listener(admin: SocketAddr, more: &str) -> WebConnection {
    let mut listener = WebConnection::to(admin).expect("a connection");
    let request = format!("GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n{more}\r\n");
    listener.send(request.as_bytes()).expect("sent");
    listener.read_until(b"retry: 2000\n\n").expect("a greeting");
    listener
}

/// Event streams are never evicted, so they alone must never take all connections of a network.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs curl: make test")]
fn event_streams_leave_room_for_requests() {
    let place = Place::new();
    let node = node(&place.sqlite("tabs"));
    let mut tabs: Vec<WebConnection> = (0..224).map(|_| listener(node.admin, "")).collect();
    let refused = node.ask("GET", "/admin/v1/events", &[], &Value::Null);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.text().contains("127.0.0.1 already has 224 event streams"), "{}", refused.text());
    let block = json!({"action": "block", "target": {"kind": "api_key", "value": "k"}, "reason": "test"});
    assert_eq!(node.ask("POST", "/admin/v1/emergency", &[], &block).status, 201, "an operator gets in");
    assert_eq!(health("127.0.0.2", &format!("http://{}/admin/v1/stats", node.admin)), "200");
    tabs[0].read_until(b"event: tick\n").expect("and all go on listening");
    drop(tabs);
    crate::harness::eventually("room for listeners again", || {
        let mut again = WebConnection::to(node.admin).ok()?;
        again.send(b"GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").ok()?;
        (again.head().ok()?.status == 200).then_some(())
    });
}

/// A token that is revoked opens nothing any more, a stream that it opened before neither.
#[test]
fn a_revoked_token_ends_its_event_stream() {
    let place = Place::new();
    let db = place.sqlite("revoked");
    let node = node(&db);
    let mut anybody = listener(node.admin, "");
    let make = |name: &str| {
        let made = run(&["token", "create", "--db", &db, "--name", name, "--role", "viewer"]);
        assert_eq!(made.code, Some(0), "{}", made.err);
        listener(node.admin, &format!("authorization: Bearer {}\r\n", made.out.trim()))
    };
    let (mut leaves, mut stays) = (make("leaves"), make("stays"));
    let listed = run(&["token", "list", "--json", "--db", &db]);
    let listed: Value = serde_json::from_str(&listed.out).expect("JSON");
    let all = listed.as_array().or_else(|| listed["tokens"].as_array()).expect("tokens");
    let id = all.iter().find(|token| token["name"] == "leaves").and_then(|token| token["id"].as_str());
    assert_eq!(run(&["token", "revoke", "--db", &db, id.expect("an id")]).code, Some(0));
    // The last chunk: the stream has ended, and was not broken off.
    leaves.read_until(b"\r\n0\r\n\r\n").expect("an end");
    anybody.read_until(b"\r\n0\r\n\r\n").expect("from the first token on, everybody needs one");
    stays.read_until(b": still here\n\n").expect("still let in");
    stays.read_until(b"event: tick\n").expect("a tick");
}
