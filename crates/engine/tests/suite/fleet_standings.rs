//! A tenant whose guarantee is used up learns that from the capacity's denial, by whichever node and path its request is decided:
//! a denial that names no rule and no time to wait is retried at once.

use crate::rig::rules;
use std::sync::Arc;
use tollgate_core::conformance::RemoteStore;
use tollgate_core::{Clock, CounterStore, ManualClock, Timestamp};
use tollgate_engine::{Check, Decision, Limiter, SampleWeight};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
overload:
  fleet: {capacity: 40/day}
  fairness: {by: tenant, guarantees: {enterprise: 10% each}}
";

/// A request of the tenant with a guarantee.
const OWN: Check<'_> = Check::attributes("d", &[("tenant", "own"), ("tier", "enterprise")]);

fn node<S: CounterStore>(store: S, clock: &Arc<ManualClock>) -> Limiter<S> {
    Limiter::new(rules(RULES), store, Arc::clone(clock) as Arc<dyn Clock>)
}

fn assert_denied_by_the_capacity(decision: &Decision, path: &str) {
    assert_eq!(decision.denied_by_name(), Some("overload/fleet"), "{path}");
    assert!(decision.retry_after().is_some(), "{path}");
    assert_eq!(decision.limits.len(), 1, "{path}");
    assert!(decision.limits[0].outcome.verdict.is_denied(), "{path}");
}

#[test]
fn a_node_that_finds_a_guarantee_used_up_reports_the_denial_by_the_capacity() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let store = Arc::new(store);
    let first = node(Arc::clone(&store), &clock);
    let passes = |check: &Check<'_>| pollster::block_on(first.check(check)).is_allowed();
    let greedy = Check::attributes("d", &[("tenant", "greedy")]);
    assert_eq!((0..120).filter(|_| passes(&greedy)).count(), 40);
    assert_eq!((0..9).filter(|_| passes(&OWN)).count(), 4, "a tenth of the capacity");
    // Other nodes have seen nothing of it: they try the capacity first, and the guarantee after its denial.
    let at_once = node(Arc::clone(&store), &clock);
    assert_denied_by_the_capacity(&pollster::block_on(at_once.check(&OWN)), "without waiting");
    let awaited = node(RemoteStore::new(Arc::clone(&store)), &clock);
    assert_denied_by_the_capacity(&pollster::block_on(awaited.check(&OWN)), "awaited");
    let previewed = node(store, &clock).replay(&OWN, SampleWeight::ONE).expect("memory does not wait");
    assert_denied_by_the_capacity(&previewed, "replayed");
}
