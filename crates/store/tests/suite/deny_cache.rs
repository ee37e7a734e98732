//! Remembered denials: the same answers as without them, at a fraction of the asking.

use std::sync::Arc;
use tollgate_core::conformance::{FaultyStore, StoreCall, block_on};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit,
    LimitSpec, ManualClock, Outcomes, Permit, Rate, Scope, TimeDelta, Timestamp, Verdict, nonzero,
};
use tollgate_store::{DenyCache, MemoryConfig, MemoryStore};

type Memory = MemoryStore<Arc<ManualClock>>;

struct Rig {
    clock: Arc<ManualClock>,
    cache: DenyCache<FaultyStore<Memory>, Arc<ManualClock>>,
    scope: Scope,
}

fn rig() -> Rig {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let memory =
        MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a small store");
    let cache = DenyCache::new(FaultyStore::new(memory), Arc::clone(&clock), 1_024);
    Rig { clock, cache, scope: Scope::new("test") }
}

fn limit(algorithm: Algorithm, quota: Rate) -> Limit {
    LimitSpec::new(algorithm, quota).build().expect("a plain limit")
}

impl Rig {
    fn charge<'a>(&'a self, parts: &'a [KeyPart<'a>], limit: &'a Limit, cost: Cost) -> Charge<'a> {
        Charge::new(CounterKey { scope: &self.scope, parts }, limit, cost)
    }

    fn check(&self, charges: &[Charge<'_>]) -> Outcomes {
        block_on(self.cache.charge(charges)).expect("memory answers")
    }

    fn store_calls(&self) -> u64 {
        self.cache.inner().calls(StoreCall::Charge)
    }
}

/// A flood over its limit must cost the store next to nothing, and get the very answers that it would have given.
#[test]
fn a_flood_is_denied_from_the_cache_exactly() {
    for algorithm in
        [Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog]
    {
        let rig = rig();
        let limit = limit(algorithm, Rate::per_minute(nonzero!(5)));
        let parts = [KeyPart::Text("k")];
        let charge = rig.charge(&parts, &limit, Cost::ONE);
        for _ in 0..5 {
            assert_eq!(rig.check(&[charge]).admission, Admission::Admitted);
        }
        let before = rig.store_calls();
        for _ in 0..10_000 {
            rig.clock.advance(TimeDelta::from_micros(997));
            let direct = rig.cache.inner().inner().apply(&[charge]);
            assert_eq!(rig.check(&[charge]), direct, "{algorithm}");
        }
        // Ten seconds of flood, asked again every 0.9 s, and for what passed in them.
        assert!(rig.store_calls() - before < 20, "{algorithm}: asked {} times", rig.store_calls() - before);
    }
}

/// A request that costs more than the whole limit must not be told to wait, and what asks about others beside it is asked.
#[test]
fn a_charge_that_never_fits_is_not_denied_from_the_cache() {
    let rig = rig();
    let limit = limit(Algorithm::FixedWindow, Rate::per_minute(nonzero!(2)));
    let parts = [KeyPart::Text("k")];
    let charge = |cost| rig.charge(&parts, &limit, Cost::new(cost));
    assert_eq!(rig.check(&[charge(2)]).admission, Admission::Admitted);
    assert_eq!(rig.check(&[charge(1)]).admission, Admission::Denied);
    let beside = Charge { enforcement: Enforcement::Alternative, ..charge(1) };
    let outcomes = rig.check(&[beside, charge(3)]);
    assert!(outcomes.per_charge[0].verdict.is_denied(), "{outcomes:?}");
    assert_eq!(outcomes.per_charge[1].verdict, Verdict::Denied { retry_after: None });
}

/// At the promised instant the caller must pass, not be turned away by a memory.
#[test]
fn a_cached_denial_ends_at_its_instant() {
    let rig = rig();
    let limit = limit(Algorithm::Gcra, Rate::per(2, TimeDelta::from_secs(1)));
    let parts = [KeyPart::Text("k")];
    let charge = rig.charge(&parts, &limit, Cost::ONE);
    rig.check(&[charge]);
    rig.check(&[charge]);
    let denied = rig.check(&[charge]);
    let Verdict::Denied { retry_after: Some(wait) } = denied.per_charge[0].verdict else {
        panic!("{denied:?}")
    };
    rig.clock.advance(TimeDelta::from_micros(wait.as_micros() - 1));
    assert_eq!(rig.check(&[charge]).admission, Admission::Denied);
    rig.clock.advance(TimeDelta::from_micros(1));
    assert_eq!(rig.check(&[charge]).admission, Admission::Admitted);
}

