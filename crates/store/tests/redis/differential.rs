//! The same random traces to a plain map of states, one Redis, and a cluster: every field of every outcome is compared.
//!
//! Users move from memory to Redis to a cluster as they grow, and must not see other answers for it. Charges of one
//! request live in one bundle, in several bundles of one slot, and in several slots.

use crate::cluster::Cluster;
use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance::Ledger;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{
    Algorithm, Calendar, CalendarUnit, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart,
    Limit, LimitSpec, ManualClock, Period, Permit, PermitId, Rate, Scope, TimeDelta, Timestamp, nonzero,
};
use tollgate_store::{MemoryConfig, MemoryStore, RedisStore};

/// Limits that users write, and odd ones: fractions of a microsecond, fractions too fine for a word, calendars, jitter.
pub(crate) fn limits() -> Vec<Limit> {
    let spec = |algorithm, count, millis| {
        LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_millis(millis)))
    };
    let zone = |unit, name| Period::Calendar(Calendar::new(unit, name).expect("a zone"));
    let by = |count, period| LimitSpec::new(Algorithm::FixedWindow, Rate { count, period });
    [
        spec(Algorithm::Gcra, 5, 1_000),
        spec(Algorithm::Gcra, 200, 60_000).burst(7),
        spec(Algorithm::Gcra, 7, 1_000).burst(3),
        spec(Algorithm::Gcra, 99_991, 86_400_000).burst(5),
        spec(Algorithm::Gcra, 1 << 40, 1_000).burst(1 << 30),
        spec(Algorithm::Gcra, 0, 1_000),
        spec(Algorithm::TokenBucket, 3, 7).burst(9),
        spec(Algorithm::LeakyBucket, 5, 1_000).burst(8).with_delay(),
        spec(Algorithm::FixedWindow, 6, 1_000),
        spec(Algorithm::FixedWindow, 6, 90_000).jitter(),
        spec(Algorithm::FixedWindow, 1 << 40, 1),
        by(9, zone(CalendarUnit::Day, "Europe/Zurich")),
        by(9, zone(CalendarUnit::Month, "America/New_York")),
        spec(Algorithm::SlidingWindow, 8, 1_000),
        spec(Algorithm::SlidingWindow, 8, 60_000).jitter(),
        spec(Algorithm::SlidingWindow, 1 << 39, 3_600_000),
        spec(Algorithm::StrictWindow, 8, 60_000).jitter(),
        spec(Algorithm::StrictWindow, 8, 1_000).slots(7),
        spec(Algorithm::SlidingLog, 8, 1_000),
        spec(Algorithm::Concurrency, 5, 30_000),
        spec(Algorithm::FixedWindow, 4, 1_000).count_denied(),
        spec(Algorithm::TokenBucket, 60, 60_000).burst(20).refill_interval(TimeDelta::from_secs(10)),
        spec(Algorithm::TokenBucket, 6, 60_000).refill_interval(TimeDelta::from_millis(700)).jitter(),
        spec(Algorithm::TokenBucket, 7, 1_000).burst(30).refill_interval(TimeDelta::from_millis(300)),
        spec(Algorithm::TokenBucket, 99_991, 86_400_000).burst(8).refill_interval(TimeDelta::from_secs(60)),
    ]
    .into_iter()
    .map(|spec| spec.build().expect("in range"))
    .collect()
}

/// Where the last limit stands: it counts attempts, which a store may only do on its own.
pub(crate) const ATTEMPTS: usize = 20;

