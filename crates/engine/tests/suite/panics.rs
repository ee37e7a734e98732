//! A panic while deciding is decided by the fail policy of the matched rules, counted, and concerns no other request.

use crate::rig::{check, rules};
use std::collections::HashSet;
use std::sync::Arc;
use tollgate_core::conformance::PanickingStore;
use tollgate_core::{Charge, Clock, Cost, ManualClock, StoreError, Timestamp};
use tollgate_engine::{Check, Decision, Limiter, Observer, Origin};
use tollgate_rules::MatchKind;
use tollgate_store::{MemoryConfig, MemoryStore};

type Memory = MemoryStore<Arc<ManualClock>>;
type Store = PanickingStore<Memory>;

const RULES: &str = "
domain: d
descriptors:
  - {key: open, limit: 2/minute, on_error: open}
  - {key: closed, limit: 2/minute, on_error: closed}
  - {key: local, limit: 2/minute, on_error: local}
";

fn limiter() -> Limiter<Store> {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let memory =
        || MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let store = PanickingStore(memory());
    Limiter::new(rules(RULES), store, Arc::clone(&clock) as Arc<dyn Clock>).with_fallback(memory())
}

#[test]
fn the_fail_policy_decides_and_the_next_request_is_served() {
    for value in [Store::AT_ONCE, Store::LATER] {
        let limiter = limiter();
        let decide = |key: &str, value: &str| check(&limiter, &[(key, value)], Cost::ONE);
        let open = decide("open", value);
        assert_eq!((open.is_allowed(), open.origin), (true, Origin::FailOpen), "{value}");
        let closed = decide("closed", value);
        assert_eq!((closed.is_allowed(), closed.origin), (false, Origin::FailClosed), "{value}");
        let local: Vec<_> = (0..3).map(|_| decide("local", value)).collect();
        let verdicts: Vec<_> = local.iter().map(|one| (one.is_allowed(), one.origin)).collect();
        let expected = [(true, Origin::Local), (true, Origin::Local), (false, Origin::Local)];
        assert_eq!(verdicts, expected, "{value}");
        // They can be looked up, and say which rule they matched, like any other.
        let ids: HashSet<_> = local.iter().map(|one| one.id()).collect();
        assert_eq!(ids.len(), 3, "{value}");
        for decision in local.iter().chain([&open, &closed]) {
            let matched: Vec<_> = decision.descriptors.iter().map(|one| one.matched).collect();
            assert_eq!(matched, [MatchKind::Limited], "{value}");
        }
        assert_eq!(limiter.panics(), 5, "{value}");
        let well = decide("closed", "well");
        assert_eq!((well.is_allowed(), well.origin), (true, Origin::Store), "{value}");
        assert_eq!(limiter.panics(), 5);
    }
}

/// Where local counters panic as well, the rules still say open or closed.
#[test]
fn a_panic_of_the_fallback_leaves_open_and_closed() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let memory =
        || MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let limiter = Limiter::new(rules(RULES), PanickingStore(memory()), Arc::clone(&clock) as Arc<dyn Clock>)
        .with_fallback(PanickingStore(memory()));
    let both = [("local", Store::AT_ONCE), ("closed", "a")];
    let closed = check(&limiter, &both, Cost::ONE);
    assert_eq!((closed.is_allowed(), closed.origin), (false, Origin::FailClosed));
    let open = check(&limiter, &both[..1], Cost::ONE);
    assert_eq!((open.is_allowed(), open.origin), (true, Origin::FailOpen));
}

struct Faulty;

impl Observer for Faulty {
    fn on_decision(&self, _: &Check<'_>, _: &Decision) {
        panic!("a bug in an observer");
    }
}

#[test]
fn a_panic_of_an_observer_does_not_change_the_decision() {
    let limiter = limiter().with_observer(Arc::new(Faulty));
    let decisions: Vec<_> = (0..3).map(|_| check(&limiter, &[("open", "u")], Cost::ONE)).collect();
    assert!(decisions[0].is_allowed() && decisions[1].is_allowed() && !decisions[2].is_allowed());
    assert_eq!(limiter.panics(), 3);
}

/// Inline limits have no rule: the one that panics is an error, and the others of its batch are decided.
#[test]
fn an_inline_limit_that_panics_is_an_error() {
    use tollgate_core::{Algorithm, CounterKey, KeyPart, LimitSpec, Rate, Scope, nonzero};
    let limiter = limiter();
    let scope = Scope::new("inline");
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(5))).build().expect("a limit");
    let (bad, well) = ([KeyPart::Text(Store::AT_ONCE)], [KeyPart::Text("well")]);
    let keys = [&bad, &well].map(|parts| CounterKey { scope: &scope, parts });
    let charges = keys.map(|key| Charge::new(key, &limit, Cost::ONE));
    assert!(!limiter.try_charge_inline(&charges, &mut Vec::new()));
    let [bad, well] = charges.map(|charge| pollster::block_on(limiter.charge_inline(charge)));
    assert!(matches!(bad, Err(StoreError::Unavailable(_))), "{bad:?}");
    assert_eq!(well.expect("decided").remaining, 4);
}
