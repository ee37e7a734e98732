//! Connections that do nothing, in crowds: whoever has something to ask gets in all the same.

use crate::databases::Place;
use crate::harness::Open;
use crate::node;
use std::process::Command;

/// What somebody at this address is told, who waits for less long than a connection that has asked before may do nothing.
fn health(from: &str, url: &str) -> String {
    let asked = Command::new("curl")
        .args(["-s", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", "--interface", from, url])
        .output()
        .expect("curl runs");
    String::from_utf8_lossy(&asked.stdout).into_owned()
}

#[test]
fn those_who_ask_for_nothing_keep_nobody_out() {
    let place = Place::new();
    let node = node(&place.sqlite("crowd"));
    let mut looks_on = Open::to(node.admin).expect("a connection");
    looks_on.send(b"GET /admin/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    looks_on.read_until(b"event: tick\n").expect("a tick");
    let mut crowd: Vec<Open> = (0..600).map(|_| Open::to(node.admin).expect("a connection")).collect();
    // Half a head is nothing, too.
    crowd.iter_mut().step_by(2).for_each(|one| drop(one.send(b"GET /healthz HTTP/1.1\r\nhost:")));
    let url = format!("http://{}/healthz", node.admin);
    assert_eq!(health("127.0.0.2", &url), "200", "from another address");
    assert_eq!(health("127.0.0.1", &url), "200", "from the same address");
    assert!(crowd[0].is_at_end(), "whoever came first and asked for nothing gave way");
    looks_on.read_until(b"event: tick\n").expect("who was let in and is being answered stays");
    assert!(crowd[599].is_at_end(), "nobody is waited for without an end");
}
