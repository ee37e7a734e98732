//! Keys that another program has written: each concerns its own checks alone, never hands out a fresh budget, and is never
//! overwritten.

use crate::servers::{Server, patient};
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, LossPolicy,
    Rate, Scope, StoreError, TimeDelta,
};
use tollgate_store::RedisStore;

/// Texts that no script writes. Numbers, and what looks like a bundle at its beginning, included.
const TEXTS: [&str; 14] = [
    "",
    "hello",
    "0",
    "12345",
    "-1",
    "a text of 19 bytes!",
    "0000000000000001601",
    "0x0000000000000f601",
    ";",
    ";junk",
    ";601:xhello",
    ";601:bhello",
    ";601:b1",
    ";AAAAAAAAAAA:w99999999999999999999,1,1",
];

struct Caller {
    store: RedisStore,
    limits: Vec<(Scope, Limit)>,
    loss_policy: LossPolicy,
}

impl Caller {
    fn new(store: &RedisStore, algorithms: &[Algorithm], loss_policy: LossPolicy) -> Self {
        let limit = |algorithm: &Algorithm| {
            let rate = Rate::per(3, TimeDelta::from_secs(3_600));
            let scope = Scope::new(format!("damaged|{algorithm}"));
            (scope, LimitSpec::new(*algorithm, rate).build().expect("a limit"))
        };
        Self { store: store.clone(), limits: algorithms.iter().map(limit).collect(), loss_policy }
    }

    async fn check(&self, name: &str) -> Result<Admission, StoreError> {
        let parts = [KeyPart::Text(name)];
        let charges: Vec<Charge<'_>> = self
            .limits
            .iter()
            .map(|(scope, limit)| {
                let key = CounterKey { scope, parts: &parts };
                Charge { loss_policy: self.loss_policy, ..Charge::new(key, limit, Cost::ONE) }
            })
            .collect();
        self.store.charge(&charges).await.map(|outcomes| outcomes.admission)
    }
}

/// A key of this caller.
fn key_of(server: &Server, name: &str) -> String {
    let keys: Vec<String> = server.command(&["KEYS", &format!("tg1:{{{name}}}*")]);
    keys.into_iter().min().expect("a key")
}

/// A `SET` by mistake must not restore a caller's budget, whichever script reads the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_over_a_counter_is_an_error_of_its_checks_alone() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    use Algorithm::{FixedWindow, Gcra, SlidingLog};
    for algorithms in [&[Gcra][..], &[Gcra, FixedWindow], &[FixedWindow], &[SlidingLog]] {
        let caller = Caller::new(&store, algorithms, LossPolicy::AssumeUnused);
        for (number, text) in TEXTS.iter().enumerate() {
            let name = format!("u{number}x{}", algorithms.len());
            let _: () = server.command(&["FLUSHALL"]);
            assert_eq!(caller.check(&name).await, Ok(Admission::Admitted));
            let key = key_of(&server, &name);
            let _: () = server.command(&["SET", &key, text]);
            // Alone, and in one call with others.
            let others: Vec<String> = (0..8).map(|n| format!("other{n}")).collect();
            let all = others.iter().chain([&name]).map(|name| caller.check(name));
            let mut results = futures_util::future::join_all(all).await;
            let damaged = results.pop().expect("the last");
            assert!(
                matches!(&damaged, Err(StoreError::Unavailable(why)) if why.contains("holds no counters")),
                "{algorithms:?} {text:?}: {damaged:?}"
            );
            assert!(results.iter().all(|other| *other == Ok(Admission::Admitted)), "{text:?}: {results:?}");
            assert!(caller.check(&name).await.is_err(), "{text:?}");
            assert_eq!(server.command::<String>(&["GET", &key]), *text, "it is not overwritten");
        }
    }
    let shard = store.status().remove(0);
    assert_eq!(shard.breaker.name(), "closed");
    assert!(shard.errors.iter().any(|(kind, count)| *kind == "damaged_key" && *count > 0), "{shard:?}");
}

/// `MGET` says nothing of a key of another type: requests that share a call must not replace it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_type_is_never_overwritten() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    for algorithms in [&[Algorithm::Gcra][..], &[Algorithm::FixedWindow]] {
        let caller = Caller::new(&store, algorithms, LossPolicy::AssumeUnused);
        let _: () = server.command(&["FLUSHALL"]);
        assert_eq!(caller.check("bad").await, Ok(Admission::Admitted));
        let key = key_of(&server, "bad");
        let _: () = server.command(&["DEL", &key]);
        let _: () = server.command(&["LPUSH", &key, "x"]);
        for _ in 0..20 {
            let names: Vec<String> = (0..12).map(|n| format!("good{n}")).collect();
            let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
            names.insert(6, "bad");
            let results = futures_util::future::join_all(names.iter().map(|name| caller.check(name))).await;
            assert!(results[6].is_err(), "{results:?}");
            assert!(results.iter().enumerate().all(|(at, one)| at == 6 || one.is_ok()), "{results:?}");
        }
        assert_eq!(server.command::<String>(&["TYPE", &key]), "list");
    }
}

/// Deleting a damaged key, as the log says, must not be a way to fresh logins; limits for comfort begin anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_key_counts_as_used_up_where_that_matters() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    for (loss_policy, expected) in
        [(LossPolicy::AssumeExhausted, Admission::Denied), (LossPolicy::AssumeUnused, Admission::Admitted)]
    {
        for algorithms in [&[Algorithm::Gcra][..], &[Algorithm::SlidingLog]] {
            let caller = Caller::new(&store, algorithms, loss_policy);
            let name = format!("{loss_policy:?}");
            let _: () = server.command(&["FLUSHALL"]);
            assert_eq!(caller.check(&name).await, Ok(Admission::Admitted));
            let key = key_of(&server, &name);
            let _: () = server.command(&["SET", &key, "hello"]);
            assert!(caller.check(&name).await.is_err());
            let _: () = server.command(&["DEL", &key]);
            assert_eq!(caller.check(&name).await, Ok(expected), "{algorithms:?} {loss_policy:?}");
            assert_eq!(caller.check("another").await, Ok(Admission::Admitted));
        }
    }
}
