//! The allow path allocates nothing. If this fails, every request pays for the allocator.

#![allow(unsafe_code, reason = "an allocator can only be counted by being one")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, LimitSpec, Part, Quota, Scope, SystemClock,
};
use tollgate_store::{MemoryConfig, MemoryStore};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: hands everything on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as our caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as our caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(act: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    act();
    ALLOCATIONS.with(Cell::get) - before
}

#[test]
fn one_and_four_packed_limits_allocate_nothing() {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), SystemClock::new()).expect("a store");
    let scopes = ["a", "b", "c", "d"].map(Scope::new);
    let limits = [Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::TokenBucket]
        .map(|algorithm| LimitSpec::new(algorithm, Quota::per_minute(100_000)).build().expect("a limit"));
    // Known keys and newcomers alike.
    for user in ["alice", "bob"] {
        let parts = [Part::Text(user)];
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
