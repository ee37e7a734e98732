//! Connections to upstreams: the limit on their number, the order of waiting requests, and failures that are not the backend's.

use crate::harness::{Gateway, Origin, WebConnection, eventually, request};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

const RULES: &str = "domain: d\ndescriptors:\n  - {key: api_key, limit: 1000/second}\n";

fn section(address: SocketAddr, settings: &str) -> String {
    format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams: {{api: {{addresses: [\"{address}\"], {settings}}}}}\n  routes:\n    - {{path: \"/{{*rest}}\", upstream: api, retries: 0}}\n"
    )
}

fn metric(gateway: &Gateway, name: &str, address: SocketAddr) -> u64 {
    gateway.metric(&format!("{name}{{upstream=\"api\",address=\"{address}\"}}"))
}

fn send(gateway: &Gateway, method: &str, path: &str) -> WebConnection {
    let mut open = gateway.open();
    open.send(&request(method, path, b"x")).expect("sent");
    open
}

/// A waiting request gets the connection that becomes idle, in order; no request waits beside an idle connection.
#[test]
fn a_free_connection_goes_to_the_longest_waiting_request() {
    let origin = Origin::start();
    let gateway = Gateway::start(RULES, &section(origin.address, "max_connections: 1, connect_timeout: 1h"));
    let mut first = send(&gateway, "POST", "/hold");
    eventually("the request at the upstream", || (origin.requests() == 1).then_some(()));
    let mut others: Vec<WebConnection> = (2..=4)
        .map(|nth| {
            let method = if nth == 3 { "GET" } else { "POST" };
            let open = send(&gateway, method, &format!("/{nth}"));
            let waiting = || metric(&gateway, "gateway_endpoint_requests", origin.address) == nth;
            eventually("it to wait", || waiting().then_some(()));
            open
        })
        .collect();
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
    for open in &mut others {
        assert_eq!(open.response().expect("an answer").status, 200);
    }
    let paths: Vec<String> =
        origin.heads().iter().map(|head| head.split(' ').nth(1).expect("a path").to_owned()).collect();
    assert_eq!(paths, ["/hold", "/2", "/3", "/4"]);
    assert_eq!(origin.connections(), 1);
}

/// A connection limit that is reached says nothing about the backend: it is neither ejected nor unhealthy.
#[test]
fn a_full_house_is_not_the_upstreams_fault() {
    let origin = Origin::start();
    let settings = "max_connections: 1, connect_timeout: 2s, eject: {after: 1, for: 1h}, health: {path: /well, every: 10ms, timeout: 1500ms, unhealthy_after: 1}";
    let gateway = Gateway::start(RULES, &section(origin.address, settings));
    let mut first = send(&gateway, "POST", "/hold");
    let is_there = || origin.heads().iter().any(|head| head.starts_with("POST /hold "));
    eventually("the request at the upstream", || is_there().then_some(()));
    for method in ["POST", "GET"] {
        assert_eq!(send(&gateway, method, "/a").response().expect("an answer").status, 503);
    }
    assert_eq!(metric(&gateway, "gateway_endpoint_usable", origin.address), 1);
    origin.release(1);
    assert_eq!(first.response().expect("an answer").status, 200);
    eventually("room for another", || (gateway.get("/a").status == 200).then_some(()));
}

/// A tunnel counts as a connection for as long as it lasts.
#[test]
fn a_tunnel_keeps_its_place() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut head = [0; 4096];
                let read = stream.read(&mut head).expect("a head");
                let answer: &[u8] = if head[..read].windows(7).any(|word| word == b"upgrade") {
                    b"HTTP/1.1 101 Yes\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
                } else {
                    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
                };
                stream.write_all(answer).expect("sent");
                // Until the peer closes.
                let _ = stream.read(&mut head);
            });
        }
    });
    let gateway = Gateway::start(RULES, &section(address, "max_connections: 1, connect_timeout: 500ms"));
    let mut tunnel = gateway.open();
    tunnel
        .send(b"GET /socket HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        .expect("sent");
    assert_eq!(tunnel.head().expect("a head").status, 101);
    assert_eq!(gateway.get("/a").status, 503);
    drop(tunnel);
    eventually("room for another", || (gateway.get("/a").status == 200).then_some(()));
}

/// A server that sends a body where none belongs would choose the response to another caller's request.
#[test]
fn a_body_after_a_bodiless_response_is_dropped() {
    for (method, status) in [("HEAD", "200 OK"), ("GET", "304 Not Modified"), ("GET", "204 No Content")] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let upstream = std::thread::spawn(move || {
            let mut request = [0; 4096];
            let (mut first, _) = listener.accept().expect("a connection");
            assert!(first.read(&mut request).expect("a request") > 0);
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: 45\r\n\r\n");
            first.write_all(head.as_bytes()).expect("sent");
            // The body comes when the next request is on its way.
            if first.read(&mut request).is_ok_and(|length| length > 0) {
                first.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged").expect("sent");
                return;
            }
            let (mut second, _) = listener.accept().expect("another connection");
            assert!(second.read(&mut request).expect("a request") > 0);
            second.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nreal").expect("sent");
        });
        let gateway = Gateway::start(RULES, &section(address, "keep_alive: 1h"));
        let mut open = gateway.open();
        open.send(format!("{method} /a HTTP/1.1\r\nhost: t\r\n\r\n").as_bytes()).expect("sent");
        open.head().expect("a head");
        open.send(b"GET /b HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
        assert_eq!(open.response().expect("an answer").text(), "real", "{method} {status}");
        upstream.join().expect("the upstream's end");
    }
}
