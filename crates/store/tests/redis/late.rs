//! Replies after the deadline, overlapping batches, and pauses of a server: what is charged in the end, and what the breaker
//! makes of it.

use crate::faults::{Caller, quick};
use crate::proxy::{Fault, Proxy};
use crate::servers::{Server, patient};
use std::sync::mpsc::channel;
use std::time::Duration;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, LateAnswer, Limit,
    LimitSpec, LossPolicy, PermitId, Rate, Scope, StoreError, TimeDelta,
};
use tollgate_store::{BreakerState, RedisConfig, RedisStore};

fn limit(algorithm: Algorithm, count: u64) -> Limit {
    LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(86_400))).build().expect("a limit")
}

/// What Redis keeps: the text of the only bundle, or nothing.
fn kept(server: &Server) -> Option<String> {
    let keys: Vec<String> = server.command(&["KEYS", "tg1:*"]);
    keys.first().and_then(|key| server.command(&["GET", key]))
}

async fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    for _ in 0..6_000 {
        if let Some(value) = poll() {
            return value;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never came: {what}");
}

fn ends_with(server: &Server, count: u64) -> Option<()> {
    kept(server).is_some_and(|kept| kept.ends_with(&format!(",{count}"))).then_some(())
}

/// A charge that its caller no longer waits for is undone, unless the caller keeps it: then it hears what became of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_charge_is_undone_or_kept() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let mut config = quick(&proxy.url());
    config.breaker.silence = TimeDelta::from_secs(3_600);
    let store = RedisStore::connect(config);
    let (limit, scope, parts) =
        (limit(Algorithm::FixedWindow, 9), Scope::new("late"), [KeyPart::Text("alice")]);
    let charge = [Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE)];
    while store.charge(&charge).await.is_err() {}
    eventually("what was late at first to be undone", || ends_with(&server, 1)).await;
    proxy.set(Fault::StallAnswers);
    let Err(StoreError::Late(kept)) = store.charge(&charge).await else { panic!("an answer") };
    let abandoned = store.charge(&charge).await;
    assert!(matches!(abandoned, Err(StoreError::Late(_))), "{abandoned:?}");
    eventually("both at the server", || ends_with(&server, 3)).await;
    let (sender, answers) = channel();
    kept.keep(move |answer| sender.send(answer).expect("a test"));
    drop(abandoned);
    proxy.set(Fault::None);
    eventually("one to be undone", || ends_with(&server, 2)).await;
    assert_eq!(answers.recv(), Ok(LateAnswer::Charged(vec![charge[0].key.id()])));
    assert_eq!(store.status()[0].breaker, BreakerState::Closed);
    assert_eq!(store.last_known(&charge[0]).map(|known| known.used), Some(3), "late answers are answers");
}

/// Independent charges stand, also of a request that is denied: who admitted it meanwhile must not charge them again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_tells_of_independent_charges() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let mut config = quick(&proxy.url());
    config.breaker.silence = TimeDelta::from_secs(3_600);
    let store = RedisStore::connect(config);
    let attempts = LimitSpec::new(Algorithm::FixedWindow, Rate::per(1, TimeDelta::from_secs(86_400)));
    let attempts = attempts.count_denied().build().expect("a limit");
    let (wide, scopes) = (limit(Algorithm::FixedWindow, 9), ["attempts", "wide", "full"].map(Scope::new));
    let parts = [KeyPart::Text("alice")];
    let charge = |at: usize, limit, enforcement| {
        let key = CounterKey { scope: &scopes[at], parts: &parts };
        Charge { enforcement, ..Charge::new(key, limit, Cost::ONE) }
    };
    let none = limit(Algorithm::FixedWindow, 1);
    let charges = [
        charge(0, &attempts, Enforcement::Independent),
        charge(1, &wide, Enforcement::Independent),
        charge(2, &none, Enforcement::Required),
    ];
    while store.charge(&charges).await.is_err() {}
    let used = |at: usize| store.last_known(&charges[at]).map(|known| known.used);
    let before = used(1);
    proxy.set(Fault::StallAnswers);
    let Err(StoreError::Late(late)) = store.charge(&charges).await else { panic!("an answer") };
    let (sender, answers) = channel();
    late.keep(move |answer| sender.send(answer).expect("a test"));
    proxy.set(Fault::None);
    let counted = vec![charges[0].key.id(), charges[1].key.id()];
    assert_eq!(answers.recv(), Ok(LateAnswer::Charged(counted)), "the third is used up");
    assert_eq!(used(1), before.map(|used| used + 1));
}

/// A check that fails without an answer waits for it a moment longer. Time is tokio's: what is measured is what the
/// store waits for, not how busy the machine is.
#[tokio::test]
async fn a_guarded_limit_is_waited_for_a_moment_longer() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let store = RedisStore::connect(RedisConfig::parse(&proxy.url()).expect("a url"));
    let (limit, scope, parts) = (limit(Algorithm::Gcra, 9), Scope::new("guarded"), [KeyPart::Text("alice")]);
    let plain = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE);
    while store.charge(&[plain]).await.is_err() {}
    proxy.set(Fault::StallAnswers);
    tokio::time::pause();
    for (loss_policy, millis) in [(LossPolicy::default(), 10), (LossPolicy::AssumeExhausted, 30)] {
        let started = tokio::time::Instant::now();
        let answer = store.charge(&[Charge { loss_policy, ..plain }]).await;
        assert!(matches!(answer, Err(StoreError::Late(_))), "{answer:?}");
        let waited = started.elapsed().as_millis();
        assert!((millis..=millis + 1).contains(&waited), "{waited} of {millis} ms");
    }
    tokio::time::resume();
    proxy.set(Fault::None);
}

