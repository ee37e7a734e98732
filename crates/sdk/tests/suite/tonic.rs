//! A real gRPC server behind the layer, called by tonic's client.
#![cfg(feature = "remote")]

use std::time::Duration;
use tokio::net::TcpListener;
use tollgate_sdk::{CheckRequest, InProcess, TollgateLayer};
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const RULES: &str = "{domain: d, descriptors: [{key: endpoint, name: calls, limit: 2/hour}]}";

/// gRPC clients back off on `RESOURCE_EXHAUSTED`; any other status looks like a server bug.
#[tokio::test]
async fn a_grpc_service_is_limited_with_grpc_statuses() {
    let limits = InProcess::from_rules(RULES, "d").expect("rules");
    let layer = TollgateLayer::new(limits, |head: &http::request::Parts| {
        Some(CheckRequest::attributes([("endpoint", head.uri.path())]))
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(layer).add_service(health);
    let server = tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let channel = endpoint.connect_timeout(Duration::from_secs(20)).connect().await.expect("a connection");
    let mut client = HealthClient::new(channel);
    for _ in 0..2 {
        let response = client.check(HealthCheckRequest::default()).await.expect("a response");
        assert!(response.metadata().contains_key("ratelimit"), "{:?}", response.metadata());
    }
    let denied = client.check(HealthCheckRequest::default()).await.expect_err("over the limit");
    assert_eq!(denied.code(), Code::ResourceExhausted, "{denied}");
    assert_eq!(denied.metadata().get("retry-after").and_then(|value| value.to_str().ok()), Some("1800"));
    server.abort();
}