/// A refund or a raised limit must be felt: here at once, and within a second when it happened elsewhere.
#[test]
fn refunds_and_raised_limits_take_effect() {
    let rig = rig();
    let tight = limit(Algorithm::FixedWindow, Rate::per_hour(nonzero!(1)));
    let parts = [KeyPart::Text("k")];
    let charge = rig.charge(&parts, &tight, Cost::ONE);
    rig.check(&[charge]);
    assert_eq!(rig.check(&[charge]).admission, Admission::Denied);
    block_on(rig.cache.debit(&[rig.charge(&parts, &tight, Cost::refund(1))])).expect("memory answers");
    assert_eq!(rig.check(&[charge]).admission, Admission::Admitted, "a refund here");

    assert_eq!(rig.check(&[charge]).admission, Admission::Denied);
    rig.cache.inner().inner().apply(&[rig.charge(&parts, &tight, Cost::refund(1))]);
    rig.clock.advance(TimeDelta::from_secs(1));
    assert_eq!(rig.check(&[charge]).admission, Admission::Admitted, "a refund elsewhere");

    assert_eq!(rig.check(&[charge]).admission, Admission::Denied);
    let raised = limit(Algorithm::FixedWindow, Rate::per_hour(nonzero!(2)));
    assert_eq!(
        rig.check(&[rig.charge(&parts, &raised, Cost::ONE)]).admission,
        Admission::Admitted,
        "a raised limit"
    );
}

/// A smaller request may still fit; a shadow rule beside a denial must still count; a permit may be back any moment.
#[test]
fn only_certain_denials_are_cached() {
    let rig = rig();
    let quota = limit(Algorithm::FixedWindow, Rate::per_hour(nonzero!(10)));
    let parts = [KeyPart::Text("k")];
    rig.check(&[rig.charge(&parts, &quota, Cost::new(6))]);
    assert_eq!(rig.check(&[rig.charge(&parts, &quota, Cost::new(6))]).admission, Admission::Denied);
    assert_eq!(rig.check(&[rig.charge(&parts, &quota, Cost::new(4))]).admission, Admission::Admitted);

    let shadow = Scope::new("shadow");
    let beside = Charge {
        enforcement: Enforcement::Independent,
        ..Charge::new(CounterKey { scope: &shadow, parts: &parts }, &quota, Cost::ONE)
    };
    let other = [KeyPart::Text("other")];
    let both = [rig.charge(&parts, &quota, Cost::new(6)), beside, rig.charge(&other, &quota, Cost::ONE)];
    for left in [9, 8, 7] {
        let outcomes = rig.check(&both);
        assert_eq!(outcomes.admission, Admission::Denied);
        assert_eq!(outcomes.per_charge[1].remaining, left, "the shadow rule counts");
    }
    assert_eq!(
        rig.check(&[rig.charge(&other, &quota, Cost::PEEK)]).per_charge[0].remaining,
        10,
        "nothing else was taken"
    );

    let held = limit(Algorithm::Concurrency, Rate::per_minute(nonzero!(1)));
    let slot = [KeyPart::Text("slot")];
    let permit = tollgate_core::PermitId(7);
    let take = Charge { permit, ..rig.charge(&slot, &held, Cost::ONE) };
    rig.check(&[take]);
    let late = Charge { permit: tollgate_core::PermitId(8), ..take };
    assert_eq!(rig.check(&[late]).admission, Admission::Denied);
    block_on(rig.cache.release(&[Permit { key: take.key, limit: &held, id: permit }]))
        .expect("memory answers");
    assert_eq!(rig.check(&[late]).admission, Admission::Admitted);
    assert!(rig.clock.now() >= Timestamp::from_secs(1_000));
}

/// A cached denial reports what the store reported: that two are left where three were asked for, by these numbers alone.
#[test]
fn a_denial_is_cached_with_its_numbers() {
    let rig = rig();
    let parts = [KeyPart::Text("k")];
    let (minute, second) = (Rate::per_minute(nonzero!(5)), Rate::per(5, TimeDelta::from_secs(1)));
    let (minute, second) = (limit(Algorithm::Gcra, minute), limit(Algorithm::Gcra, second));
    let three = |limit| rig.check(&[rig.charge(&parts, limit, Cost::new(3))]);
    assert_eq!(three(&minute).admission, Admission::Admitted);
    let (first, again) = (three(&minute), three(&minute));
    assert_eq!(rig.store_calls(), 2, "the third is remembered");
    assert_eq!((first.per_charge[0].remaining, &again), (2, &first));
    let _ = three(&second);
    assert_eq!(rig.store_calls(), 3, "another period is another limit");
}