async fn compare(seed: u64, steps: usize, stores: &[RedisStore], clock: &ManualClock, memory: bool) {
    let (limits, mut rng, mut ledger) = (limits(), SplitMix64::new(seed), Ledger::default());
    let in_memory = MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), clock).expect("a store");
    // Some share a group, as the windows of one rule do; some are alone.
    let scopes: Vec<Scope> = (0..limits.len())
        .map(|n| match n % 3 {
            0 => Scope::new(format!("{seed}|{n}")),
            _ => Scope::in_group(format!("{seed}|user|{n}"), &format!("{seed}|user")),
        })
        .collect();
    let people: Vec<Vec<KeyPart<'_>>> = vec![
        vec![KeyPart::Text("alice")],
        vec![KeyPart::Text("alice"), KeyPart::Text("POST /login")],
        vec![KeyPart::Secret("bob's key")],
        vec![],
    ];
    for turn in 0..steps {
        let count = 1 + rng.below(5);
        let mut charges: Vec<Charge<'_>> = (0..count)
            .map(|_| {
                let n = usize::try_from(rng.below(limits.len() as u64)).expect("small");
                let limit = &limits[n];
                let cost = match rng.below(14) {
                    0 => Cost::PEEK,
                    1 => Cost::refund(1 + rng.below(3)),
                    2 => Cost::new(limit.capacity() + rng.below(2)),
                    3 => Cost::new(1 + rng.below(limit.capacity().max(1))),
                    4 => Cost::new(u64::MAX >> rng.below(30)),
                    _ => Cost::new(1 + rng.below(3)),
                };
                let enforcement = match rng.below(6) {
                    _ if n == ATTEMPTS => Enforcement::Independent,
                    0 => Enforcement::Alternative,
                    1 => Enforcement::Independent,
                    _ => Enforcement::Required,
                };
                let key = CounterKey { scope: &scopes[n], parts: rng.pick(&people).as_slice() };
                Charge {
                    enforcement,
                    permit: PermitId(u128::from(rng.below(4))),
                    ..Charge::new(key, limit, cost)
                }
            })
            .collect();
        if rng.below(8) == 0 {
            // One counter twice.
            charges.push(charges[0]);
        }
        let now = clock.now();
        match rng.below(20) {
            0 => {
                ledger.debit(now, &charges);
                in_memory.debit(&charges).await.expect("memory");
                for store in stores {
                    store.debit(&charges).await.expect("a debit");
                }
            }
            1 => {
                let permits: Vec<Permit<'_>> = charges
                    .iter()
                    .map(|one| Permit { key: one.key, limit: one.limit, id: one.permit })
                    .collect();
                ledger.release(&permits);
                in_memory.release(&permits).await.expect("memory");
                for store in stores {
                    store.release(&permits).await.expect("a release");
                }
            }
            _ => {
                let expected = ledger.charge(now, &charges);
                let outcomes = in_memory.apply(&charges);
                assert!(!memory || outcomes == expected, "memory, seed {seed}, turn {turn}");
                for (which, store) in stores.iter().enumerate() {
                    let outcomes = store.charge(&charges).await.expect("an answer");
                    assert_eq!(
                        outcomes, expected,
                        "store {which}, seed {seed}, turn {turn}, at {now:?}: {charges:#?}"
                    );
                }
            }
        }
        clock.advance(TimeDelta::from_micros(match rng.below(12) {
            0..=4 => 0,
            5 => 1,
            6..=8 => rng.below(300_000),
            9 => rng.below(3_000_000),
            10 => rng.below(100_000_000),
            _ => rng.below(40) * 3_600_000_000,
        }));
    }
    for store in stores {
        assert_eq!(store.mismatches(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_one_redis_and_a_cluster_answer_alike() {
    let (server, cluster) = (Server::start(&[]), Cluster::with_replicas(0));
    for seed in 0..6 {
        let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
        let shared_clock: Arc<dyn Clock> = clock.clone();
        let stores = [
            RedisStore::with_clock(patient(&server.url()), Arc::clone(&shared_clock)),
            RedisStore::with_clock(cluster.config(), shared_clock),
        ];
        compare(seed, 1_500, &stores, &clock, true).await;
    }
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
    for primary in &cluster.servers {
        assert_eq!(primary.keys_without_expiry(), Vec::<String>::new());
    }
}

/// The windows of one rule, as most users write them, beside others of the same tenant: the requests that the quick
/// script decides, over bundles that it shares with the general one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_of_one_rule_are_independent_of_their_batch() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
    let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
    let (mut rng, mut ledger) = (SplitMix64::new(7), Ledger::default());
    let build = |algorithm, count, secs| {
        LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(secs))).build().expect("in range")
    };
    let limits = [
        ("gcra|1s", build(Algorithm::Gcra, 5, 1)),
        ("gcra|1m", build(Algorithm::Gcra, 40, 60)),
        ("gcra|1h", build(Algorithm::Gcra, 500, 3_600)),
        ("endpoint=POST|gcra|1s", build(Algorithm::Gcra, 4, 1)),
        // The first again at another rate, as after a change of the rule: in fractions of a microsecond, and whole.
        ("gcra|1s", build(Algorithm::Gcra, 7, 1)),
        ("gcra|1s", build(Algorithm::Gcra, 2, 1)),
        ("fixed_window|1s", build(Algorithm::FixedWindow, 6, 1)),
    ];
    let scopes: Vec<Scope> =
        limits.iter().map(|(label, _)| Scope::in_group(format!("api|user|{label}"), "api|user")).collect();
    for turn in 0..6_000 {
        let parts = [KeyPart::Text(rng.pick::<&str>(&["alice", "bob"]))];
        let first = rng.below(7);
        let picked: Vec<usize> = match rng.below(4) {
            0 => vec![usize::try_from(first).expect("small")],
            1 => vec![0, 1, 2],
            2 => vec![2, 3],
            _ => vec![0, 1, 2, 3],
        };
        let cost = Cost::new(1 + rng.below(2));
        let charge =
            |n: &usize| Charge::new(CounterKey { scope: &scopes[*n], parts: &parts }, &limits[*n].1, cost);
        let charges: Vec<Charge<'_>> = picked.iter().map(charge).collect();
        let expected = ledger.charge(clock.now(), &charges);
        let outcomes = store.charge(&charges).await.expect("an answer");
        assert_eq!(outcomes, expected, "turn {turn}: {picked:?}");
        match rng.below(40) {
            0..20 => clock.advance(TimeDelta::from_micros(rng.below(400_000))),
            // A clock that goes back, by no more than what everybody still remembers.
            20 => clock.set(clock.now() - TimeDelta::from_micros(rng.below(1_000))),
            _ => {}
        }
    }
    assert_eq!(store.mismatches(), 0);
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
}

