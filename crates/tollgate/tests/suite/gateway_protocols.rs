//! A gateway serves checks as `serve` does, where it is configured to: over HTTP, gRPC and the Redis protocol.

use crate::harness::{Folder, Gateway, Origin, exchange, plain, run};
use bytes::Bytes;
use std::net::SocketAddr;
use tokio::net::TcpStream;

const RULES: &str = "
domain: d
descriptors:
  - {key: tenant, name: per-tenant, limit: 1/hour}
  - {key: endpoint, value: 'GET /users/{id}', name: users, limit: 2/hour}
";

/// The health of Envoy's service, by gRPC's own protocol: its `grpc-status`.
async fn health(address: SocketAddr) -> String {
    let stream = TcpStream::connect(address).await.expect("a connection");
    let (send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    let mut send = send.ready().await.expect("room for a stream");
    let (answer, mut body) = send.send_request(request.body(()).expect("a request"), false).expect("sent");
    body.send_data(Bytes::from_static(&[0; 5]), true).expect("sent");
    let mut body = answer.await.expect("an answer").into_body();
    while let Some(piece) = body.data().await {
        piece.expect("a piece of the message");
    }
    let trailers = body.trailers().await.expect("an end").expect("trailers");
    trailers["grpc-status"].to_str().expect("a number").to_owned()
}

/// A configured address of `serve` is opened, with the settings of `serve`.
#[test]
fn every_configured_protocol_server_is_open() {
    let origin = Origin::start();
    let more = "grpc: 127.0.0.1:0\nresp: 127.0.0.1:0\nwho: {headers: {tenant: x-tenant}, routes: ['GET /users/{id}']}\nforward_auth: {domain: d}";
    let gateway = Gateway::start_in(Folder::new(), RULES, more, &plain(origin.address, ""));
    // A proxy that asks: callers are identified as configured.
    let check = |path: &str, field: &str| {
        let request =
            format!("GET /check{path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{field}\r\n").into_bytes();
        exchange(gateway.http, &request).expect("an answer").status
    };
    assert_eq!([check("", "x-tenant: a\r\n"), check("", "x-tenant: a\r\n")], [200, 429]);
    assert_eq!(["/users/1", "/users/2", "/users/3"].map(|path| check(path, "")), [200, 200, 429]);
    // The same counters as the traffic's.
    let through = gateway.exchange(b"GET /a HTTP/1.1\r\nhost: t\r\nx-tenant: a\r\nconnection: close\r\n\r\n");
    assert_eq!(through.status, 429);
    let resp = gateway.listener("resp ").unwrap_or_else(|| panic!("no resp in {}", gateway.output()));
    let mut redis = redis::Client::open(format!("redis://{resp}")).and_then(|client| client.get_connection());
    let redis = redis.as_mut().expect("the Redis protocol");
    let throttled: Vec<i64> =
        redis::cmd("CL.THROTTLE").arg(&["key", "0", "1", "3600"]).query(redis).expect("an answer");
    assert_eq!(throttled[0], 0);
    let grpc = gateway.listener("grpc ").unwrap_or_else(|| panic!("no grpc in {}", gateway.output()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    assert_eq!(runtime.block_on(health(grpc)), "0");
}

/// Addresses that are not configured are not open at a gateway, and `off` is a word for every address.
#[test]
fn protocols_not_configured_are_closed() {
    let origin = Origin::start();
    for more in ["", "grpc: off\nresp: off"] {
        let gateway = Gateway::start_in(Folder::new(), RULES, more, &plain(origin.address, ""));
        for name in ["grpc ", "resp "] {
            assert_eq!(gateway.listener(name), None, "{}", gateway.output());
        }
        assert_eq!(gateway.get("/a").status, 200);
    }
    let refused = run(&["serve", "--http", "off", "--grpc", "off", "--resp", "off", "--admin", "off"]);
    assert!(
        refused.code == Some(1) && refused.err.contains("enable at least one of --grpc, --http, --resp"),
        "{}",
        refused.err
    );
}
