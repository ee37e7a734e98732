//! A request through the gateway is identified, planned and charged exactly once, over HTTP/1 and HTTP/2, also with an
//! asynchronous store. A plan moves a split counter on to its next shard, so a request that is planned twice skips one.

use crate::harness::{Gateway, Origin, memory, plain};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::conformance::RemoteStore;
use tollgate_http::identity::IDENTIFICATIONS;
use tollgate_testing::own_process::in_own_process;

const RULES: &str = "domain: d\ndescriptors:\n  - {key: api_key, name: per-key, limit: 8/hour, split: 8}\n";

/// Identifications are counted per process.
#[test]
fn requests_are_identified_planned_and_charged_once() {
    in_own_process("one_path::requests_are_identified_planned_and_charged_once", every_request_once);
}

fn every_request_once() {
    let origin = Origin::start();
    let store = Arc::new(RemoteStore::new(memory()));
    let gateway = Gateway::start_over(Arc::clone(&store), 1, RULES, "", &plain(origin.address, ""));
    let before = IDENTIFICATIONS.load(Ordering::Relaxed);
    let mut open = gateway.open();
    for _ in 0..8 {
        open.send(b"GET /x HTTP/1.1\r\nHost: h\r\nX-Api-Key: first-caller\r\n\r\n").expect("sent");
        assert_eq!(open.response().expect("an answer").status, 200);
    }
    assert_eq!(store.take_rounds(8), Ok(8), "HTTP/1");
    assert_eq!(IDENTIFICATIONS.load(Ordering::Relaxed) - before, 8);
    let fast = gateway.metric("gateway_fast_path_total");
    assert!(
        (1..8).contains(&fast),
        "the first request opens a connection, the others take the fast path: {fast}"
    );

    let before = IDENTIFICATIONS.load(Ordering::Relaxed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(gateway.address()).await.expect("a connection");
        let (send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        let serving = tokio::spawn(connection);
        for _ in 0..8 {
            let request = http::Request::get("http://h/x").header("x-api-key", "second-caller").body(());
            let mut send = send.clone().ready().await.expect("a stream");
            let (answer, _) = send.send_request(request.expect("a request"), true).expect("sent");
            assert_eq!(answer.await.expect("an answer").status(), 200);
        }
        serving.abort();
    });
    assert_eq!(store.take_rounds(8), Ok(8), "HTTP/2");
    assert_eq!(IDENTIFICATIONS.load(Ordering::Relaxed) - before, 8);
    // The whole limit was admitted, and no more.
    let mut open = gateway.open();
    open.send(b"GET /x HTTP/1.1\r\nHost: h\r\nX-Api-Key: second-caller\r\n\r\n").expect("sent");
    assert_eq!(open.response().expect("an answer").status, 429);
}
