//! The allow path allocates nothing. If this fails, every request pays for the allocator.

use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, KeyPart, LimitSpec, Rate, Scope, SystemClock, nonzero,
};
use tollgate_store::{MemoryConfig, MemoryStore};
use tollgate_testing::allocations::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn one_and_four_packed_limits_allocate_nothing() {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), SystemClock::new()).expect("a store");
    let scopes = ["a", "b", "c", "d"].map(Scope::new);
    let limits = [Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::TokenBucket]
        .map(|algorithm| {
            LimitSpec::new(algorithm, Rate::per_minute(nonzero!(100_000))).build().expect("a limit")
        });
    // Known keys and newcomers alike.
    for user in ["alice", "bob"] {
        let parts = [KeyPart::Text(user)];
        let four = [0, 1, 2, 3]
            .map(|n| Charge::new(CounterKey { scope: &scopes[n], parts: &parts }, &limits[n], Cost::ONE));
        for charges in [&four[..1], &four[..]] {
            let count = allocations(|| {
                for _ in 0..100 {
                    assert_eq!(store.apply(charges).admission, Admission::Admitted);
                }
            });
            assert_eq!(count, 0, "{} charges allocated", charges.len());
        }
    }
    assert!(allocations(|| drop(std::hint::black_box(vec![1]))) > 0, "the counter counts");
}
