//! A request that gives back to one counter and is refused by another has given nothing back.

use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, KeyPart, Limit, LimitSpec, ManualClock, Rate, Scope,
    TimeDelta, Timestamp,
};
use tollgate_store::{MemoryConfig, MemoryStore};

/// A refund that empties a log lets other charges of the same request sweep it away; a refusal must still bring it back,
/// or a caller could clear its own log with requests that are denied. Many keys, for only some share a shard.
#[test]
fn a_refund_in_a_denied_request_is_undone() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(16 << 20), clock).expect("a store");
    let limit = |algorithm, count| -> Limit {
        LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(60))).build().expect("a limit")
    };
    let (log, strict, full) = (
        limit(Algorithm::SlidingLog, 6),
        limit(Algorithm::StrictWindow, 6),
        limit(Algorithm::Concurrency, 3),
    );
    let scopes = ["log", "strict", "full"].map(Scope::new);
    for n in 0..20_000 {
        let name = n.to_string();
        let parts = [KeyPart::Text(&name)];
        let key = |scope: usize| CounterKey { scope: &scopes[scope], parts: &parts };
        assert_eq!(store.apply(&[Charge::new(key(0), &log, Cost::ONE)]).admission, Admission::Admitted);
        let refused = store.apply(&[
            Charge::new(key(0), &log, Cost::refund(1)),
            Charge::new(key(1), &strict, Cost::ONE),
            Charge::new(key(2), &full, Cost::new(4)),
        ]);
        assert_eq!(refused.admission, Admission::Denied);
        let left = store.apply(&[Charge::new(key(0), &log, Cost::PEEK)]).per_charge[0].remaining;
        assert_eq!(left, 5, "key {n}");
    }
}
