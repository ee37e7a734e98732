//! Leases over a real Redis: several nodes share one key, and together never pass its limit, also while Redis fails.

use crate::faults::quick;
use crate::servers::{Server, patient, wait_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, Mode, Outcomes,
    OwnedKeyPart, PermitId, Rate, Scope, SystemClock, TimeDelta, nonzero,
};
use tollgate_store::{DenyCache, HotKey, LeaseConfig, LeasedStore, RedisConfig, RedisStore};

type Node = LeasedStore<DenyCache<RedisStore, SystemClock>, RedisStore, SystemClock>;

/// A node with a task that refills and returns its leases, until dropped.
struct RunningNode {
    node: Arc<Node>,
    tender: JoinHandle<()>,
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        self.tender.abort();
    }
}

static IDS: AtomicU64 = AtomicU64::new(1);

fn id() -> PermitId {
    PermitId(u128::from(IDS.fetch_add(1, Ordering::Relaxed)))
}

fn start(redis: RedisConfig) -> RunningNode {
    let clock = SystemClock::new();
    let redis = RedisStore::connect(redis);
    let config = LeaseConfig { idle: TimeDelta::from_millis(200), nodes: 3, ..LeaseConfig::default() };
    let node = Arc::new(LeasedStore::new(DenyCache::new(redis.clone(), clock, 1_024), redis, clock, config));
    let own = Arc::clone(&node);
    let tender = tokio::spawn(async move {
        loop {
            let _ = tokio::time::timeout(Duration::from_millis(50), own.task_ready()).await;
            for task in own.due_tasks() {
                let node = Arc::clone(&own);
                tokio::spawn(async move { node.run_task(task, id()).await });
            }
        }
    });
    RunningNode { node, tender }
}

struct Traffic {
    limit: Limit,
    scope: Scope,
    mode: Mode,
}

impl Traffic {
    fn new(limit: LimitSpec, mode: Mode) -> Arc<Self> {
        Arc::new(Self { limit: limit.build().expect("a limit"), scope: Scope::new("leases"), mode })
    }

    /// Asks a node again and again; how many were let through.
    async fn drive(self: Arc<Self>, node: Arc<Node>, until: Instant) -> u64 {
        let key = CounterKey { scope: &self.scope, parts: &[KeyPart::Text("hot")] };
        let charge = Charge { mode: self.mode, ..Charge::new(key, &self.limit, Cost::ONE) };
        let (mut admitted, mut turns) = (0, 0_u64);
        while Instant::now() < until {
            let mut outcomes = Outcomes::default();
            let charged = match node.try_charge(&[charge], &mut outcomes) {
                true => Ok(outcomes),
                false => node.charge(&[charge]).await,
            };
            admitted += u64::from(charged.is_ok_and(|outcomes| outcomes.admission == Admission::Admitted));
            turns += 1;
            if turns.is_multiple_of(64) {
                tokio::task::yield_now().await;
            }
        }
        admitted
    }
}

/// Without it a bound that holds in virtual time may not hold over a wire. The second half is spent with Redis stopped and
/// going on by turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_together_never_pass_the_limit_whatever_redis_does() {
    let server = Server::start(&[]);
    let spec = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(2_000))).burst(600);
    let traffic = Traffic::new(spec, Mode::Leased);
    // Less than Redis is stopped for below.
    let mut config = quick(&server.url());
    config.deadline = Duration::from_millis(50);
    let nodes: Vec<RunningNode> = (0..3).map(|_| start(config.clone())).collect();
    let began = Instant::now();
    let until = began + Duration::from_secs(3);
    let drivers: Vec<_> = nodes
        .iter()
        .map(|tended| tokio::spawn(Arc::clone(&traffic).drive(Arc::clone(&tended.node), until)))
        .collect();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let (calm, calmly): (Vec<_>, _) =
        (nodes.iter().map(|tended| tended.node.stats()).collect(), began.elapsed());
    while Instant::now() < until {
        server.signal("STOP");
        tokio::time::sleep(Duration::from_millis(120)).await;
        server.signal("CONT");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let mut admitted = Vec::new();
    for driver in drivers {
        admitted.push(driver.await.expect("a driver"));
    }
    let (passed, total) = (began.elapsed(), admitted.iter().sum::<u64>());
    let most = 600 + 2_000 * u64::try_from(passed.as_micros()).expect("short") / 1_000_000;
    assert!(total <= most, "{total} were let through in {passed:?}; {most} may be");
    assert!(total > 600, "only {total} were let through, the burst and nothing after it: {admitted:?}");
    // A denial holds until a unit is due, and the node does not ask again before: however fast requests come, a node asks no more often
    // than units fall due, beside those that it is given.
    let due = 600 + 2_000 * u64::try_from(calmly.as_micros()).expect("short") / 1_000_000;
    for node in &calm {
        assert!(node.local > 0, "a node spent nothing out of its hand: {calm:?}");
        assert!(node.central <= due, "Redis was asked {} times, {due} fell due: {calm:?}", node.central);
    }
}

