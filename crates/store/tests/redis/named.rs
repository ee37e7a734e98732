//! Stores by name: one decision over several, and one's death touches only its own counters.

use crate::faults::quick;
use crate::servers::{Server, patient, wait_until};
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::conformance::{Ledger, SplitMix64};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit,
    LimitSpec, ManualClock, Rate, Scope, StoreError, TimeDelta, Timestamp,
};
use tollgate_store::{BreakerState, RedisStore};

fn limit(algorithm: Algorithm, count: u64, secs: u64) -> Limit {
    LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(secs))).build().expect("in range")
}

/// A scope whose counters this store keeps; the default store without a name.
fn scope(store: Option<&str>, name: &str) -> Scope {
    let group = format!("{}api|user", store.map(Scope::store_prefix).unwrap_or_default());
    Scope::in_group(format!("{group}|{name}"), &group)
}

/// Without it a request that one store denies eats quota of the other, or counts differ from those of one store.
#[tokio::test(flavor = "multi_thread")]
async fn several_stores_answer_as_one_does() {
    let (main, eu) = (Server::start(&[]), Server::start(&[]));
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
    let connect = |server: &Server| RedisStore::with_clock(patient(&server.url()), clock.clone());
    let store = connect(&main).with_named(vec![("eu".to_owned(), connect(&eu))]);
    let limits = [
        limit(Algorithm::Gcra, 5, 60),
        limit(Algorithm::Gcra, 7, 3),
        limit(Algorithm::FixedWindow, 4, 10),
        limit(Algorithm::SlidingLog, 4, 10),
        limit(Algorithm::TokenBucket, 6, 6)
            .spec()
            .refill_interval(TimeDelta::from_secs(2))
            .build()
            .expect("in range"),
    ];
    let scopes: Vec<(usize, Scope)> = [None, Some("eu")]
        .into_iter()
        .flat_map(|store| (0..limits.len()).map(move |at| (at, scope(store, &format!("{at}|x")))))
        .collect();
    let (mut rng, mut ledger, mut both) = (SplitMix64::new(3), Ledger::default(), 0);
    for turn in 0..1_500 {
        let parts = [KeyPart::Text(rng.pick::<&str>(&["alice", "bob"]))];
        let mut charges: Vec<Charge<'_>> = Vec::new();
        for _ in 0..1 + rng.below(4) {
            let (at, scope) = rng.pick(&scopes);
            let key = CounterKey { scope, parts: &parts };
            let enforcement = match rng.below(6) {
                0 => Enforcement::Alternative,
                1 => Enforcement::Independent,
                _ => Enforcement::Required,
            };
            if charges.iter().all(|known| known.key != key) {
                charges.push(Charge {
                    enforcement,
                    ..Charge::new(key, &limits[*at], Cost::new(1 + rng.below(2)))
                });
            }
        }
        both += u64::from(charges.iter().any(|one| one.key.scope.store() != charges[0].key.scope.store()));
        let expected = ledger.charge(clock.now(), &charges);
        let outcomes = store.charge(&charges).await.expect("an answer");
        assert_eq!(outcomes, expected, "turn {turn}: {charges:?}");
        if rng.below(10) == 0 {
            ledger.debit(clock.now(), &charges);
            store.debit(&charges).await.expect("debited");
        }
        clock.advance(TimeDelta::from_micros(rng.below(700_000)));
    }
    assert!(both > 300, "{both} requests in both stores");
    let keys = |server: &Server| server.command::<Vec<String>>(&["KEYS", "*"]).len();
    assert!(keys(&main) > 0 && keys(&eu) > 0, "each keeps its own");
    assert_eq!(store.mismatches(), 0);
}

/// Without it the death of one tenant's Redis changes what others may use, or takes their requests with it.
#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_one_store_leaves_the_others_exact() {
    let (main, mut eu) = (Server::start(&[]), Server::start(&[]));
    // A server that is gone refuses at once; no other request may be late on a busy machine.
    let connect = |server: &Server| {
        let mut config = quick(&server.url());
        config.deadline = Duration::from_secs(5);
        RedisStore::connect(config)
    };
    let store = connect(&main).with_named(vec![("eu".to_owned(), connect(&eu))]);
    let daily = limit(Algorithm::FixedWindow, 50, 86_400);
    let (here, there, unknown) = (scope(None, "d"), scope(Some("eu"), "d"), scope(Some("us"), "d"));
    let parts = [KeyPart::Text("alice")];
    let charge = |scope, cost| Charge::new(CounterKey { scope, parts: &parts }, &daily, cost);
    let pair = [charge(&here, Cost::ONE), charge(&there, Cost::ONE)];
    assert_eq!(store.charge(&pair).await.expect("both answer").admission, Admission::Admitted);
    let used = async |scope| match store.charge(&[charge(scope, Cost::PEEK)]).await {
        Ok(outcomes) => Some(50 - outcomes.per_charge[0].remaining),
        Err(_) => None,
    };
    let before = used(&here).await.expect("it answers");
    eu.kill();
    // Every request in both fails for the dead one's part alone.
    let breaker = || store.status().into_iter().find(|shard| shard.store.is_some()).expect("a shard").breaker;
    let mut tries = 0;
    while breaker() != BreakerState::Open {
        tries += 1;
        assert!(tries < 10_000, "the breaker opens");
        let Err(StoreError::Partial { failed, .. }) = store.charge(&pair).await else {
            panic!("the other part is decided");
        };
        assert_eq!(failed, [1]);
    }
    // Undone, or not charged at all once the breaker is open.
    let mut after = used(&here).await;
    for _ in 0..1_000 {
        if after == Some(before) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        after = used(&here).await;
    }
    assert_eq!(after, Some(before), "what a request with a dead part took is given back");
    for _ in 0..100 {
        assert!(
            matches!(store.charge(&pair).await, Err(StoreError::Partial { failed, .. }) if failed == [1])
        );
    }
    assert_eq!(used(&here).await, Some(before), "nothing is charged for a request that cannot be decided");
    let mut admitted = before;
    while store.charge(&[charge(&here, Cost::ONE)]).await.expect("it answers").admission
        == Admission::Admitted
    {
        admitted += 1;
    }
    assert_eq!(admitted, 50, "its limit is neither more nor less");
    assert_eq!(used(&there).await, None);
    let shards = store.status();
    assert_eq!((shards[0].store.as_deref(), shards[0].breaker), (None, BreakerState::Closed));
    // A name that is not configured is an outage of its own counters too.
    let odd = [charge(&here, Cost::PEEK), charge(&unknown, Cost::ONE)];
    assert!(matches!(store.charge(&odd).await, Err(StoreError::Partial { failed, .. }) if failed == [1]));
    let again = eu.restart(&[]);
    wait_until("the other store heals", || breaker() == BreakerState::Closed);
    let mut healed = None;
    for _ in 0..1_000 {
        healed = used(&there).await;
        if healed.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(healed, Some(0), "it has lost what it had, and answers");
    drop(again);
}
