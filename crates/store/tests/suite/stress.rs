//! Threads that hammer overlapping sets of keys. If this fails, a limit is exceeded or quota is lost under load.

use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, Enforcement, KeyPart, Limit, LimitSpec, ManualClock,
    Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::{MemoryConfig, MemoryStore};

const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);
const THREADS: u64 = 4;
const KEYS: usize = 12;

fn limit(algorithm: Algorithm, count: u64) -> Limit {
    LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(3_600))).build().expect("a limit")
}

/// Each key has one of these; time stands still, so each admits its count and not one more.
fn key_limits() -> Vec<Limit> {
    let kinds = [
        Algorithm::Gcra,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::StrictWindow,
        Algorithm::SlidingLog,
    ];
    (0..KEYS).map(|n| limit(kinds[n % kinds.len()], 400 + 100 * (n as u64 % 3))).collect()
}

fn hammer(limits: &[Limit], most_charges: usize) {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), ManualClock::at(NOW)).expect("a store");
    let scopes: Vec<Scope> = (0..KEYS).map(|n| Scope::new(n.to_string())).collect();
    let taken: Vec<AtomicU64> = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
    let key = |n: usize| CounterKey { scope: &scopes[n], parts: &[KeyPart::Text("k")] };
    std::thread::scope(|threads| {
        for thread in 0..THREADS {
            let (store, taken, key) = (&store, &taken, &key);
            threads.spawn(move || {
                let mut rng = SplitMix64::new(thread + 1);
                for _ in 0..4_000 {
                    let charges: Vec<(usize, u64)> =
                        (0..=rng.index(most_charges)).map(|_| (rng.index(KEYS), rng.below(3) + 1)).collect();
                    let asked: Vec<Charge<'_>> = charges
                        .iter()
                        .map(|(n, units)| Charge::new(key(*n), &limits[*n], Cost::new(*units)))
                        .collect();
                    if store.apply(&asked).admission == Admission::Admitted {
                        for (n, units) in charges {
                            taken[n].fetch_add(units, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    for n in 0..KEYS {
        let one = [Charge::new(key(n), &limits[n], Cost::ONE)];
        while store.apply(&one).admission == Admission::Admitted {
            taken[n].fetch_add(1, Ordering::Relaxed);
        }
        // Neither above (exceeded) nor below (a charge that was undone has left something behind).
        assert_eq!(taken[n].load(Ordering::Relaxed), limits[n].capacity(), "key {n} by {}", limits[n]);
    }
}

#[test]
fn packed_counters_admit_exactly_their_limit() {
    let limits: Vec<Limit> = (0..KEYS)
        .map(|n| {
            let kinds = [Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingWindow];
            limit(kinds[n % 3], 500 + n as u64)
        })
        .collect();
    for _ in 0..10 {
        hammer(&limits, 5);
    }
}

#[test]
fn packed_and_wide_counters_together_admit_exactly_their_limit() {
    for _ in 0..10 {
        hammer(&key_limits(), 5);
    }
}

#[test]
fn one_charge_at_a_time_admits_exactly_the_limit() {
    for _ in 0..10 {
        hammer(&key_limits(), 1);
    }
}

/// Newcomers of the same name from all threads at once: two slots of one name would admit twice the limit.
#[test]
fn a_key_that_all_threads_create_has_one_counter() {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(4 << 20), ManualClock::at(NOW)).expect("a store");
    let limit = limit(Algorithm::Gcra, 3);
    let scope = Scope::new("first");
    let admitted = AtomicU64::new(0);
    const NEW: u64 = 20_000;
    let barrier = std::sync::Barrier::new(THREADS as usize);
    std::thread::scope(|threads| {
        for _ in 0..THREADS {
            threads.spawn(|| {
                barrier.wait();
                for n in 0..NEW {
                    let text = n.to_string();
                    let key = CounterKey { scope: &scope, parts: &[KeyPart::Text(&text)] };
                    for _ in 0..2 {
                        let outcomes = store.apply(&[Charge::new(key, &limit, Cost::ONE)]);
                        admitted.fetch_add(
                            u64::from(outcomes.admission == Admission::Admitted),
                            Ordering::Relaxed,
                        );
                    }
                }
            });
        }
    });
    assert_eq!(admitted.into_inner(), 3 * NEW);
    assert_eq!(store.stats().inserted, NEW);
}

/// Refunds and independent charges beside required ones: the books balance.
#[test]
fn refunded_units_can_be_charged_again_and_no_more() {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), ManualClock::at(NOW)).expect("a store");
    let limits =
        [limit(Algorithm::Gcra, 1_000), limit(Algorithm::FixedWindow, 1_000), limit(Algorithm::Gcra, 900)];
    let scopes = [Scope::new("a"), Scope::new("b"), Scope::new("shadow")];
    let key = |n: usize| CounterKey { scope: &scopes[n], parts: &[] };
    let balance: [AtomicU64; 3] = Default::default();
    std::thread::scope(|threads| {
        for thread in 0..THREADS {
            let (store, limits, key, balance) = (&store, &limits, &key, &balance);
            threads.spawn(move || {
                let mut rng = SplitMix64::new(thread + 77);
                for _ in 0..5_000 {
                    let units = rng.below(4) + 1;
                    let mut asked = [0, 1, 2].map(|n| Charge::new(key(n), &limits[n], Cost::new(units)));
                    asked[2].enforcement = Enforcement::Independent;
                    let outcomes = store.apply(&asked);
                    if outcomes.per_charge[2].verdict.is_allowed() {
                        balance[2].fetch_add(units, Ordering::Relaxed);
                    }
                    if outcomes.admission == Admission::Admitted {
                        let back = rng.below(units + 1);
                        let refund = [0, 1].map(|n| Charge::new(key(n), &limits[n], Cost::refund(back)));
                        store.apply(&refund);
                        balance[0].fetch_add(units - back, Ordering::Relaxed);
                        balance[1].fetch_add(units - back, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    for n in 0..3 {
        let left = store.apply(&[Charge::new(key(n), &limits[n], Cost::PEEK)]).per_charge[0].remaining;
        assert_eq!(left + balance[n].load(Ordering::Relaxed), limits[n].capacity(), "key {n}");
    }
}

/// Without it a limit that changes while requests are in flight, to numbers that need another representation, is counted
/// in two places: each of them admits the limit.
#[test]
fn a_counter_that_changes_its_representation_is_counted_once() {
    let per_second = |count| {
        LimitSpec::new(Algorithm::SlidingWindow, Rate::per(count, TimeDelta::from_secs(1)))
            .build()
            .expect("a limit")
    };
    // The last count that fits a word, and the first that does not.
    let limits = [per_second(16_383), per_second(16_384)];
    assert_eq!(limits.each_ref().map(|limit| limit.packed().is_some()), [true, false]);
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), ManualClock::at(NOW)).expect("a store");
    let (scope, beside) = (Scope::new("s"), Scope::new("beside"));
    let key = |scope| CounterKey { scope, parts: &[KeyPart::Text("k")] };
    let taken = AtomicU64::new(0);
    // A first charge by either, so that both are known before threads meet.
    for limit in &limits {
        assert_eq!(store.apply(&[Charge::new(key(&scope), limit, Cost::ONE)]).admission, Admission::Admitted);
    }
    std::thread::scope(|threads| {
        for thread in 0..THREADS {
            let (store, taken, limits, key, scope, beside) = (&store, &taken, &limits, &key, &scope, &beside);
            threads.spawn(move || {
                let mut rng = SplitMix64::new(thread + 1);
                for _ in 0..8_000 {
                    let charge = |scope| Charge::new(key(scope), &limits[rng.clone().index(2)], Cost::ONE);
                    let pair = [charge(scope), charge(beside)];
                    let asked = if rng.below(4) == 0 { &pair[..] } else { &pair[..1] };
                    if store.apply(asked).admission == Admission::Admitted {
                        taken.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let left = store.apply(&[Charge::new(key(&scope), &limits[1], Cost::PEEK)]).per_charge[0].remaining;
    assert_eq!(taken.load(Ordering::Relaxed) + 2 + left, 16_384);
}
