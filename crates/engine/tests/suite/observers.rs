//! Who watches decisions sees each of them once, whichever way it was asked for.

use crate::rig::rules;
use std::sync::{Arc, Mutex};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, Limiter, Observer};
use tollgate_store::{MemoryConfig, MemoryStore};

#[derive(Default)]
struct Seen(Mutex<Vec<(String, bool)>>);

impl Observer for Seen {
    fn on_decision(&self, check: &Check<'_>, decision: &Decision) {
        let one = (format!("{} {}", check.domain, decision.id()), decision.is_allowed());
        self.0.lock().expect("not poisoned").push(one);
    }
}

/// A decision that is counted twice or never would make every figure of an operator wrong.
#[test]
fn each_decision_is_seen_once() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let seen = Arc::new(Seen::default());
    let rules = rules("{domain: d, descriptors: [{key: user, limit: 3/minute}]}");
    let limiter = Limiter::new(rules, store, clock as Arc<dyn Clock>).with_observer(Arc::clone(&seen) as _);
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    let mut reported = Vec::new();
    let mut report =
        |decision: &Decision| reported.push((format!("d {}", decision.id()), decision.is_allowed()));
    report(&pollster::block_on(limiter.check(&check)));
    report(&pollster::block_on(limiter.check(&check)));
    let reserved = pollster::block_on(limiter.reserve(&check, TimeDelta::from_secs(1), None)).expect("room");
    report(&reserved.decision);
    report(&pollster::block_on(limiter.admit(&check)).0);
    assert_eq!(reported.iter().filter(|(_, allowed)| *allowed).count(), 3);
    assert_eq!(*seen.0.lock().expect("not poisoned"), reported);
}
