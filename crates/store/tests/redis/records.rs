//! Records that nodes share, in one Redis and in a cluster.

use crate::cluster::Cluster;
use crate::servers::Server;
use std::time::Duration;
use tollgate_core::{RecordName, RecordStore, TimeDelta};
use tollgate_store::{RedisConfig, RedisRecords, RedisStore};

const MINUTE: TimeDelta = TimeDelta::from_secs(60);

fn node(url: &str) -> RedisRecords {
    let mut config = RedisConfig::parse(url).expect("a url");
    // A busy machine is late, not dead.
    config.deadline = Duration::from_secs(5);
    RedisRecords::new(RedisStore::connect(config))
}

async fn eventually<T>(what: impl AsyncFn() -> Option<T>) -> T {
    for _ in 0..3_000 {
        if let Some(found) = what().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within half a minute");
}

/// Two nodes that change one record: each change is made by one of them, and both see it.
async fn one_of_two_wins(url: &str) {
    let (one, other) = (node(url), node(url));
    // Names that lie in every part of a cluster.
    for number in 0..24_u8 {
        let name = RecordName([number; 16]);
        let read = eventually(async || other.exchange(name, None, None).await.ok()).await;
        assert_eq!((read.is_stored, read.record), (false, None));
        let made = one.exchange(name, None, Some((b"a\0b", MINUTE))).await.expect("stored");
        assert_eq!((made.is_stored, made.record), (true, None));
        let late = other.exchange(name, None, Some((b"c", MINUTE))).await.expect("a reply");
        assert_eq!((late.is_stored, late.record.as_deref()), (false, Some(b"a\0b".as_slice())));
        let next = other.exchange(name, Some(b"a\0b"), Some((b"c", MINUTE))).await.expect("stored");
        assert!(next.is_stored && next.at >= made.at);
        let stale = one.exchange(name, Some(b"a\0b"), Some((b"d", MINUTE))).await.expect("a reply");
        assert_eq!((stale.is_stored, stale.record.as_deref()), (false, Some(b"c".as_slice())));
        for _ in 0..2 {
            one.remove(name).await.expect("removed");
        }
        assert_eq!(other.exchange(name, None, None).await.expect("a reply").record, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_exchange_records_in_one_redis() {
    let server = Server::start(&[]);
    one_of_two_wins(&server.url()).await;
    let records = node(&server.url());
    let name = RecordName([7; 16]);
    let short = Some((b"x".as_slice(), TimeDelta::from_millis(1)));
    assert!(records.exchange(name, None, short).await.expect("stored").is_stored);
    eventually(async || records.exchange(name, None, None).await.ok()?.record.is_none().then_some(())).await;
    assert_eq!(server.command::<u64>(&["DBSIZE"]), 0, "nothing is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_exchange_records_in_a_cluster() {
    one_of_two_wins(&Cluster::with_replicas(0).url()).await;
}

/// A server that comes back is used again, without a restart of the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_heal_with_their_server() {
    let server = Server::start(&[]);
    let records = node(&server.url());
    let name = RecordName([9; 16]);
    assert!(records.exchange(name, None, Some((b"x", MINUTE))).await.expect("stored").is_stored);
    let _: () = server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let read = eventually(async || records.exchange(name, None, None).await.ok()).await;
    assert_eq!(read.record.as_deref(), Some(b"x".as_slice()));
}
