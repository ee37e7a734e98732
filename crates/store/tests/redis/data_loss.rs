//! After a crash or a failover that lost writes: no fresh quota for charges that ask for caution, and nothing held up for
//! the others.

use crate::cluster::Cluster;
use crate::cluster_faults::name_at;
use crate::differential::{ATTEMPTS, limits};
use crate::faults::answered;
use crate::servers::{Server, patient, wait_until};
use std::sync::Arc;
use tollgate_core::conformance::Ledger;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, LastKnown,
    Limit, LimitSpec, LossPolicy, ManualClock, PermitId, Rate, Scope, TimeDelta, Timestamp, Verdict,
};
use tollgate_store::{RedisConfig, RedisStore};

fn cautious(charge: Charge<'_>) -> Charge<'_> {
    Charge { loss_policy: LossPolicy::AssumeExhausted, ..charge }
}

/// A key's own limit, checked with and without caution.
struct Counter {
    store: RedisStore,
    limit: Limit,
    scope: Scope,
    name: String,
    after_loss: LossPolicy,
}

impl Counter {
    fn new(store: &RedisStore, name: &str, limit: &Limit, after_loss: LossPolicy) -> Self {
        let scope = Scope::new(format!("loss|{after_loss:?}|{}", limit.algorithm()));
        Self { store: store.clone(), limit: limit.clone(), scope, name: name.to_owned(), after_loss }
    }

    /// The verdict on one unit, from the first check that is answered.
    async fn check(&self) -> Verdict {
        let parts = [KeyPart::Text(&self.name)];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        let charge = Charge { loss_policy: self.after_loss, ..Charge::new(key, &self.limit, Cost::ONE) };
        for _ in 0..6_000 {
            if let Ok(outcomes) = self.store.charge(&[charge]).await {
                return outcomes.per_charge[0].verdict;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("the store never answered: {:?}", self.store.status());
    }

    async fn reset(&self) {
        let parts = [KeyPart::Text(&self.name)];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        let reset = Charge { loss_policy: self.after_loss, ..Charge::new(key, &self.limit, Cost::RESET) };
        self.store.debit(&[reset]).await.expect("a reset");
    }

    fn last_known(&self) -> LastKnown {
        let parts = [KeyPart::Text(&self.name)];
        let key = CounterKey { scope: &self.scope, parts: &parts };
        self.store.last_known(&Charge::new(key, &self.limit, Cost::ONE)).expect("an answer")
    }

    async fn admits(&self) -> u64 {
        let mut admitted = 0;
        while self.check().await.is_allowed() {
            admitted += 1;
        }
        admitted
    }
}

fn log(count: u64, secs: u64) -> Limit {
    LimitSpec::new(Algorithm::SlidingLog, Rate::per(count, TimeDelta::from_secs(secs)))
        .build()
        .expect("a limit")
}

fn as_clock(clock: &Arc<ManualClock>) -> Arc<dyn Clock> {
    Arc::clone(clock) as Arc<dyn Clock>
}

fn manual() -> Arc<ManualClock> {
    Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)))
}

