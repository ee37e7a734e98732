//! What callers give back to a bucket of which leases are out: nothing at once, or slots that others hold could be spent
//! twice; and all of it where none are.

use std::sync::Arc;
use tollgate_core::conformance::{ReferenceStore, block_on};
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, LimitSpec, ManualClock, Mode,
    PermitId, Rate, Scope, Timestamp, nonzero,
};
use tollgate_store::{LeaseConfig, LeasedStore};

#[test]
fn a_refund_waits_for_time_where_leases_are_out_and_only_there() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let store = Arc::new(ReferenceStore::new(Arc::clone(&clock)));
    let node = LeasedStore::new(Arc::clone(&store), Arc::clone(&store), clock, LeaseConfig::default());
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(100))).build().expect("a limit");
    let scope = Scope::new("refunds");
    for (caller, mode, leased) in [("alice", Mode::Leased, true), ("bob", Mode::Adaptive, false)] {
        let parts = [KeyPart::Text(caller)];
        let key = CounterKey { scope: &scope, parts: &parts };
        let charge = |cost| Charge { mode, ..Charge::new(key, &limit, cost) };
        let remaining = || {
            let look = [Charge::new(key, &limit, Cost::PEEK)];
            block_on(store.charge(&look)).expect("it answers").per_charge[0].remaining
        };
        for _ in 0..10 {
            block_on(node.charge(&[charge(Cost::ONE)])).expect("it answers");
        }
        for (n, task) in (1..).zip(node.due_tasks()) {
            block_on(node.run_task(task, PermitId(n)));
        }
        assert!(node.stats().available > 0, "alice has a lease throughout");
        let before = remaining();
        for enforcement in [Enforcement::Required, Enforcement::Independent] {
            let back = [Charge { enforcement, ..charge(Cost::refund(2)) }];
            block_on(node.charge(&back)).expect("it answers");
            block_on(node.debit(&back)).expect("it answers");
        }
        assert_eq!(remaining(), if leased { before } else { before + 8 }, "{caller}");
    }
    assert_eq!(node.stats().unrefunded, 8);
}
