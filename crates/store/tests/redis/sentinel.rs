//! A primary that sentinels watch: it dies, its replica takes over, and the store follows.

use crate::faults::{Caller, quick};
use crate::servers::{Server, wait_until};
use tollgate_core::Admission;
use tollgate_store::RedisStore;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_dies_is_replaced_by_the_one_that_sentinels_choose() {
    let mut primary = Server::start(&[]);
    let port = primary.port.to_string();
    let replica = Server::start(&["--replicaof", "127.0.0.1", &port]);
    wait_until("the replica follows", || replica.info("master_link_status").starts_with("up"));
    let sentinels: Vec<Server> = (0..3)
        .map(|_| {
            Server::sentinel(&format!(
                "sentinel monitor gate 127.0.0.1 {port} 2\n\
                 sentinel down-after-milliseconds gate 2000\n\
                 sentinel failover-timeout gate 5000\n"
            ))
        })
        .collect();
    wait_until("the sentinels know each other and the replica", || {
        sentinels.iter().all(|sentinel| {
            let state = sentinel.info("master0");
            state.contains("slaves=1") && state.contains("sentinels=3")
        })
    });
    let hosts: Vec<String> =
        sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port)).collect();
    let store = RedisStore::connect(quick(&format!("redis+sentinel://{}/gate", hosts.join(","))));
    let mut tenant = Caller::new(&store, "alice", 20);
    for _ in 0..5 {
        tenant.heals().await;
    }
    assert_eq!(store.status()[0].lost_writes_at, None);
    primary.kill();
    while tenant.check().await.is_ok() {}
    tenant.heals().await;
    assert_eq!(replica.info("role"), "master");
    assert!(store.status()[0].lost_writes_at.is_some());
    while tenant.check().await == Ok(Admission::Admitted) {}
    assert!(tenant.admitted <= 20, "{}", tenant.admitted);
    tenant.waited_no_longer_than_it_may();
}