/// Every algorithm, over all that a request may be: the answers are those of memory in which every counter was used up at
/// the moment of the loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn possibly_lost_counters_count_as_used_up() {
    let clock = manual();
    let mut single = Server::start(&[]);
    let cluster = Cluster::start();
    let mut config = patient(&single.url());
    config.breaker.failures = usize::MAX;
    let stores = [
        RedisStore::with_clock(config, as_clock(&clock)),
        RedisStore::with_clock(cluster.config(), as_clock(&clock)),
    ];
    let (limits, mut ledger) = (limits(), Ledger::default());
    let scopes: Vec<Scope> = (0..limits.len())
        .map(|n| match n % 3 {
            0 => Scope::new(format!("loss|{n}")),
            _ => Scope::in_group(format!("loss|user|{n}"), "loss|user"),
        })
        .collect();
    let slots = [name_at(&cluster, 0), name_at(&cluster, 1), name_at(&cluster, 2)];
    let people: Vec<Vec<KeyPart<'_>>> = vec![
        vec![KeyPart::Text(&slots[0])],
        vec![KeyPart::Text(&slots[1]), KeyPart::Text("POST /login")],
        vec![KeyPart::Text(&slots[2])],
        vec![],
    ];
    let key = |n: usize, caller: usize| CounterKey { scope: &scopes[n], parts: people[caller].as_slice() };
    // At least one loss must have been detected; and every loss that was known is.
    for store in &stores {
        for caller in 0..3 {
            store.charge(&[Charge::new(key(0, caller), &limits[0], Cost::ONE)]).await.expect("an answer");
        }
    }
    let single = single.restart(&[]);
    (3..6).for_each(|replica| cluster.fail_over(replica));
    let role = |server: usize| cluster.servers[server].info("role");
    wait_until("the replicas are primaries", || {
        (3..6).all(|one| role(one) == "master" && role(one - 3) == "slave")
    });
    for server in &cluster.servers[3..] {
        let _: () = server.command(&["FLUSHALL"]);
    }
    for store in &stores {
        for caller in 0..3 {
            let look = [cautious(Charge::new(key(0, caller), &limits[0], Cost::PEEK))];
            while store.charge(&look).await.is_err() {}
        }
    }
    let now = clock.now();
    for (n, limit) in limits.iter().enumerate() {
        for caller in 0..people.len() {
            ledger.debit(now, &[Charge::new(key(n, caller), limit, Cost::new(limit.capacity()))]);
        }
    }
    let mut rng = SplitMix64::new(11);
    let mut admitted = 0;
    for turn in 0..3_000 {
        let count = 1 + rng.below(4);
        let charges: Vec<Charge<'_>> = (0..count)
            .map(|_| {
                let n = usize::try_from(rng.below(limits.len() as u64)).expect("small");
                let caller = usize::try_from(rng.below(people.len() as u64)).expect("small");
                let enforcement = match rng.below(6) {
                    _ if n == ATTEMPTS => Enforcement::Independent,
                    0 => Enforcement::Alternative,
                    1 => Enforcement::Independent,
                    _ => Enforcement::Required,
                };
                let cost = if rng.below(9) == 0 { Cost::PEEK } else { Cost::new(1 + rng.below(2)) };
                let permit = PermitId(u128::from(rng.below(4)));
                cautious(Charge { enforcement, permit, ..Charge::new(key(n, caller), &limits[n], cost) })
            })
            .collect();
        let now = clock.now();
        if rng.below(20) == 0 {
            ledger.debit(now, &charges);
            for store in &stores {
                store.debit(&charges).await.expect("a debit");
            }
        } else {
            let expected = ledger.charge(now, &charges);
            admitted += u32::from(expected.admission == Admission::Admitted);
            for (which, store) in stores.iter().enumerate() {
                let outcomes = store.charge(&charges).await.expect("an answer");
                assert_eq!(outcomes, expected, "store {which}, turn {turn}, at {now:?}: {charges:#?}");
            }
        }
        clock.advance(TimeDelta::from_micros(match rng.below(12) {
            0..=5 => rng.below(1_000),
            6..=9 => rng.below(100_000),
            10 => rng.below(1_000_000),
            _ => rng.below(20) * rng.below(20) * 1_000_000,
        }));
    }
    assert!((300..2_700).contains(&admitted), "{admitted} of 3000: neither all nor nothing");
    for store in &stores {
        assert_eq!(store.mismatches(), 0);
    }
    assert_eq!(single.keys_without_expiry(), Vec::<String>::new());
}

/// A replica that had not heard of the last writes takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_missed_writes_hands_out_no_fresh_quota() {
    let mut cluster = Cluster::start();
    // A check that is not waited for may have been taken all the same, and is made again here.
    let store = RedisStore::connect(answered(&cluster.url()));
    let name = name_at(&cluster, 0);
    let (day, short) = (log(4, 86_400), log(2, 10));
    let spent = Counter::new(&store, &name, &day, LossPolicy::AssumeExhausted);
    let comfort = Counter::new(&store, &name, &day, LossPolicy::AssumeUnused);
    let named = |scope, limit: &Limit| Counter {
        scope: Scope::new(scope),
        ..Counter::new(&store, &name, limit, LossPolicy::AssumeExhausted)
    };
    let (known, brief) = (named("loss|known", &day), named("loss|brief", &short));
    assert!(known.check().await.is_allowed());
    // The replica has that, and nothing of what follows.
    let offset = |server: usize, field| cluster.servers[server].info(field);
    wait_until("the replica is up to date", || {
        offset(0, "master_repl_offset") == offset(3, "slave_repl_offset")
    });
    cluster.servers[3].signal("STOP");
    let _: i64 = cluster.servers[0].command(&["CLIENT", "KILL", "TYPE", "replica"]);
    assert_eq!((spent.admits().await, comfort.admits().await, brief.admits().await), (4, 4, 2));
    cluster.servers[0].kill();
    cluster.servers[3].signal("CONT");
    wait_until("the replica is primary", || cluster.servers[3].info("role") == "master");
    let Verdict::Denied { retry_after: Some(wait) } = brief.check().await else { panic!("fresh quota") };
    // What was spent stays spent; where nothing hangs on it, callers go on; what is known goes on as well.
    assert!(spent.check().await.is_denied());
    assert_eq!(comfort.admits().await, 4, "the new primary had not heard of them");
    assert_eq!(known.admits().await, 3);
    // For one period, and then it is served.
    assert!(wait <= TimeDelta::from_secs(10), "{wait:?}");
    while brief.check().await.is_denied() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(brief.admits().await, 1);
    assert!(spent.check().await.is_denied(), "its period is longer");
    assert_eq!(store.mismatches(), 0);
}

