//! What every store must do, over a real server, with the time told by the suite.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance;
use tollgate_store::RedisStore;

#[tokio::test]
async fn one_redis_does_what_every_store_must() {
    let server = Server::start(&[]);
    conformance::run(async |clock: Arc<_>| {
        let _: () = server.command(&["FLUSHALL"]);
        RedisStore::with_clock(patient(&server.url()), clock)
    })
    .await
    .unwrap_or_else(|broken| panic!("{broken}"));
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
}
