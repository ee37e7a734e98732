use super::*;
use crate::check::Check;
use tollgate_core::conformance::{Fault, FaultyStore, StoreCall};
use tollgate_core::{Charge, SystemClock, TimeDelta};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

fn limiter(ttl: &str) -> Arc<Limiter<FaultyStore<MemoryStore<SystemClock>>>> {
    let text = format!(
        "domain: d\ndescriptors:\n  - {{key: user, name: slots, concurrency: {{limit: 2, ttl: {ttl}}}}}\n"
    );
    let rules = Ruleset::load(&[Source::new("test.yaml", text)], &Options::default());
    let clock = SystemClock::new();
    let counters = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a small store");
    Arc::new(Limiter::new(Arc::new(rules.expect("rules")), FaultyStore::new(counters), Arc::new(clock)))
}

/// A store that stalls releases nothing.
fn stall(call: StoreCall, _: &[Charge<'_>]) -> Fault {
    if call == StoreCall::Release { Fault::timeout() } else { Fault::None }
}

async fn is_admitted(limiter: &Arc<Limiter<FaultyStore<MemoryStore<SystemClock>>>>) -> bool {
    let (decision, held) = limiter.admit(&Check::attributes("d", &[("user", "u")])).await;
    drop(held.map(|held| limiter.guard(held, TimeDelta::ZERO)));
    decision.is_allowed()
}

/// A stall must not count ended requests as in flight: the service is idle, and would be shed.
#[tokio::test(start_paused = true)]
async fn permits_are_free_after_a_stall() {
    let limiter = limiter("60s");
    limiter.store().set_fault(stall);
    assert!(is_admitted(&limiter).await && is_admitted(&limiter).await);
    assert!(!is_admitted(&limiter).await, "neither release succeeded");
    // The clock of the test goes on only while its tasks wait: rounds have been made.
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(limiter.release_stats(), ReleaseStats { pending: 2, retried: 0, lost: 0 });
    assert_eq!(
        limiter.in_flight(),
        [("slots".to_owned(), 2)],
        "they are in flight as far as the store knows"
    );
    let tried = limiter.store().calls(StoreCall::Release);
    assert!((4..20).contains(&tried), "one in a round: {tried}");
    limiter.store().clear_fault();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(limiter.release_stats(), ReleaseStats { pending: 0, retried: 2, lost: 0 });
    assert_eq!(limiter.in_flight(), [("slots".to_owned(), 0)]);
    assert!(is_admitted(&limiter).await);
    assert!(!limiter.pending_releases.table().is_running, "the task has ended");
}

#[tokio::test(start_paused = true)]
async fn a_release_is_given_up_when_its_permit_has_expired() {
    let limiter = limiter("5s");
    limiter.store().set_fault(stall);
    assert!(is_admitted(&limiter).await);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(limiter.release_stats(), ReleaseStats { pending: 0, retried: 0, lost: 1 });
}
