//! Every request of every protocol is identified once, planned once and charged once, also with a store that has to be
//! awaited. Each plan advances a split counter to its next shard, so a request that is planned twice skips one.

use crate::harness::{self, Server, memory};
use http::uri::PathAndQuery;
use redis::Value as Reply;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::SystemClock;
use tollgate_core::conformance::RemoteStore;
use tollgate_http::identity::IDENTIFICATIONS;
use tollgate_sdk::{CheckRequest, Decider, Remote, RemoteConfig};
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_store::MemoryStore;
use tollgate_testing::own_process::in_own_process;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

type Store = Arc<RemoteStore<MemoryStore<SystemClock>>>;

const SPLIT: u16 = 8;
const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: per-user, limit: 800/hour, split: 8}
  - {key: api_key, name: per-key, limit: 80/hour, split: 8}
";

fn start() -> (Server, Store) {
    let store = Arc::new(RemoteStore::new(memory()));
    let local = ([127, 0, 0, 1], 0).into();
    (Server::start_over(Arc::clone(&store), 1, &[RULES], "{forward_auth: {domain: d}}", local), store)
}

/// Asserts that `count` requests caused one store call each, and charged one shard after the other.
fn assert_once_each(name: &str, store: &Store, count: usize) {
    assert_eq!(store.take_rounds(SPLIT), Ok(count), "{name}");
}

/// Identifications are counted per process.
#[test]
fn checks_over_http_and_grpc_are_decided_once() {
    in_own_process("one_path::checks_over_http_and_grpc_are_decided_once", every_check_once);
}

fn every_check_once() {
    let (server, store) = start();
    checks_over_http(&server, &store);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(checks_over_grpc(&server, &store));
}

fn checks_over_http(server: &Server, store: &Store) {
    let head = |key: &str| {
        let headers = json!([["Host", "h"], ["X-Api-Key", key]]);
        json!({"domain": "d", "request": {"method": "GET", "target": "/", "peer": "127.0.0.1", "headers": headers}})
    };
    let bodies = [
        ("/v1/check", 0, json!({"domain": "d", "attributes": {"user": "check"}})),
        ("/v1/reserve", 0, json!({"domain": "d", "attributes": {"user": "reserve"}})),
        ("/v1/check", 1, head("key-of-a-checked-head")),
        ("/v1/reserve", 1, head("key-of-a-reserved-head")),
        (
            "/json",
            0,
            json!({"domain": "d", "descriptors": [{"entries": [{"key": "user", "value": "json"}]}]}),
        ),
    ];
    for (path, identified, body) in bodies {
        let before = IDENTIFICATIONS.load(Ordering::Relaxed);
        for _ in 0..4 {
            assert_eq!(server.post(path, &body).status, 200, "{path}");
        }
        assert_once_each(path, store, 4);
        assert_eq!(IDENTIFICATIONS.load(Ordering::Relaxed) - before, 4 * identified, "{path} {body}");
    }
    let before = IDENTIFICATIONS.load(Ordering::Relaxed);
    let mut open = harness::WebConnection::to(server.http).expect("a connection");
    for _ in 0..4 {
        open.send(b"GET /check HTTP/1.1\r\nHost: h\r\nX-Api-Key: key-of-a-caller\r\n\r\n").expect("sent");
        assert_eq!(open.response().expect("a response").status, 200);
    }
    assert_once_each("/check", store, 4);
    assert_eq!(IDENTIFICATIONS.load(Ordering::Relaxed) - before, 4);
}

/// Envoy's own call and the SDK's extension of it are two ways through the server.
async fn checks_over_grpc(server: &Server, store: &Store) {
    let address = format!("http://{}", server.grpc);
    let channel = Endpoint::from_shared(address.clone()).expect("an address").connect().await;
    let mut envoy = Grpc::new(channel.expect("a connection"));
    let entry = Entry { key: "user".to_owned(), value: "envoy".to_owned() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let request =
        RateLimitRequest { domain: "d".to_owned(), descriptors: vec![descriptor], ..Default::default() };
    for _ in 0..4 {
        envoy.ready().await.expect("a connection");
        let codec = ProstCodec::<RateLimitRequest, RateLimitResponse>::default();
        let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
        let response = envoy.unary(tonic::Request::new(request.clone()), path, codec).await;
        let response = response.expect("a response").into_inner();
        assert_eq!((response.overall_code, response.raw_body.len()), (1, 0), "{response:?}");
    }
    assert_once_each("Envoy's call", store, 4);
    let settings =
        RemoteConfig { deadline: harness::LONG, connections: 1, ..RemoteConfig::new(address, "d") };
    let remote = Remote::new(settings).expect("an address");
    for _ in 0..4 {
        assert!(remote.decide(CheckRequest::attributes([("user", "sdk".to_owned())])).await.is_allowed);
    }
    assert_once_each("the SDK's call", store, 4);
}

#[test]
fn checks_over_resp_are_decided_once_alone_and_pipelined() {
    let (server, store) = start();
    let client = redis::Client::open(format!("redis://{}/", server.resp)).expect("an address");
    let mut connection = client.get_connection().expect("a connection");
    for _ in 0..4 {
        let _: Reply =
            redis::cmd("TG.CHECK").arg("d").arg("user").arg("alone").query(&mut connection).expect("a reply");
    }
    assert_once_each("TG.CHECK", &store, 4);
    let mut pipeline = redis::pipe();
    for _ in 0..8 {
        pipeline.cmd("TG.CHECK").arg("d").arg("user").arg("pipelined");
    }
    let replies: Vec<Reply> = pipeline.query(&mut connection).expect("replies");
    assert_eq!(replies.len(), 8);
    assert_once_each("TG.CHECK in a pipeline", &store, 8);
    let mut pipeline = redis::pipe();
    for n in 0..40 {
        pipeline.cmd("CL.THROTTLE").arg(format!("key{n}")).arg(9).arg(10).arg(60);
    }
    let replies: Vec<Vec<i64>> = pipeline.query(&mut connection).expect("replies");
    assert_eq!(replies, vec![vec![0, 10, 9, -1, 6]; 40]);
    assert_eq!(store.take_calls().len(), 40);
}
