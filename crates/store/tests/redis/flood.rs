//! A flood over its limit: denials that a node remembers cost a real server nothing, counted by the server itself.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec,
    ManualClock, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::{DenyCache, RedisStore};

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
