//! Many permits of one counter: they are in a sorted set beside the bundle, and nothing but the cost of a call is different.

use crate::cluster::Cluster;
use crate::cluster_faults::name_at;
use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, ManualClock,
    Outcomes, Permit, PermitId, Rate, Scope, StoreError, TimeDelta, Timestamp,
};
use tollgate_store::RedisStore;

/// The holder that stands for all permits of the set in the text of a bundle, for nodes of former versions.
const OTHERS: &str = "ffffffffffffffffffffffffffffffff";

/// A counter of requests in flight.
#[derive(Clone)]
struct InFlight {
    store: RedisStore,
    scope: Scope,
    limit: Limit,
}

impl InFlight {
    fn new(store: RedisStore, count: u64) -> Self {
        let spec = LimitSpec::new(Algorithm::Concurrency, Rate::per(count, TimeDelta::from_secs(30)));
        Self { store, scope: Scope::new("in flight"), limit: spec.build().expect("a limit") }
    }

    async fn charge(&self, id: u128, cost: Cost) -> Result<Outcomes, StoreError> {
        let key = CounterKey { scope: &self.scope, parts: &[KeyPart::Text("fleet")] };
        self.store.charge(&[Charge { permit: PermitId(id), ..Charge::new(key, &self.limit, cost) }]).await
    }

    async fn admits(&self, id: u128) -> bool {
        self.charge(id, Cost::ONE).await.expect("an answer").admission == Admission::Admitted
    }

    async fn release(&self, id: u128) {
        let key = CounterKey { scope: &self.scope, parts: &[KeyPart::Text("fleet")] };
        let permit = Permit { key, limit: &self.limit, id: PermitId(id) };
        self.store.release(&[permit]).await.expect("a release");
    }

    async fn remaining(&self) -> u64 {
        self.charge(0, Cost::PEEK).await.expect("an answer").per_charge[0].remaining
    }
}

/// The bundle's key and the set's.
fn keys(server: &Server) -> (String, Option<String>) {
    let mut keys: Vec<String> = server.command(&["KEYS", "tg1:{fleet}*"]);
    keys.sort();
    let mut keys = keys.into_iter();
    (keys.next().expect("a bundle"), keys.next())
}

/// Holder and units of each permit in the text of a bundle.
fn in_text(text: &str) -> Vec<(String, u64)> {
    let fields: Vec<&str> = text.split(',').skip(1).collect();
    fields.chunks(3).map(|one| (one[0].to_owned(), one[1].parse().expect("units"))).collect()
}

/// 5,000 requests in flight must cost Redis no more per request than 50 do: what a call reads and writes stays as small.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_is_short_however_many_permits_are_held() {
    let server = Server::start(&[]);
    let counter = InFlight::new(RedisStore::connect(patient(&server.url())), 1_000);
    let tasks: Vec<_> = (0..1_200)
        .map(|id| {
            let counter = counter.clone();
            tokio::spawn(async move { counter.admits(id + 1).await })
        })
        .collect();
    let mut admitted = Vec::new();
    for (id, task) in tasks.into_iter().enumerate() {
        if task.await.expect("a task") {
            admitted.push(id as u128 + 1);
        }
    }
    assert_eq!((admitted.len(), counter.remaining().await), (1_000, 0));
    let (bundle, set) = keys(&server);
    let set = set.expect("a set");
    let text: String = server.command(&["GET", &bundle]);
    assert!(text.len() < 2_000, "{text}");
    assert!(server.command::<u64>(&["ZCARD", &set]) >= 980);
    assert_eq!(in_text(&text).iter().map(|(_, units)| units).sum::<u64>(), 1_000, "{text}");
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
    // In the set, in the text, and of nobody: each is freed once.
    for id in [admitted[999], admitted[0], 5_000, admitted[999], admitted[0]] {
        counter.release(id).await;
    }
    assert_eq!(counter.remaining().await, 2);
    assert!(counter.admits(admitted[500]).await, "a renewal");
    assert_eq!(counter.remaining().await, 2);
    for id in admitted {
        counter.release(id).await;
    }
    assert_eq!(counter.remaining().await, 1_000);
    assert_eq!(server.command::<Vec<String>>(&["KEYS", "tg1:{fleet}*"]), Vec::<String>::new());
    assert_eq!(counter.store.mismatches(), 0);
}

/// After an upgrade the permits that nodes of a former version have taken are held, renewed and released as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_former_version_are_held() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_017)));
    let counter = InFlight::new(RedisStore::with_clock(patient(&server.url()), clock.clone()), 101);
    assert!(counter.admits(1).await);
    let (bundle, _) = keys(&server);
    let text: String = server.command(&["GET", &bundle]);
    // `;name:p<expiry>,1,1,<deadline>`, and 99 more.
    let deadline = text.rsplit(',').next().expect("a deadline").to_owned();
    let more: String = (2..=100).map(|id| format!(",{id:x},1,{deadline}")).collect();
    let _: () = server.command(&["SET", &bundle, &format!("{text}{more}"), "PX", "60000"]);
    assert_eq!(counter.remaining().await, 1);
    assert!(counter.admits(1_000).await);
    assert!(!counter.admits(1_001).await);
    // Those of others stay in the text, where nodes of a former version find them; all of them count the rest.
    let text: String = server.command(&["GET", &bundle]);
    let held = in_text(&text);
    assert_eq!(held.len(), 101, "{text}");
    assert_eq!(held.last(), Some(&(OTHERS.to_owned(), 1)));
    counter.release(2).await;
    clock.advance(TimeDelta::from_secs(20));
    assert!(counter.admits(3).await, "a renewal");
    assert_eq!(counter.remaining().await, 1);
    clock.advance(TimeDelta::from_secs(11));
    assert_eq!(counter.remaining().await, 100, "only the renewed one is left");
    counter.release(3).await;
    assert_eq!(counter.remaining().await, 101);
}