/// Without it a quota's window may be overspent when nodes hold units of it, and idle units may never come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_is_never_passed_and_idle_units_go_back() {
    let server = Server::start(&[]);
    let spec = LimitSpec::new(Algorithm::FixedWindow, Rate::per(5_000, TimeDelta::from_secs(86_400)));
    let traffic = Traffic::new(spec, Mode::Leased);
    // Long timeouts: a refill whose answer comes too late has taken units all the same.
    let nodes: Vec<RunningNode> = (0..3).map(|_| start(patient(&server.url()))).collect();
    let drive = async |millis| {
        let until = Instant::now() + Duration::from_millis(millis);
        let each = nodes.iter().map(|tended| Arc::clone(&traffic).drive(Arc::clone(&tended.node), until));
        let mut admitted = 0;
        for driver in each.map(tokio::spawn).collect::<Vec<_>>() {
            admitted += driver.await.expect("a driver");
        }
        admitted
    };
    let mut admitted = drive(60).await;
    // Without traffic all leased units are returned, and the store has counted just what was admitted.
    wait_until("leases to go back", || nodes.iter().all(|tended| tended.node.stats().leases == 0));
    let redis = RedisStore::connect(patient(&server.url()));
    let key = CounterKey { scope: &traffic.scope, parts: &[KeyPart::Text("hot")] };
    let look = [Charge::new(key, &traffic.limit, Cost::PEEK)];
    let left = Instant::now() + Duration::from_secs(10);
    loop {
        let outcomes = redis.charge(&look).await.expect("Redis runs");
        if outcomes.per_charge[0].remaining == 5_000 - admitted {
            break;
        }
        assert!(
            Instant::now() < left,
            "{} remain, {admitted} were let through",
            outcomes.per_charge[0].remaining
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The whole of it, and no more.
    let left = Instant::now() + Duration::from_secs(30);
    while admitted < 4_900 {
        assert!(Instant::now() < left, "only {admitted} were let through");
        admitted += drive(200).await;
    }
    admitted += drive(200).await;
    assert!(admitted <= 5_000, "{admitted} were let through");
}

/// Without it a hot key of a central rule goes on melting its shard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_is_leased_by_itself_and_a_security_rules_is_not() {
    let server = Server::start(&[]);
    let spec = || LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(1_000_000)));
    for (mode, becomes_hot) in [(Mode::Adaptive, true), (Mode::Central, false)] {
        let tended = start(patient(&server.url()));
        let traffic = Traffic::new(spec(), mode);
        let left = Instant::now() + Duration::from_secs(30);
        loop {
            let until = Instant::now() + Duration::from_millis(1_500);
            let each = (0..8).map(|_| Arc::clone(&traffic).drive(Arc::clone(&tended.node), until));
            for driver in each.map(tokio::spawn).collect::<Vec<_>>() {
                driver.await.expect("a driver");
            }
            let (figures, hot) = (tended.node.stats(), tended.node.hot_keys(10));
            if !becomes_hot {
                assert_eq!(figures.promoted, 0, "{figures:?}");
                break;
            }
            let is_hot = |hot: &HotKey| {
                hot.promoted && hot.values == [OwnedKeyPart::Text("hot".into())] && hot.rate > 1_000
            };
            if figures.promoted > 0 && hot.first().is_some_and(is_hot) && figures.local > figures.central {
                break;
            }
            assert!(Instant::now() < left, "{figures:?} {hot:?}");
        }
        if becomes_hot {
            wait_until("the key to cool", || {
                tended.node.stats().demoted > 0 || tended.node.stats().leases == 0
            });
        }
    }
}
