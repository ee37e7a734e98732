//! What a check sees while the line to Redis fails. For each fault: what was allowed and denied, that no check waited for
//! the fault to end, that nothing beyond the limit got through, and that the store heals.

use crate::faults::{Caller, quick};
use crate::proxy::{Fault, Proxy};
use crate::servers::Server;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, KeyPart, LimitSpec, Rate, Scope, StoreError, TimeDelta,
};
use tollgate_store::{BreakerState, RedisConfig, RedisStore};

/// What a fault may do to a check that is sent while it lasts.
enum Effect {
    /// Nothing has reached the server.
    NotTaken,
    /// The server has decided, and the reply is lost.
    MayBeTaken,
}

/// How many units the server has counted for a tenant of [`Caller`]: the last field of the only window.
fn counted(server: &Server) -> u64 {
    let keys: Vec<String> = server.command(&["KEYS", "tg1:{alice}*"]);
    let value: String = server.command(&["GET", &keys[0]]);
    value.rsplit(',').next().and_then(|count| count.parse().ok()).expect("a count")
}

const LIMIT: u64 = 20;

async fn suffers(fault: Fault, effect: Effect) {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let store = RedisStore::connect(quick(&proxy.url()));
    let mut tenant = Caller::new(&store, "alice", LIMIT);
    let mut failed = (tenant.heals().await + tenant.heals().await) as u64;
    let before = (counted(&server), failed);
    proxy.set(fault);
    // The fault lasts until it is lifted below: a check that is answered here has not waited for its end.
    while store.status()[0].breaker == BreakerState::Closed {
        let answer = tenant.check().await;
        assert!(answer.is_err(), "{fault:?}: {answer:?}");
        failed += 1;
    }
    // Five failures. A check that could be sent again has made two of them, and connecting anew beside slow checks may
    // have made some as well.
    let checks = failed - before.1;
    assert!((1..=5).contains(&checks), "{fault:?}: {checks} checks until the breaker opened");
    assert!(matches!(tenant.check().await, Err(StoreError::Unavailable(_))), "{fault:?}: at once");
    if matches!(effect, Effect::NotTaken) {
        assert_eq!(counted(&server), before.0, "{fault:?}: nothing came through");
    }
    proxy.set(Fault::None);
    for turn in 0.. {
        match tenant.check().await {
            Ok(_) => break,
            Err(StoreError::Unavailable(why)) if why.contains("left alone") => {}
            Err(_) => failed += 1,
        }
        assert!(turn < 2_000, "{fault:?}: never healed: {:?}", store.status());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    loop {
        match tenant.check().await {
            Ok(Admission::Admitted) => {}
            Ok(Admission::Denied) => break,
            Err(_) => failed += 1,
        }
    }
    assert!(tenant.admitted <= LIMIT, "{fault:?}: {} admitted", tenant.admitted);
    assert_eq!(counted(&server), LIMIT, "{fault:?}: what the server has let through, answered or not");
    // A check that was not answered has taken one at most, and none is taken twice.
    assert!(tenant.admitted >= LIMIT - failed, "{fault:?}: {} admitted", tenant.admitted);
    assert_eq!(store.mismatches(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut() {
    suffers(Fault::Cut, Effect::NotTaken).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_loses_replies() {
    suffers(Fault::CutAnswers, Effect::MayBeTaken).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_breaks_in_the_middle_of_a_reply() {
    suffers(Fault::HalveThenCut, Effect::MayBeTaken).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_stalls_in_the_middle_of_a_reply() {
    suffers(Fault::HalveThenStall, Effect::MayBeTaken).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_withholds_replies() {
    suffers(Fault::StallAnswers, Effect::MayBeTaken).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_withholds_requests() {
    suffers(Fault::StallRequests, Effect::NotTaken).await;
}

/// A line that is slow, but within the deadline, is only slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_connection_affects_no_other() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let mut config = quick(&proxy.url());
    config.deadline = Duration::from_secs(5);
    let store = RedisStore::connect(config);
    let mut tenant = Caller::new(&store, "alice", 5);
    proxy.set(Fault::Delay(Duration::from_millis(20)));
    for _ in 0..5 {
        assert_eq!(tenant.check().await, Ok(Admission::Admitted));
    }
    assert_eq!(tenant.check().await, Ok(Admission::Denied));
    assert_eq!(counted(&server), 5);
}

/// Connecting may take longer than a check waits. A check that comes when the connection is established must be served, not wait for the
/// breaker that the first one's failure has opened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_connect_is_used_once_established() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    proxy.set(Fault::StallAnswers);
    let mut config = quick(&proxy.url());
    config.connect_timeout = Duration::from_secs(30);
    // Long enough that no busy machine makes the second check fail as well.
    config.deadline = Duration::from_secs(1);
    config.breaker.failures = 1;
    config.breaker.silence = TimeDelta::ZERO;
    config.breaker.cooldown = TimeDelta::from_secs(3_600);
    let store = RedisStore::connect(config);
    let mut tenant = Caller::new(&store, "alice", 5);
    assert!(tenant.check().await.is_err());
    assert_eq!(store.status()[0].breaker, BreakerState::Open);
    proxy.set(Fault::None);
    tenant.heals().await;
}

/// The default deadline: ten milliseconds, and the caller's own where that is less. Time is tokio's, which
/// goes on only when nothing else can: what is measured is what the store waits for, not how busy the machine is.
#[tokio::test]
async fn by_itself_a_check_waits_ten_milliseconds() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let config = RedisConfig::parse(&proxy.url()).expect("a url");
    assert_eq!(config.deadline, Duration::from_millis(10));
    let store = RedisStore::connect(config);
    let limit =
        LimitSpec::new(Algorithm::Gcra, Rate::per(5, TimeDelta::from_secs(86_400))).build().expect("a limit");
    let (scope, parts) = (Scope::new("deadline"), [KeyPart::Text("alice")]);
    let charge = [Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE)];
    while store.charge_with_deadline(&charge, Duration::MAX).await.is_err() {}
    proxy.set(Fault::StallAnswers);
    tokio::time::pause();
    for (own, millis) in [(Duration::MAX, 10), (Duration::from_millis(4), 4), (Duration::from_secs(9), 10)] {
        let started = Instant::now();
        let answer = store.charge_with_deadline(&charge, own).await;
        assert!(matches!(answer, Err(StoreError::Late(_))), "{answer:?}");
        let waited = started.elapsed();
        // Timers go by whole milliseconds.
        assert!((millis..=millis + 1).contains(&waited.as_millis()), "{waited:?} of {millis} ms");
    }
    tokio::time::resume();
    proxy.set(Fault::None);
    while store.charge_with_deadline(&charge, Duration::MAX).await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
