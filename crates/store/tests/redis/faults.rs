//! What a check sees while Redis fails for real. For each fault: no check waits past its deadline, nothing beyond the
//! limit gets through, and the store heals by itself.

use crate::cluster::SLACK;
use crate::servers::{Server, free_port, wait_until};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, Rate, Scope,
    StoreError, TimeDelta,
};
use tollgate_store::{BreakerConfig, BreakerState, RedisConfig, RedisStore};

/// A tenant with a limit that nothing refills during a test, and the checks that it makes.
pub(crate) struct Caller {
    store: RedisStore,
    limit: Limit,
    scope: Scope,
    name: String,
    pub(crate) deadline: Duration,
    pub(crate) admitted: u64,
    pub(crate) longest: Duration,
}

/// Short enough to see, long enough for a busy machine.
const DEADLINE: Duration = Duration::from_millis(250);

/// The deadline of checks that must be answered.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A configuration for tests about failures: a check waits for them, but not for long.
pub(crate) fn quick(url: &str) -> RedisConfig {
    let mut config = RedisConfig::parse(url).expect("a url");
    config.deadline = DEADLINE;
    config.breaker = BreakerConfig {
        // Five deadlines without an answer, less than a busy machine adds to one of them.
        silence: TimeDelta::from_millis(750),
        cooldown: TimeDelta::from_millis(200),
        ..BreakerConfig::default()
    };
    config
}

/// The same where checks must be answered, on a busy machine too.
pub(crate) fn answered(url: &str) -> RedisConfig {
    let mut config = quick(url);
    config.deadline = PATIENCE;
    config
}

impl Caller {
    pub(crate) fn new(store: &RedisStore, name: &str, limit: u64) -> Self {
        let quota = Rate::per(limit, TimeDelta::from_secs(86_400));
        Self {
            store: store.clone(),
            limit: LimitSpec::new(Algorithm::FixedWindow, quota).build().expect("a limit"),
            scope: Scope::new("faults"),
            name: name.to_owned(),
            deadline: DEADLINE,
            admitted: 0,
            longest: Duration::ZERO,
        }
    }

    pub(crate) async fn check(&mut self) -> Result<Admission, StoreError> {
        let parts = [KeyPart::Text(&self.name)];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        let started = Instant::now();
        let answer = self.store.charge(&[Charge::new(key, &self.limit, Cost::ONE)]).await;
        self.longest = self.longest.max(started.elapsed());
        let admission = answer.map(|outcomes| outcomes.admission);
        self.admitted += u64::from(admission == Ok(Admission::Admitted));
        admission
    }

