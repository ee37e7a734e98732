//! Every request of every protocol is identified once, planned once and charged once, also with a store that has to be
//! awaited. Each plan advances a split counter to its next shard, so a request that is planned twice skips one.

use crate::harness::{self, Server, memory};
use redis::Value as Reply;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::SystemClock;
use tollgate_core::conformance::RemoteStore;
use tollgate_http::identity::IDENTIFICATIONS;
use tollgate_sdk::{CheckRequest, Decider, Remote, RemoteConfig};
use tollgate_store::MemoryStore;
use tollgate_testing::own_process::in_own_process;

type Store = Arc<RemoteStore<MemoryStore<SystemClock>>>;

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

/// Asserts that `count` requests caused one store call each and used the shards in turn.
fn assert_once_each(name: &str, store: &Store, count: usize) {
    let calls = store.take_calls();
    assert_eq!(calls.len(), count, "{name}: {calls:?}");
    let shards: Vec<&str> = calls
        .iter()
        .map(|charges| {
            assert_eq!(charges.len(), 1, "{name}: {charges:?}");
            let (_, values) = charges[0].split_once('[').expect("values");
            &values[..2]
        })
        .collect();
    let mut all = shards.clone();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count, "{name}: a shard was charged twice before the others: {shards:?}");
}

/// Identifications are counted per process.
#[test]
fn checks_over_http_and_grpc_are_decided_once() {
    in_own_process("one_path::checks_over_http_and_grpc_are_decided_once", every_check_once);
}

fn every_check_once() {
    let (server, store) = start();
    let bodies = [
        ("/v1/check", json!({"domain": "d", "attributes": {"user": "check"}})),
        ("/v1/reserve", json!({"domain": "d", "attributes": {"user": "reserve"}})),
        ("/json", json!({"domain": "d", "descriptors": [{"entries": [{"key": "user", "value": "json"}]}]})),
    ];
    for (path, body) in bodies {
        for _ in 0..4 {
            assert_eq!(server.post(path, &body).status, 200, "{path}");
        }
        assert_once_each(path, &store, 4);
    }
    let before = IDENTIFICATIONS.load(Ordering::Relaxed);
    let mut open = harness::WebConnection::to(server.http).expect("a connection");
    for _ in 0..4 {
        open.send(b"GET /check HTTP/1.1\r\nHost: h\r\nX-Api-Key: key-of-a-caller\r\n\r\n").expect("sent");
        assert_eq!(open.response().expect("a response").status, 200);
    }
    assert_once_each("/check", &store, 4);
    assert_eq!(IDENTIFICATIONS.load(Ordering::Relaxed) - before, 4);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let settings = RemoteConfig {
            deadline: harness::LONG,
            connections: 1,
            ..RemoteConfig::new(format!("http://{}", server.grpc), "d")
        };
        let remote = Remote::new(settings).expect("an address");
        for _ in 0..4 {
            assert!(remote.decide(CheckRequest::attributes([("user", "rls".to_owned())])).await.is_allowed);
        }
    });
    assert_once_each("gRPC", &store, 4);
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
