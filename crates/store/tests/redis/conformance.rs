//! What every store must do, over a real server, with the time set by the suite.

use crate::cluster::Cluster;
use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance;
use tollgate_store::RedisStore;

#[tokio::test]
async fn a_single_redis_passes_the_store_conformance_suite() {
    let server = Server::start(&[]);
    conformance::run(async |clock: Arc<_>| {
        let _: () = server.command(&["FLUSHALL"]);
        RedisStore::with_clock(patient(&server.url()), clock)
    })
    .await
    .unwrap_or_else(|broken| panic!("{broken}"));
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_passes_the_store_conformance_suite() {
    let cluster = Cluster::with_replicas(0);
    conformance::run(async |clock: Arc<_>| {
        cluster.flush();
        RedisStore::with_clock(cluster.config(), clock)
    })
    .await
    .unwrap_or_else(|broken| panic!("{broken}"));
}
