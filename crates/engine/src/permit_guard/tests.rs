use super::*;
use crate::check::Check;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Barrier;
use tollgate_core::{Charge, Outcomes, Permit, SystemClock};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const PERMITS: usize = 20;

/// A store that, once it is slow, answers no request before all have arrived; and, once it is unavailable, none at all.
struct FlakyStore {
    counters: MemoryStore<SystemClock>,
    is_slow: AtomicBool,
    is_away: AtomicBool,
    all: Barrier,
}

impl CounterStore for FlakyStore {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        if self.is_away.load(Ordering::Relaxed) {
            return Err(StoreError::Timeout);
        }
        if self.is_slow.load(Ordering::Relaxed) {
            self.all.wait().await;
        }
        self.counters.charge(charges).await
    }
    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.counters.debit(charges).await
    }
    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.counters.release(permits).await
    }
}

/// Many requests under way over a store that is slow must not lose their permits; and an outage is reported once.
#[tokio::test(start_paused = true)]
async fn permits_are_renewed_together() {
    let text = "domain: d\ndescriptors:\n  - {key: user, name: slots, concurrency: {limit: 100, ttl: 2s}}\n";
    let source = Source { name: "test.yaml".to_owned(), text: text.to_owned() };
    let rules = Ruleset::load(&[source], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"));
    let clock = SystemClock::new();
    let counters = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a small store");
    let store = FlakyStore {
        counters,
        is_slow: AtomicBool::new(false),
        is_away: AtomicBool::new(false),
        all: Barrier::new(PERMITS),
    };
    let limiter = Arc::new(Limiter::new(Arc::new(rules), store, Arc::new(clock)));
    // The test renews by itself.
    limiter.renewals.table().is_running = true;
    let mut held = Vec::new();
    for _ in 0..PERMITS {
        let admitted = limiter.admit(&Check::attributes("d", &[("user", "u")])).await;
        held.push(limiter.guard(admitted.1.expect("a permit"), TimeDelta::ZERO));
    }
    limiter.store().is_slow.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let renewed = tokio::time::timeout(Duration::from_secs(60), limiter.renew_due()).await;
    renewed.expect("they do not wait for each other").expect("they are renewed");
    limiter.store().is_away.store(true, Ordering::Relaxed);
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