    /// Checks until one is answered; how many were not.
    pub(crate) async fn heals(&mut self) -> usize {
        for failed in 0..6_000 {
            if self.check().await.is_ok() {
                return failed;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("the store never healed: {:?}", self.store.status());
    }

    pub(crate) fn waited_no_longer_than_it_may(&self) {
        assert!(self.longest <= self.deadline + SLACK, "a check took {:?}", self.longest);
    }
}

pub(crate) fn breaker(store: &RedisStore) -> BreakerState {
    store.status()[0].breaker
}

#[tokio::test]
async fn a_paused_server_costs_a_check_its_deadline_and_then_nothing() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(quick(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 10);
    let early = tenant.heals().await as u64;
    server.signal("STOP");
    let mut unanswered = 0;
    while breaker(&store) == BreakerState::Closed {
        assert!(tenant.check().await.is_err());
        unanswered += 1;
    }
    // Never before the fifth failure. On a busy machine, two checks may wait for the same batch, which is one failure.
    assert!((5..=10).contains(&unanswered), "{unanswered}");
    {
        let mut checking = pin!(tenant.check());
        let polled = checking.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(
            matches!(polled, Poll::Ready(Err(StoreError::Unavailable(_)))),
            "an open breaker answers at once: {polled:?}"
        );
    }
    server.signal("CONT");
    tenant.heals().await;
    // What was sent before the pause may have been taken; it was never admitted, and nothing is admitted twice.
    while tenant.check().await == Ok(Admission::Admitted) {}
    assert!(tenant.admitted <= 10 && tenant.admitted + unanswered + early >= 10, "{}", tenant.admitted);
    tenant.waited_no_longer_than_it_may();
}

/// The status of an idle node must not report a dead server as available.
#[tokio::test]
async fn a_closed_connection_is_noticed_while_idle() {
    let mut server = Server::start(&[]);
    let store = RedisStore::connect(quick(&server.url()));
    Caller::new(&store, "alice", 5).heals().await;
    assert!(store.status()[0].connections > 0);
    server.kill();
    for _ in 0..2_000 {
        if store.status()[0].connections == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never noticed: {:?}", store.status());
}

#[tokio::test]
async fn a_server_that_sleeps_is_waited_for_no_longer_than_the_deadline() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(quick(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 5);
    tenant.heals().await;
    let mut sleeper = server.connection().expect("a server");
    let asleep = std::thread::spawn(move || {
        let _: Result<(), _> = redis::cmd("DEBUG").arg("SLEEP").arg("4").query(&mut sleeper);
    });
    // It sleeps from the moment that a check is not answered.
    while tenant.check().await.is_ok() {}
    tenant.heals().await;
    asleep.join().expect("the sleeper");
    while tenant.check().await == Ok(Admission::Admitted) {}
    assert!(tenant.admitted <= 5, "{}", tenant.admitted);
    tenant.waited_no_longer_than_it_may();
}

#[tokio::test]
async fn a_killed_server_fails_checks_at_once_and_its_successor_is_found() {
    let mut server = Server::start(&[]);
    let store = RedisStore::connect(quick(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 10);
    tenant.heals().await;
    assert_eq!(store.status()[0].lost_writes_at, None);
    let port = server.port;
    server.kill();
    for _ in 0..10 {
        assert!(tenant.check().await.is_err());
    }
    assert_eq!(breaker(&store), BreakerState::Open);
    // The new process knows neither the scripts nor the counters, and the store says so.
    let _again = Server::start_on(port, &[]);
    tenant.heals().await;
    assert!(store.status()[0].lost_writes_at.is_some());
    tenant.waited_no_longer_than_it_may();
}

#[tokio::test]
async fn a_node_starts_without_redis_and_heals_when_it_comes() {
    let port = free_port();
    let store = RedisStore::connect(quick(&format!("redis://127.0.0.1:{port}")));
    let mut tenant = Caller::new(&store, "alice", 10);
    assert!(tenant.check().await.is_err());
    assert_eq!(store.status()[0].connections, 0);
    let _server = Server::start_on(port, &[]);
    tenant.heals().await;
    assert!(store.status()[0].connections > 0);
    tenant.waited_no_longer_than_it_may();
}

#[tokio::test]
async fn a_server_that_has_forgotten_the_scripts_is_sent_them() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(answered(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 10);
    tenant.heals().await;
    for _ in 0..5 {
        let _: () = server.command(&["SCRIPT", "FLUSH"]);
        assert_eq!(tenant.check().await, Ok(Admission::Admitted));
    }
}

#[tokio::test]
async fn a_replica_admits_nothing() {
    let (primary, server) = (Server::start(&[]), Server::start(&[]));
    let store = RedisStore::connect(quick(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 10);
    tenant.heals().await;
    let _: () = server.command(&["REPLICAOF", "127.0.0.1", &primary.port.to_string()]);
    for _ in 0..3 {
        assert_ne!(tenant.check().await, Ok(Admission::Admitted));
    }
    let _: () = server.command(&["REPLICAOF", "NO", "ONE"]);
    tenant.heals().await;
    tenant.waited_no_longer_than_it_may();
}

#[tokio::test]
async fn a_full_server_admits_nothing_and_still_denies() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(answered(&server.url()));
    let (mut spent, mut fresh) = (Caller::new(&store, "spent", 1), Caller::new(&store, "fresh", 1));
    spent.heals().await;
    let _: () = server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(spent.check().await, Ok(Admission::Denied), "a denial writes nothing");
    let full = fresh.check().await;
    assert!(matches!(&full, Err(StoreError::Unavailable(why)) if why.contains("OOM")), "{full:?}");
    let _: () = server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    fresh.heals().await;
    assert_eq!((spent.admitted, fresh.admitted), (1, 1));
    fresh.deadline = PATIENCE;
    fresh.waited_no_longer_than_it_may();
}

#[tokio::test]
async fn a_loading_server_is_retried() {
    let mut server = Server::start(&["--rdbcompression", "no"]);
    let _: () = server.command(&["DEBUG", "POPULATE", "10000", "filler", "1000"]);
    let _: () = server.command(&["SAVE"]);
    let slow = ["--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024"];
    let loading = server.restart(&slow);
    let store = RedisStore::connect(quick(&loading.url()));
    let mut tenant = Caller::new(&store, "alice", 10);
    let refused = tenant.check().await;
    assert!(refused.is_err(), "{refused:?}");
    tenant.heals().await;
    assert!(tenant.admitted <= 10);
    tenant.waited_no_longer_than_it_may();
}

#[tokio::test]
async fn a_server_that_is_busy_with_a_script_is_waited_for_no_longer_than_the_deadline() {
    let server = Server::start(&["--busy-reply-threshold", "10"]);
    let store = RedisStore::connect(quick(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 30);
    tenant.heals().await;
    let mut looper = server.connection().expect("a server");
    let looping = std::thread::spawn(move || {
        redis::cmd("EVAL").arg("while true do end").arg(0).query::<()>(&mut looper).expect_err("killed")
    });
    // It loops until it is killed below: a check that is answered has not waited for its end.
    while breaker(&store) == BreakerState::Closed {
        let _ = tenant.check().await;
    }
    let _: () = server.command(&["SCRIPT", "KILL"]);
    looping.join().expect("the script");
    assert!(server.info("errorstat_BUSY").starts_with("count="), "the server's own words");
    tenant.heals().await;
    while tenant.check().await != Ok(Admission::Denied) {}
    assert!(tenant.admitted <= 30, "{}", tenant.admitted);
}

#[tokio::test]
async fn a_replica_that_has_lost_its_primary_admits_nothing() {
    let server = Server::start(&["--replica-serve-stale-data", "no"]);
    let store = RedisStore::connect(quick(&server.url()));
    let mut tenant = Caller::new(&store, "alice", 30);
    tenant.heals().await;
    let _: () = server.command(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
    for _ in 0..3 {
        assert!(tenant.check().await.is_err());
    }
    let _: () = server.command(&["REPLICAOF", "NO", "ONE"]);
    let (down, readonly) = (server.info("errorstat_MASTERDOWN"), server.info("errorstat_READONLY"));
    assert!(down.starts_with("count=") || readonly.starts_with("count="), "the server's own words");
    tenant.heals().await;
    while tenant.check().await != Ok(Admission::Denied) {}
    assert!(tenant.admitted <= 30, "{}", tenant.admitted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_checks_of_one_key_are_exact_and_share_script_calls() {
    let server = Server::start(&[]);
    let mut config = quick(&server.url());
    config.deadline = Duration::from_secs(5);
    let store = RedisStore::connect(config);
    Caller::new(&store, "warm", 1).heals().await;
    let calls = || {
        let stats = server.info("cmdstat_evalsha");
        stats.split([',', '=']).nth(1).and_then(|calls| calls.parse::<u64>().ok()).unwrap_or(0)
    };
    let before = calls();
    let checks: Vec<_> = (0..1_000)
        .map(|_| {
            let mut tenant = Caller::new(&store, "alice", 300);
            tokio::spawn(async move { tenant.check().await })
        })
        .collect();
    let mut admitted = 0;
    for check in checks {
        admitted += u64::from(check.await.expect("a task") == Ok(Admission::Admitted));
    }
    assert_eq!(admitted, 300);
    assert!(calls() - before < 500, "{} script calls for 1000 checks", calls() - before);
    wait_until("nothing is left without an expiry", || server.keys_without_expiry().is_empty());
}

/// Long keys must not fill the memory while a server is silent; once it answers, requests that waited for room are served,
/// also where a connection that stays silent has taken all of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_flight_are_bounded_in_bytes_and_never_stall() {
    let server = Server::start(&[]);
    let mut config = quick(&server.url()).with_in_flight_bytes(0);
    config.connections = 1;
    let store = RedisStore::connect(config);
    let long = |number: usize| format!("{number:04096}");
    Caller::new(&store, &long(0), 5).heals().await;
    for round in 0..3 {
        server.signal("STOP");
        let checks = (0..200).map(|number| {
            let mut caller = Caller::new(&store, &long(200 * round + number), 5);
            async move { caller.check().await.is_ok() }
        });
        let answered = futures_util::future::join_all(checks).await;
        assert!(answered.iter().all(|answered| !answered), "a stopped server answers no check");
        server.signal("CONT");
        Caller::new(&store, "after", 1_000).heals().await;
    }
    let patient = RedisStore::connect(crate::servers::patient(&server.url()).with_in_flight_bytes(0));
    let checks = (0..500).map(|number| {
        let mut caller = Caller::new(&patient, &long(10_000 + number), 5);
        async move { caller.check().await }
    });
    let answered = futures_util::future::join_all(checks).await;
    assert!(answered.iter().all(|answer| *answer == Ok(Admission::Admitted)), "{answered:?}");
}
