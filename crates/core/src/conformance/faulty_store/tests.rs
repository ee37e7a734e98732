use super::*;
use crate::algorithm::Algorithm;
use crate::algorithm::concurrency::PermitId;
use crate::clock::ManualClock;
use crate::conformance::{ReferenceStore, block_on, run};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, Scope};
use crate::limit_spec::LimitSpec;
use crate::rate::Rate;
use crate::time::TimeDelta;

/// Without it a test of faults may find those of the fake.
#[test]
fn a_faulty_store_without_a_fault_conforms() {
    block_on(run(async |clock| FaultyStore::new(ReferenceStore::new(clock)))).expect("it conforms");
    let waiting = block_on(run(async |clock| {
        let store = FaultyStore::new(ReferenceStore::new(clock));
        store.set_fault(|_, _| Fault::wait());
        store
    }));
    waiting.expect("it conforms");
}

/// Without it a test takes units, or permits, that no client has for those that a late answer has lost.
#[test]
fn a_late_charge_that_nobody_keeps_is_undone() {
    let store = FaultyStore::new(ReferenceStore::new(ManualClock::default()));
    let rate = Rate::per(10, TimeDelta::from_secs(60));
    let units = LimitSpec::new(Algorithm::Gcra, rate.clone()).build().expect("a limit");
    let permits = LimitSpec::new(Algorithm::Concurrency, rate).build().expect("a limit");
    let (one, other) = (Scope::new("units"), Scope::new("permits"));
    let charge = |scope, limit| Charge {
        permit: PermitId(7),
        ..Charge::new(CounterKey { scope, parts: &[] }, limit, Cost::ONE)
    };
    let charges = [charge(&one, &units), charge(&other, &permits)];
    let left = || {
        let peeks = charges.map(|charge| Charge { cost: Cost::PEEK, ..charge });
        block_on(store.charge(&peeks))
            .expect("it answers")
            .per_charge
            .iter()
            .map(|one| one.remaining)
            .collect::<Vec<_>>()
    };
    for (is_kept, remaining) in [(false, [10, 10]), (true, [9, 9])] {
        store.set_fault(|_, _| Fault::Late);
        let late = block_on(store.charge(&charges)).expect_err("late");
        store.clear_fault();
        assert_eq!(left(), [10, 10], "it is not applied yet");
        if is_kept {
            late.late()[0]
                .keep(|answer| assert!(matches!(answer, LateAnswer::Charged(ids) if ids.len() == 2)));
        }
        drop(late);
        block_on(store.answer_late());
        assert_eq!(left(), remaining, "kept: {is_kept}");
    }
}
