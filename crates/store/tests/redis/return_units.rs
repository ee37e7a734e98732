//! Requests that span slots and are refused by one of them, while others charge the same counters: what is given back never
//! lets more through than the limit, and when all is quiet everything is there again.

use crate::cluster::Cluster;
use crate::cluster_faults::name_at;
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec,
    ManualClock, PermitId, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::RedisStore;

const LIMIT: u64 = 40;

fn limit(algorithm: Algorithm) -> Limit {
    LimitSpec::new(algorithm, Rate::per(LIMIT, TimeDelta::from_secs(86_400))).build().expect("a limit")
}

/// Charges `LIMIT` units one by one, beside requests that take of the same counter and are refused elsewhere.
/// Returns how many were admitted while the others were under way, and what was left when all was quiet.
async fn contend(store: &RedisStore, algorithm: Algorithm, names: [&str; 2]) -> (u64, u64) {
    let (wanted, full) = (limit(algorithm), limit(Algorithm::Gcra));
    let scope = Scope::new(format!("give-back|{algorithm}"));
    let spent = Scope::new("give-back|spent");
    let [here, there] = names.map(Arc::<str>::from);
    // What refuses: a counter in another slot that has nothing left.
    let parts = [KeyPart::Text(&there)];
    let key = CounterKey { scope: &spent, parts: &parts };
    store.debit(&[Charge::new(key, &full, Cost::new(2 * LIMIT))]).await.expect("a debit");
    let tasks: Vec<_> = (0..8_u128)
        .map(|task| {
            let (store, wanted, full) = (store.clone(), wanted.clone(), full.clone());
            let (scope, spent, here, there) = (scope.clone(), spent.clone(), here.clone(), there.clone());
            tokio::spawn(async move {
                let (mine, other) = ([KeyPart::Text(&here)], [KeyPart::Text(&there)]);
                let mine = CounterKey { scope: &scope, parts: &mine };
                let other = CounterKey { scope: &spent, parts: &other };
                let mut admitted = 0;
                for turn in 0..25 {
                    let permit = PermitId(1 + task * 100 + turn);
                    let take = Charge { permit, ..Charge::new(mine, &wanted, Cost::ONE) };
                    if task % 2 == 0 {
                        let refused = store.charge(&[take, Charge::new(other, &full, Cost::ONE)]).await;
                        assert_eq!(refused.expect("an answer").admission, Admission::Denied);
                    } else if turn < 5 {
                        let answer = store.charge(&[take]).await.expect("an answer");
                        admitted += u64::from(answer.admission == Admission::Admitted);
                    }
                }
                admitted
            })
        })
        .collect();
    let mut admitted = 0;
    for task in tasks {
        admitted += task.await.expect("a task");
    }
    let parts = [KeyPart::Text(&here)];
    let key = CounterKey { scope: &scope, parts: &parts };
    let mut left = 0;
    for holder in 0.. {
        let permit = PermitId(10_000 + holder);
        let charge = Charge { permit, ..Charge::new(key, &wanted, Cost::ONE) };
        if store.charge(&[charge]).await.expect("an answer").admission == Admission::Denied {
            break;
        }
        left += 1;
    }
    (admitted, left)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charges_of_denied_requests_are_undone() {
    let cluster = Cluster::with_replicas(0);
    let names = [name_at(&cluster, 0), name_at(&cluster, 1)];
    let names = [names[0].as_str(), names[1].as_str()];
    // Time stands still, so that nothing comes back by itself: to the unit.
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_017)));
    let store = RedisStore::with_clock(cluster.config(), clock);
    for algorithm in [
        Algorithm::Gcra,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::StrictWindow,
        Algorithm::SlidingLog,
        Algorithm::Concurrency,
    ] {
        let (admitted, left) = contend(&store, algorithm, names).await;
        assert_eq!(admitted + left, LIMIT, "{algorithm}: {admitted} admitted, {left} left");
    }
    // Time as it is: a bucket may keep what time has meanwhile given back, less than a unit.
    cluster.flush();
    let store = RedisStore::connect(cluster.config());
    let (admitted, left) = contend(&store, Algorithm::Gcra, names).await;
    assert!((LIMIT - 1..=LIMIT).contains(&(admitted + left)), "{admitted} admitted, {left} left");
    assert_eq!(store.mismatches(), 0);
}
