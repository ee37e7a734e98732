//! A panic while deciding is answered on every protocol by the rule's fail policy, and the connection lives on.

use crate::harness::{self, Server, WebConnection, memory};
use redis::Value as Reply;
use serde_json::json;
use tollgate_core::SystemClock;
use tollgate_core::conformance::PanickingStore;
use tollgate_sdk::{CheckRequest, Decider, Remote, RemoteConfig};
use tollgate_store::MemoryStore;

type Store = PanickingStore<MemoryStore<SystemClock>>;

const RULES: &str = "
domain: d
descriptors:
  - {key: open, limit: 2/hour, on_error: open}
  - {key: closed, limit: 2/hour, on_error: closed}
  - {key: api_key, limit: 2/hour, on_error: closed}
";

fn start() -> Server {
    let local = ([127, 0, 0, 1], 0).into();
    Server::start_over(PanickingStore(memory()), 1, &[RULES], "{forward_auth: {domain: d}}", local)
}

#[test]
fn over_http_and_grpc() {
    let server = start();
    let mut open = WebConnection::to(server.http).expect("a connection");
    let mut post = |path: &str, body: &serde_json::Value| {
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n", body.len());
        open.send(format!("{head}\r\n{body}").as_bytes()).expect("sent");
        open.response().expect("a response, on the same connection").status
    };
    for value in [Store::AT_ONCE, Store::LATER] {
        let attributes = |key: &str, value: &str| json!({"domain": "d", "attributes": {key: value}});
        assert_eq!(post("/v1/check", &attributes("open", value)), 200, "{value}");
        assert!([429, 503].contains(&post("/v1/check", &attributes("closed", value))), "{value}");
        assert_eq!(post("/v1/reserve", &attributes("open", value)), 200, "{value}");
        let entries = json!([{"entries": [{"key": "closed", "value": value}]}]);
        assert_ne!(post("/json", &json!({"domain": "d", "descriptors": entries})), 200, "{value}");
    }
    assert_eq!(post("/v1/check", &json!({"domain": "d", "attributes": {"closed": "well"}})), 200);
    let forward = |key: &str| {
        let head = format!("GET /check HTTP/1.1\r\nHost: h\r\nX-Api-Key: {key}\r\nConnection: close\r\n\r\n");
        harness::exchange(server.http, head.as_bytes()).expect("a response").status
    };
    assert_eq!((forward("well"), forward(Store::AT_ONCE) >= 429), (200, true));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let settings = RemoteConfig {
            deadline: harness::LONG,
            connections: 1,
            ..RemoteConfig::new(format!("http://{}", server.grpc), "d")
        };
        let remote = Remote::new(settings).expect("an address");
        for value in [Store::AT_ONCE, Store::LATER] {
            let decide = async |key, value: &str| {
                remote.decide(CheckRequest::attributes([(key, value.to_owned())])).await.is_allowed
            };
            assert!(decide("open", value).await && !decide("closed", value).await, "{value}");
            assert!(decide("closed", "grpc").await);
        }
    });
}

#[test]
fn over_resp_alone_and_pipelined() {
    let server = start();
    let client = redis::Client::open(format!("redis://{}/", server.resp)).expect("an address");
    let mut connection = client.get_connection().expect("a connection");
    for value in [Store::AT_ONCE, Store::LATER] {
        let mut check = |key: &str, value: &str| -> Vec<Reply> {
            redis::cmd("TG.CHECK").arg("d").arg(key).arg(value).query(&mut connection).expect("a reply")
        };
        assert_eq!(check("open", value)[0], Reply::Int(0), "{value}");
        assert_eq!(check("closed", value)[0], Reply::Int(1), "{value}");
        let mut pipeline = redis::pipe();
        pipeline.cmd("TG.CHECK").arg("d").arg("closed").arg("well");
        pipeline.cmd("TG.CHECK").arg("d").arg("closed").arg(value);
        let replies: Vec<Vec<Reply>> = pipeline.query(&mut connection).expect("replies");
        assert_eq!((&replies[0][0], &replies[1][0]), (&Reply::Int(0), &Reply::Int(1)), "{value}");
        // `CL.THROTTLE` has no rule: an error, as for a store that is unavailable.
        let mut throttle = |key: &str| -> redis::RedisResult<Vec<i64>> {
            redis::cmd("CL.THROTTLE").arg(key).arg(9).arg(10).arg(60).query(&mut connection)
        };
        assert!(throttle(value).is_err(), "{value}");
        assert_eq!(throttle(&format!("well-{}", value.len())).expect("a reply")[0], 0, "{value}");
    }
}