/// A caller that leaves while it waits must not leave its permit behind until it expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_permit_of_a_caller_that_left_is_released() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let store = RedisStore::connect(patient(&proxy.url()));
    let limit = limit(Algorithm::Concurrency, 1);
    let scope = Scope::new("permits");
    let asking = |id: u128, cost: Cost| {
        let (store, limit, scope) = (store.clone(), limit.clone(), scope.clone());
        async move {
            let parts = [KeyPart::Text("alice")];
            let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, cost);
            store
                .charge(&[Charge { permit: PermitId(id), ..charge }])
                .await
                .map(|outcomes| outcomes.admission)
        }
    };
    let charging = |id| asking(id, Cost::ONE);
    assert_eq!(asking(1, Cost::PEEK).await, Ok(Admission::Admitted), "connected");
    for fault in [Fault::StallAnswers, Fault::StallRequests] {
        proxy.set(Fault::None);
        eventually("the slot to be free", || kept(&server).is_none().then_some(())).await;
        proxy.set(fault);
        let waiting = tokio::spawn(charging(7));
        if fault == Fault::StallAnswers {
            eventually("the permit", || kept(&server)).await;
        } else {
            tokio::task::yield_now().await;
        }
        waiting.abort();
        assert!(waiting.await.is_err_and(|ended| ended.is_cancelled()));
    }
    proxy.set(Fault::None);
    for id in 100.. {
        if charging(id).await == Ok(Admission::Admitted) {
            break;
        }
        assert!(id < 3_000, "never released: {:?}", kept(&server));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// On a long link a check must not wait for the answer to the one before it: that would be another round trip.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_overlap() {
    let server = Server::start(&[]);
    let proxy = Proxy::to(server.port);
    let store = RedisStore::connect(patient(&proxy.url()));
    Caller::new(&store, "alice", 100).heals().await;
    proxy.set(Fault::StallAnswers);
    let mut waiting = Vec::new();
    for count in 2..=5 {
        let mut caller = Caller::new(&store, "alice", 100);
        waiting.push(tokio::spawn(async move { caller.check().await }));
        // None has been answered, and each has reached the server.
        eventually("the check at the server", || ends_with(&server, count)).await;
    }
    proxy.set(Fault::None);
    for check in waiting {
        assert_eq!(check.await.expect("a task"), Ok(Admission::Admitted));
    }
}

/// A pause in which a hundred checks time out is one event, and not a death.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_does_not_open_the_breaker() {
    let server = Server::start(&[]);
    let mut config = quick(&server.url());
    config.breaker.silence = TimeDelta::from_secs(3_600);
    let store = RedisStore::connect(config);
    let mut tenant = Caller::new(&store, "alice", 300);
    tenant.heals().await;
    server.signal("STOP");
    let checks: Vec<_> = (0..100)
        .map(|_| {
            let mut tenant = Caller::new(&store, "alice", 300);
            tokio::spawn(async move { tenant.check().await })
        })
        .collect();
    for check in checks {
        assert!(check.await.expect("a task").is_err());
    }
    assert_eq!(store.status()[0].breaker, BreakerState::Closed);
    server.signal("CONT");
    tenant.heals().await;
    eventually("all late charges to be undone", || {
        let count = kept(&server)?.rsplit(',').next()?.parse::<u64>().ok()?;
        (count <= 5).then_some(())
    })
    .await;
}

/// A key that holds something else fails its own requests, not those that share a script call with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_key_fails_its_own_requests_alone() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    let bucket = limit(Algorithm::Gcra, 1_000);
    let window = limit(Algorithm::FixedWindow, 1_000);
    let scope = Scope::new("damaged");
    for limit in [bucket, window] {
        let charge = async |user: String| {
            let parts = [KeyPart::Text(&user)];
            let key = CounterKey { scope: &scope, parts: &parts };
            store.charge(&[Charge::new(key, &limit, Cost::ONE)]).await.map(|outcomes| outcomes.admission)
        };
        for value in [&["LPUSH", "x"][..], &["SET", "no counter of ours"], &["SET", ";;:b;000:bx;"]] {
            assert_eq!(charge("bad".to_owned()).await, Ok(Admission::Admitted));
            let keys: Vec<String> = server.command(&["KEYS", "tg1:{bad}*"]);
            let _: i64 = server.command(&["DEL", &keys[0]]);
            let _: redis::Value = server.command(&[value[0], &keys[0], value[1]]);
            let (mut good, mut bad) = (0, 0);
            let all = (0..60).map(|n| charge(if n % 20 == 0 { "bad".to_owned() } else { format!("u{n}") }));
            for (n, result) in futures_util::future::join_all(all).await.into_iter().enumerate() {
                if n % 20 == 0 {
                    bad += usize::from(result.is_ok());
                } else {
                    good += usize::from(result == Ok(Admission::Admitted));
                }
            }
            assert_eq!(good, 57, "{value:?}: {bad}");
            assert_eq!(store.status()[0].breaker, BreakerState::Closed);
            let _: i64 = server.command(&["DEL", &keys[0]]);
            let _: String = server.command(&["FLUSHALL"]);
        }
    }
    assert_eq!(store.mismatches(), 0);
}
