//! A flood over its limit: denials that a node remembers cost a real server nothing, counted by the server itself.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec,
    ManualClock, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::{DenyCache, LeaseConfig, LeasedStore, RedisStore};

/// All commands that the server has done, but for the one that asks.
fn commands(server: &Server) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    stats
        .lines()
        .filter(|line| !line.starts_with("cmdstat_info") && !line.starts_with("cmdstat_client"))
        .filter_map(|line| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok())
        .sum()
}

fn per_hour(count: u64) -> Limit {
    LimitSpec::new(Algorithm::FixedWindow, Rate::per(count, TimeDelta::from_secs(3_600)))
        .build()
        .expect("a limit")
}

#[tokio::test]
async fn a_denied_flood_does_not_reach_redis_and_ends_within_a_second() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_017)));
    let shared_clock: Arc<dyn Clock> = clock.clone();
    let redis = || RedisStore::with_clock(patient(&server.url()), Arc::clone(&shared_clock));
    let node = DenyCache::new(redis(), Arc::clone(&clock), 1_024);
    let elsewhere = redis();
    let (limit, raised) = (per_hour(5), per_hour(6));
    let (scope, parts) = (Scope::new("login"), [KeyPart::Text("mallory")]);
    let key = CounterKey { scope: &scope, parts: &parts };
    let ask =
        async |limit| node.charge(&[Charge::new(key, limit, Cost::ONE)]).await.expect("an answer").admission;
    for _ in 0..5 {
        assert_eq!(ask(&limit).await, Admission::Admitted);
    }
    assert_eq!(ask(&limit).await, Admission::Denied);
    // The other node's connection is made before anything is counted.
    let look = [Charge::new(key, &limit, Cost::PEEK)];
    elsewhere.charge(&look).await.expect("an answer");
    let before = commands(&server);
    for _ in 0..10_000 {
        assert_eq!(ask(&limit).await, Admission::Denied);
    }
    assert_eq!(commands(&server), before, "ten thousand denials");
    // A limit that is raised is another limit: at once.
    assert_eq!(ask(&raised).await, Admission::Admitted);
    // Units that another node gives back are seen within a second.
    assert_eq!(ask(&limit).await, Admission::Denied);
    elsewhere.debit(&[Charge::new(key, &limit, Cost::refund(2))]).await.expect("a refund");
    clock.advance(TimeDelta::from_millis(999));
    assert_eq!(ask(&limit).await, Admission::Admitted);
    // And what this node gives back itself, at once.
    assert_eq!(ask(&limit).await, Admission::Denied);
    node.debit(&[Charge::new(key, &limit, Cost::refund(1))]).await.expect("a refund");
    assert_eq!(ask(&limit).await, Admission::Admitted);
    // An hour of it: a question a second at most.
    assert_eq!(ask(&limit).await, Admission::Denied);
    let before = commands(&server);
    for _ in 0..1_000 {
        clock.advance(TimeDelta::from_millis(10));
        assert_eq!(ask(&limit).await, Admission::Denied);
    }
    let asked = commands(&server) - before;
    assert!((1..=2 * 12).contains(&asked), "{asked} commands in ten seconds");
}

/// A client that is told what remains of its other limits must not see them come and go with the node's memory of the denial.
#[tokio::test]
async fn a_repeated_denial_reports_the_other_limits_as_the_store_did() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_017)));
    let shared_clock: Arc<dyn Clock> = clock.clone();
    let redis = RedisStore::with_clock(patient(&server.url()), shared_clock);
    let cache = DenyCache::new(redis.clone(), Arc::clone(&clock), 1_024);
    let node = LeasedStore::new(cache, redis, Arc::clone(&clock), LeaseConfig::default());
    let (tight, wide, other) = (per_hour(2), per_hour(9), per_hour(5));
    let scopes = ["tight", "wide", "bucket"].map(Scope::new);
    let parts = [KeyPart::Text("mallory")];
    let keys = [0, 1, 2].map(|at| CounterKey { scope: &scopes[at], parts: &parts });
    let charges =
        [(0, &tight), (1, &wide), (2, &other)].map(|(at, limit)| Charge::new(keys[at], limit, Cost::ONE));
    for _ in 0..2 {
        assert_eq!(node.charge(&charges).await.expect("an answer").admission, Admission::Admitted);
    }
    let first = node.charge(&charges).await.expect("an answer");
    assert_eq!(first.per_charge.iter().map(|outcome| outcome.remaining).collect::<Vec<_>>(), [0, 7, 3]);
    let before = commands(&server);
    let again = node.charge(&charges).await.expect("an answer");
    assert_eq!(commands(&server), before, "it is a repeated one");
    assert_eq!(again.admission, first.admission);
    for (again, first) in again.per_charge.iter().zip(&first.per_charge) {
        assert_eq!((again.verdict, again.remaining), (first.verdict, first.remaining));
        let passed = first.reset_after.as_micros().saturating_sub(again.reset_after.as_micros());
        assert!(passed < 1_000_000, "{again:?} after {first:?}");
    }
}