/// Who lowers a limit to a few requests in flight must still have the others counted, renewed and released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lower_limit_finds_the_permits_of_a_higher_one() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    let (before, lowered) = (InFlight::new(store.clone(), 40), InFlight::new(store.clone(), 10));
    for id in 1..=30 {
        assert!(before.admits(id).await);
    }
    assert_eq!((before.remaining().await, lowered.remaining().await), (10, 0));
    for id in [1, 16, 17, 30] {
        assert!(lowered.admits(id).await, "a renewal of {id}");
        lowered.release(id).await;
    }
    assert!(!lowered.admits(31).await);
    assert_eq!(before.remaining().await, 14);
    for id in 1..=25 {
        lowered.release(id).await;
    }
    assert_eq!((before.remaining().await, lowered.remaining().await), (36, 6));
    assert_eq!(store.mismatches(), 0);
}

/// A set that another program has written must not free permits, and is never replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_set_is_an_error() {
    let server = Server::start(&[]);
    let counter = InFlight::new(RedisStore::connect(patient(&server.url())), 40);
    let damages = [&["SET", "x"][..], &["LPUSH", "x"], &["ZADD", "8000000000000000", "hello"]];
    for (number, damage) in damages.into_iter().enumerate() {
        let _: () = server.command(&["FLUSHALL"]);
        for id in 1..=30 {
            assert!(counter.admits(id).await);
        }
        let set = keys(&server).1.expect("a set");
        if number < 2 {
            let _: () = server.command(&["DEL", &set]);
        }
        let words: Vec<&str> = [&damage[..1], &[set.as_str()], &damage[1..]].concat();
        let _: () = server.command(&words);
        for id in [1, 20, 31] {
            let error = counter.charge(id, Cost::ONE).await.expect_err("no answer").to_string();
            assert!(error.contains("key 2 holds no counters"), "{error}");
        }
        // Before the set begins, too.
        if number < 2 {
            let (bundle, _) = keys(&server);
            let _: () = server.command(&["DEL", &bundle]);
            for id in 1..=16 {
                assert!(counter.admits(id).await);
            }
            assert!(counter.charge(17, Cost::ONE).await.is_err());
            assert_eq!(server.command::<String>(&["TYPE", &set]), ["string", "list"][number]);
        }
    }
}

/// An operator whose Redis user lacks the commands of sorted sets must not lose limits by an upgrade.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_sorted_sets_keeps_permits_in_the_text() {
    let server = Server::start(&[]);
    let _: () = server.command(&["ACL", "SETUSER", "default", "-@sortedset"]);
    let counter = InFlight::new(RedisStore::connect(patient(&server.url())), 40);
    for id in 1..=41 {
        assert_eq!(counter.admits(id).await, id <= 40);
    }
    assert_eq!(keys(&server).1, None);
    counter.release(7).await;
    assert!(counter.admits(41).await);
}

/// A request that another slot denies leaves every permit as it was: a new one free, a renewed one with its former deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_request_leaves_permits_as_they_were() {
    let cluster = Cluster::with_replicas(0);
    let names = [name_at(&cluster, 0), name_at(&cluster, 1)];
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_017)));
    let store = RedisStore::with_clock(cluster.config(), clock.clone());
    let build = |algorithm, count| {
        LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(30))).build().expect("a limit")
    };
    let (in_flight, blocked) = (build(Algorithm::Concurrency, 50), build(Algorithm::Gcra, 0));
    let scopes = [Scope::new("in flight"), Scope::new("blocked")];
    let parts = names.each_ref().map(|name| [KeyPart::Text(name)]);
    let hold = |id: u128, cost| {
        let key = CounterKey { scope: &scopes[0], parts: &parts[0] };
        Charge { permit: PermitId(id), ..Charge::new(key, &in_flight, cost) }
    };
    let denied = Charge::new(CounterKey { scope: &scopes[1], parts: &parts[1] }, &blocked, Cost::ONE);
    let peek = async || store.charge(&[hold(0, Cost::PEEK)]).await.expect("an answer").per_charge[0];
    for id in 1..=40 {
        assert_eq!(
            store.charge(&[hold(id, Cost::ONE)]).await.expect("an answer").admission,
            Admission::Admitted
        );
    }
    clock.advance(TimeDelta::from_secs(10));
    for (id, units) in [(41, 1), (42, 3), (0, 1), (5, 1), (30, 1), (40, 7)] {
        let answer = store.charge(&[hold(id, Cost::new(units)), denied]).await.expect("an answer");
        assert_eq!(answer.admission, Admission::Denied);
        let after = peek().await;
        assert_eq!((after.remaining, after.reset_after), (10, TimeDelta::from_secs(20)), "{id}");
    }
    clock.advance(TimeDelta::from_secs(20));
    assert_eq!(peek().await.remaining, 50);
    assert_eq!(store.mismatches(), 0);
}
