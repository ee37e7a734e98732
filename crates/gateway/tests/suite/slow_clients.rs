//! Clients that send or read slowly: they hold no place in flight before the upstream, whatever the protocol.

use crate::harness::{Gateway, Origin, eventually, plain, request};
use std::io::{Read, Write};
use std::net::TcpListener;

/// One place in flight, and no request waits long for it.
const ONE: &str = "
domain: d
descriptors:
  - {key: global, name: all, limit: 100000/hour}
overload:
  workers: {limit: 1}
";

const UPLOAD: &[u8] = b"POST /u HTTP/1.1\r\nhost: t\r\ncontent-length: 6\r\n\r\n";

#[test]
fn a_slow_upload_holds_no_place_until_it_is_complete() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    // Ten uploads that have begun; there is one place.
    let mut uploads: Vec<_> = (0..10)
        .map(|n| {
            let mut open = gateway.open();
            open.send(UPLOAD).expect("sent");
            open.send(b"abc").expect("sent");
            eventually("the upstream has the head", || (origin.requests() > 2 * n).then_some(()));
            eventually("others are served", || (gateway.get("/x").status == 200).then_some(()));
            open
        })
        .collect();
    for open in &mut uploads {
        open.send(b"def").expect("sent");
        assert_eq!(open.response().expect("an answer").status, 200);
    }
}

#[test]
fn a_complete_upload_has_its_place() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    let mut open = gateway.open();
    open.send(b"POST /hold HTTP/1.1\r\nhost: t\r\ncontent-length: 6\r\n\r\nabc").expect("sent");
    eventually("the upstream has the head", || (origin.requests() == 1).then_some(()));
    open.send(b"def").expect("sent");
    eventually("the upstream works on it", || (gateway.get("/x").status == 503).then_some(()));
    origin.release(1);
    assert_eq!(open.response().expect("an answer").status, 200);
    eventually("the place is free", || (gateway.get("/x").status == 200).then_some(()));
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_upload_leaves_no_place_taken() {
    let origin = Origin::start();
    let gateway = Gateway::start(ONE, &plain(origin.address, ""));
    for n in 0..3 {
        let mut open = gateway.open();
        open.send(UPLOAD).expect("sent");
        eventually("the upstream has the head", || (origin.requests() > n).then_some(()));
    }
    let mut held = gateway.open();
    held.send(&request("GET", "/hold", b"")).expect("sent");
    eventually("the upstream works on it", || (gateway.get("/x").status == 503).then_some(()));
    origin.release(1);
    assert_eq!(held.response().expect("an answer").status, 200);
}

/// An upstream whose responses are larger than all buffers on their way.
fn large_responses() -> std::net::SocketAddr {
    const LENGTH: usize = 64 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            std::thread::spawn(move || {
                let mut head = [0; 4096];
                if stream.read(&mut head).is_ok_and(|read| read > 0) {
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n");
                    // Fails when the reader has left.
                    let _ = stream.write_all(head.as_bytes());
                    let _ = stream.write_all(&vec![b'x'; LENGTH]);
                }
            });
        }
    });
    address
}

#[test]
fn a_client_that_does_not_read_its_response_holds_no_place() {
    let gateway = Gateway::start(ONE, &plain(large_responses(), ""));
    let mut open = Vec::new();
    // None of them reads its body; there is one place.
    for _ in 0..4 {
        let next = eventually("a place is free", || {
            let mut next = gateway.open();
            next.send(&request("GET", "/large", b"")).expect("sent");
            (next.head().expect("a head").status == 200).then_some(next)
        });
        open.push(next);
    }
}