/// One counter that is asked about by limits of other counts and bursts, as a caller's is whose tier or quota changes: what
/// is denied or only looked at changes nothing for the others, and all stores agree on what is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_change_answer_alike() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
    let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
    let in_memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock.clone()).expect("a store");
    let (mut rng, mut ledger) = (SplitMix64::new(11), Ledger::default());
    let spec = |count, burst| {
        LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(3_600))).burst(burst)
    };
    let (usual, above) = (
        [(10, 10), (100, 10), (100, 100), (7, 3), (2_400, 1), (1_009, 50), (10, 1), (1_000, 10)],
        [(10, 25), (10, 30), (100, 2_000), (7, 20)],
    );
    let limits: Vec<Limit> = [&usual[..], &above[..], &above[..2]]
        .concat()
        .into_iter()
        .map(|(count, burst)| spec(count, burst).build().expect("in range"))
        .collect();
    let (own, beside) = (Scope::in_group("api|key|1h", "api|key"), Scope::in_group("api|key|1m", "api|key"));
    let other = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(60))).burst(90);
    let other = other.build().expect("in range");
    for turn in 0..8_000 {
        let parts = [KeyPart::Text(rng.pick::<&str>(&["alice", "bob"]))];
        let limit = rng.pick(&limits);
        let cost = match rng.below(8) {
            0 => Cost::PEEK,
            1 => Cost::refund(1 + rng.below(3)),
            2 => Cost::refund(limit.refill_cost()),
            3 => Cost::new(1 + rng.below(limit.capacity() + 2)),
            _ => Cost::ONE,
        };
        let mut charges = vec![Charge::new(CounterKey { scope: &own, parts: &parts }, limit, cost)];
        if rng.below(3) == 0 {
            charges.push(Charge::new(CounterKey { scope: &beside, parts: &parts }, &other, Cost::ONE));
        }
        let expected = ledger.charge(clock.now(), &charges);
        assert_eq!(in_memory.apply(&charges), expected, "memory, turn {turn}: {charges:?}");
        let outcomes = store.charge(&charges).await.expect("an answer");
        assert_eq!(outcomes, expected, "turn {turn}: {charges:?}");
        clock.advance(TimeDelta::from_micros(match rng.below(4) {
            0 => rng.below(1_000_000_000),
            1 => rng.below(1_000_000),
            _ => 0,
        }));
    }
    assert_eq!(store.mismatches(), 0);
}
