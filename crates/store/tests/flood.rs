//! Ten times more keys than fit. If this fails, a flood of strangers frees an abuser, or takes the machine's memory.

use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, KeyPart, Limit, LimitSpec, ManualClock, Rate, Scope,
    TimeDelta, Timestamp,
};
use tollgate_store::{MemoryConfig, MemoryStore};

const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);
const BYTES: usize = 512 << 10;

fn hourly(algorithm: Algorithm, count: u64) -> Limit {
    LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(3_600))).build().expect("a limit")
}

struct Counters {
    store: MemoryStore<ManualClock>,
    scope: Scope,
}

impl Counters {
    fn new() -> Self {
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(BYTES), ManualClock::at(NOW)).expect("a store");
        Self { store, scope: Scope::new("scope") }
    }

    fn charge(&self, now: Timestamp, key: &str, limit: &Limit, cost: Cost) -> (Admission, u64) {
        let key = CounterKey { scope: &self.scope, parts: &[KeyPart::Text(key)] };
        let outcomes = self.store.charge_at(now, &[Charge::new(key, limit, cost)]);
        (outcomes.admission, outcomes.per_charge[0].remaining)
    }

    fn slots(&self) -> u64 {
        self.store.stats().slots
    }
}

/// Resident bytes of this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("linux");
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("pages") * 4096
}

#[test]
fn keys_near_their_limit_keep_their_state_and_memory_does_not_grow() {
    for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingWindow] {
        let shop = Counters::new();
        let limit = hourly(algorithm, 100);
        let before = resident();
        // Some are at their limit, some at half of it.
        for n in 0..500 {
            shop.charge(NOW, &format!("abuser {n}"), &limit, Cost::new(100));
            shop.charge(NOW, &format!("half {n}"), &limit, Cost::new(50));
        }
        for n in 0..10 * shop.slots() {
            shop.charge(NOW, &format!("stranger {n}"), &limit, Cost::ONE);
        }
        for n in 0..500 {
            let (admission, _) = shop.charge(NOW, &format!("abuser {n}"), &limit, Cost::ONE);
            assert_eq!(admission, Admission::Denied, "{algorithm}: abuser {n} was freed");
            let (_, left) = shop.charge(NOW, &format!("half {n}"), &limit, Cost::PEEK);
            assert_eq!(left, 50, "{algorithm}: half {n} was reset");
        }
        let figures = shop.store.stats();
        assert!(figures.evicted > 8 * figures.slots, "strangers push out strangers: {figures:?}");
        assert!(figures.live <= figures.slots);
        assert!(resident() < before + BYTES + (4 << 20), "resident memory grew beyond the cap");
    }
}

/// New keys that are each at their limit at once: none can be evicted, so they share counters.
#[test]
fn new_keys_share_counters_where_all_are_protected() {
    let shop = Counters::new();
    let limit = hourly(Algorithm::Gcra, 1);
    let slots = shop.slots();
    let before = resident();
    let admitted = (0..10 * slots)
        .filter(|n| shop.charge(NOW, &n.to_string(), &limit, Cost::ONE).0 == Admission::Admitted);
    let admitted = admitted.count() as u64;
    let figures = shop.store.stats();
    assert_eq!(figures.evicted, 0);
    assert!(admitted <= slots + 256, "at most one for each slot and one for each shared counter: {admitted}");
    assert!(admitted > slots * 9 / 10, "the table was used: {admitted} of {slots}");
    assert!(figures.overflowed > 0);
    assert!(resident() < before + BYTES + (4 << 20));
    // When the hour is over they are all forgotten, and newcomers have counters of their own again.
    let later = NOW + TimeDelta::from_secs(3_601);
    let overflowed = shop.store.stats().overflowed;
    for n in 0..slots / 4 {
        assert_eq!(shop.charge(later, &format!("new {n}"), &limit, Cost::ONE).0, Admission::Admitted);
    }
    assert_eq!(shop.store.stats().overflowed, overflowed);
    assert!(shop.store.stats().reused > 0);
}

#[test]
fn wide_counters_stay_within_their_share() {
    for (algorithm, count) in
        [(Algorithm::StrictWindow, 100), (Algorithm::SlidingLog, 100), (Algorithm::Concurrency, 100)]
    {
        let shop = Counters::new();
        let limit = hourly(algorithm, count);
        for n in 0..50 {
            let (admission, _) = shop.charge(NOW, &format!("abuser {n}"), &limit, Cost::new(100));
            assert_eq!(admission, Admission::Admitted);
        }
        for n in 0..50_000 {
            shop.charge(NOW, &format!("stranger {n}"), &limit, Cost::ONE);
        }
        let figures = shop.store.stats();
        assert!(figures.wide_bytes <= BYTES as u64 / 8, "{figures:?}");
        assert!(figures.wide_evicted > 0, "{figures:?}");
        for n in 0..50 {
            let (admission, _) = shop.charge(NOW, &format!("abuser {n}"), &limit, Cost::ONE);
            assert_eq!(admission, Admission::Denied, "{algorithm}: abuser {n} was freed");
        }
    }
}

/// Logs grow after they are made: the cap holds for that too, and the denial it takes is counted.
#[test]
fn logs_that_grow_stay_within_their_share() {
    let shop = Counters::new();
    let limit = hourly(Algorithm::SlidingLog, 10_000);
    for step in 0..600 {
        for n in 0..50 {
            shop.charge(NOW + TimeDelta::from_micros(step), &format!("log {n}"), &limit, Cost::ONE);
        }
    }
    let figures = shop.store.stats();
    assert!(figures.wide_bytes <= BYTES as u64 / 8, "{figures:?}");
    assert!(figures.wide_denied > 0, "{figures:?}");
}

#[test]
fn a_small_server_stays_small() {
    let before = resident();
    let store = MemoryStore::new(&MemoryConfig::default(), ManualClock::at(NOW)).expect("a store");
    let (scope, limit) = (Scope::new("s"), hourly(Algorithm::Gcra, 10));
    for n in 0..1_000 {
        let text = n.to_string();
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text(&text)] };
        store.apply(&[Charge::new(key, &limit, Cost::ONE)]);
    }
    assert!(resident() < before + (24 << 20), "a thousand keys took {} bytes", resident() - before);
}