/// A server that comes back empty, by the setting.
#[tokio::test]
async fn the_setting_bounds_the_recovery_period() {
    let clock = manual();
    let mut server = Server::start(&[]);
    let with = |caution: Option<TimeDelta>| {
        let mut config: RedisConfig = patient(&server.url());
        config.breaker.failures = usize::MAX;
        config.loss_window = caution;
        RedisStore::with_clock(config, as_clock(&clock))
    };
    let limit = log(3, 60);
    let counter = |caution| {
        let counter = Counter::new(&with(caution), "alice", &limit, LossPolicy::AssumeExhausted);
        Counter { scope: Scope::new(format!("{caution:?}")), ..counter }
    };
    let (usual, capped, off) =
        (counter(None), counter(Some(TimeDelta::from_secs(20))), counter(Some(TimeDelta::ZERO)));
    for one in [&usual, &capped, &off] {
        assert_eq!(one.admits().await, 3);
    }
    let _server = server.restart(&[]);
    let denied = |secs| Verdict::Denied { retry_after: Some(TimeDelta::from_secs(secs)) };
    assert_eq!(off.admits().await, 3, "switched off, a crash hands out fresh quota");
    assert_eq!((usual.check().await, capped.check().await), (denied(60), denied(60)));
    clock.advance(TimeDelta::from_secs(19));
    assert_eq!((usual.check().await, capped.check().await), (denied(41), denied(41)));
    clock.advance(TimeDelta::from_secs(1));
    assert_eq!((usual.check().await, capped.admits().await), (denied(40), 3));
    clock.advance(TimeDelta::from_secs(40));
    assert_eq!(usual.admits().await, 3);
}

/// A caller who is locked out after a crash, and whom support has reset, stays reset: also once the units that it has
/// used since are back, when the counter's state is as good as none again.
#[tokio::test]
async fn a_reset_after_a_loss_lasts() {
    let clock = manual();
    let mut server = Server::start(&[]);
    let mut config = patient(&server.url());
    config.breaker.failures = usize::MAX;
    let store = RedisStore::with_clock(config, as_clock(&clock));
    let hour = |algorithm| {
        LimitSpec::new(algorithm, Rate::per(5, TimeDelta::from_secs(3_600))).build().expect("a limit")
    };
    let each = [
        Algorithm::Gcra,
        Algorithm::TokenBucket,
        Algorithm::LeakyBucket,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::StrictWindow,
        Algorithm::SlidingLog,
    ];
    let counters: Vec<Counter> = each
        .iter()
        .map(|algorithm| Counter::new(&store, "alice", &hour(*algorithm), LossPolicy::AssumeExhausted))
        .collect();
    for counter in &counters {
        assert!(counter.check().await.is_allowed());
    }
    let _server = server.restart(&[]);
    for counter in &counters {
        let name = counter.limit.algorithm();
        assert!(counter.check().await.is_denied(), "{name}");
        assert!(counter.last_known().is_assumed, "{name}");
        clock.advance(TimeDelta::from_secs(1));
        counter.reset().await;
        assert!(counter.check().await.is_allowed(), "{name}");
        assert!(!counter.last_known().is_assumed, "{name}");
    }
    // The one unit of each is back, and nothing is known of buckets but that they were reset.
    clock.advance(TimeDelta::from_secs(1_000));
    for counter in &counters {
        let expected = match counter.limit.algorithm() {
            Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket => 5,
            _ => 4,
        };
        assert_eq!(counter.admits().await, expected, "{}", counter.limit.algorithm());
    }
    assert_eq!(store.mismatches(), 0);
}
