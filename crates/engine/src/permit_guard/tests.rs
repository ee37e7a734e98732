use super::*;
use crate::check::Check;
use tokio::sync::Barrier;
use tollgate_core::SystemClock;
use tollgate_core::conformance::{Fault, FaultyStore, StoreCall};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const PERMITS: usize = 20;

/// Many requests under way over a store that is slow must not lose their permits; and an outage is reported once.
#[tokio::test(start_paused = true)]
async fn permits_are_renewed_together() {
    let text = "domain: d\ndescriptors:\n  - {key: user, name: slots, concurrency: {limit: 100, ttl: 2s}}\n";
    let source = Source { name: "test.yaml".to_owned(), text: text.to_owned() };
    let rules = Ruleset::load(&[source], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"));
    let clock = SystemClock::new();
    let counters = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a small store");
    let limiter = Arc::new(Limiter::new(Arc::new(rules), FaultyStore::new(counters), Arc::new(clock)));
    // The test renews by itself.
    limiter.renewals.table().is_running = true;
    let mut held = Vec::new();
    for _ in 0..PERMITS {
        let admitted = limiter.admit(&Check::attributes("d", &[("user", "u")])).await;
        held.push(limiter.guard(admitted.1.expect("a permit"), TimeDelta::ZERO));
    }
    // Once it is slow, the store answers no request before all have arrived.
    let all = Arc::new(Barrier::new(PERMITS));
    limiter.store().set_fault(move |call, _| match call {
        StoreCall::Charge => {
            let all = Arc::clone(&all);
            Fault::WaitThenApply(Box::pin(async move {
                all.wait().await;
            }))
        }
        _ => Fault::None,
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let renewed = tokio::time::timeout(Duration::from_secs(60), limiter.renew_due()).await;
    renewed.expect("they do not wait for each other").expect("they are renewed");
    limiter.store().set_fault(Fault::outage);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let error = limiter.renew_due().await.expect_err("the store is unavailable");
    assert_eq!((error.failed, error.of), (PERMITS, PERMITS));
    drop(held);
}

/// A runtime that ends takes its renewal task along; the next guard must start another, or long requests lose their permits.
#[test]
fn renewal_starts_again_after_its_runtime_has_ended() {
    let text = "domain: d\ndescriptors:\n  - {key: user, name: slots, concurrency: {limit: 2, ttl: 2s}}\n";
    let source = Source { name: "test.yaml".to_owned(), text: text.to_owned() };
    let rules = Ruleset::load(&[source], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"));
    let clock = SystemClock::new();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a small store");
    let limiter = Arc::new(Limiter::new(Arc::new(rules), store, Arc::new(clock)));
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let hold = || async {
        let admitted = limiter.admit(&Check::attributes("d", &[("user", "u")])).await;
        limiter.guard(admitted.1.expect("a permit"), TimeDelta::ZERO)
    };
    let first = runtime();
    let guard = first.block_on(hold());
    assert!(limiter.renewals.table().is_running);
    drop(first);
    assert!(!limiter.renewals.table().is_running, "the task ended with its runtime");
    let second = runtime();
    let other = second.block_on(hold());
    assert!(limiter.renewals.table().is_running);
    drop((guard, other));
}
