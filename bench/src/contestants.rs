//! Contestants: Tollgate's store, its peers and the floor, each used as its users would.

use crate::floor::Floor;
use crate::traffic::{BLOCK, Traffic};
use governor::{DefaultKeyedRateLimiter, Quota as GovernorQuota, RateLimiter};
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};
use throttlecrab::{AdaptiveStore, RateLimiter as Crab};
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterKey, KeyPart, Limit, LimitSpec, Outcome, Rate, Scope, SystemClock,
    TimeDelta,
};
use tollgate_store::{HugePages, MemoryConfig, MemoryStore};

/// Seconds until one unit is refilled, so that every key stays live during the measurement.
const INTERVAL: u64 = 60;
/// Burst large enough that the most frequent key is never denied.
const BURST: u32 = 18_000_000;

/// A limiter under measurement.
pub(crate) trait Contestant: Sync {
    fn name(&self) -> String;
    /// Decides each request of the block.
    fn answer(&self, traffic: &Traffic);
}

pub(crate) fn limit() -> Limit {
    let quota = Rate::per(1_000_000, TimeDelta::from_secs(INTERVAL * 1_000_000));
    LimitSpec::new(Algorithm::Gcra, quota).burst(u64::from(BURST)).build().expect("a limit")
}

/// Tollgate's store, with 32 bytes of memory per expected counter.
pub(crate) struct Ours {
    pub(crate) store: MemoryStore<SystemClock>,
    clock: SystemClock,
    limit: Limit,
    scopes: Vec<Scope>,
    way: Way,
}

/// How the store is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    OneLimit,
    /// One limit, at a time given by the caller: the cost of a decision without reading the clock.
    TimeGiven,
    FourLimits,
    Batch,
}

impl Ours {
    pub(crate) fn new(keys: u64, way: Way, huge_pages: HugePages) -> Self {
        let counters = keys as usize * if way == Way::FourLimits { 4 } else { 1 };
        // 32 bytes per key in total, as in the bare table, with almost nothing for wide counters.
        let mut config = MemoryConfig::with_bytes((counters * 32).max(1 << 18));
        config.wide_bytes = Some(1 << 14);
        config.huge_pages = huge_pages;
        let clock = SystemClock::new();
        let scopes = (0..4).map(|n| Scope::new(format!("scope {n}"))).collect();
        Self { store: MemoryStore::new(&config, clock).expect("memory"), clock, limit: limit(), scopes, way }
    }
}

impl Contestant for Ours {
    fn name(&self) -> String {
        match self.way {
            Way::OneLimit => "tollgate store".into(),
            Way::TimeGiven => "tollgate store, time given".into(),
            Way::FourLimits => "tollgate store, 4 limits".into(),
            Way::Batch => "tollgate store, batches of 32".into(),
        }
    }

    fn answer(&self, traffic: &Traffic) {
        match self.way {
            Way::OneLimit => {
                for key in &traffic.block {
                    let key = CounterKey { scope: &self.scopes[0], parts: &[KeyPart::Text(key)] };
                    black_box(&self.store.apply(&[Charge::new(key, &self.limit, Cost::ONE)]));
                }
            }
            Way::TimeGiven => {
                let now = self.clock.now();
                for key in &traffic.block {
                    let key = CounterKey { scope: &self.scopes[0], parts: &[KeyPart::Text(key)] };
                    black_box(&self.store.charge_at(now, &[Charge::new(key, &self.limit, Cost::ONE)]));
                }
            }
            Way::FourLimits => {
                for key in &traffic.block {
                    let parts = [KeyPart::Text(key)];
                    let charge = |n: usize| {
                        Charge::new(
                            CounterKey { scope: &self.scopes[n], parts: &parts },
                            &self.limit,
                            Cost::ONE,
                        )
                    };
                    black_box(&self.store.apply(&[charge(0), charge(1), charge(2), charge(3)]));
                }
            }
            Way::Batch => {
                let mut out: Vec<Outcome> = Vec::with_capacity(32);
                for keys in traffic.block.chunks_exact(32) {
                    let parts: [[KeyPart<'_>; 1]; 32] = std::array::from_fn(|n| [KeyPart::Text(&keys[n])]);
                    let charges: [Charge<'_>; 32] = std::array::from_fn(|n| {
                        let key = CounterKey { scope: &self.scopes[0], parts: &parts[n] };
                        Charge::new(key, &self.limit, Cost::ONE)
                    });
                    out.clear();
                    self.store.charge_each(self.clock.now(), &charges, &mut out);
                    black_box(&out);
                }
            }
        }
    }
}

/// The floor, one by one or in batches.
pub(crate) struct Bare {
    floor: Floor,
    clock: SystemClock,
    limit: Limit,
    batch: usize,
}

impl Bare {
    pub(crate) fn new(keys: u64, batch: usize) -> Self {
        Self { floor: Floor::new(keys as usize * 2), clock: SystemClock::new(), limit: limit(), batch }
    }
}

impl Contestant for Bare {
    fn name(&self) -> String {
        if self.batch == 1 {
            "bare flat table".into()
        } else {
            format!("bare flat table, batches of {}", self.batch)
        }
    }

    fn answer(&self, traffic: &Traffic) {
        if self.batch == 1 {
            for key in &traffic.block {
                let hash = self.floor.hash(7, key);
                black_box(&self.floor.charge(hash, &self.limit, self.clock.now()));
            }
            return;
        }
        let mut hashes = [0_u64; BLOCK];
        let mut out: Vec<Outcome> = Vec::with_capacity(self.batch);
        for keys in traffic.block.chunks_exact(self.batch) {
            for (hash, key) in hashes.iter_mut().zip(keys) {
                *hash = self.floor.hash(7, key);
                self.floor.prefetch(*hash);
            }
            let now = self.clock.now();
            out.clear();
            out.extend(hashes[..self.batch].iter().map(|hash| self.floor.charge(*hash, &self.limit, now)));
            black_box(&out);
        }
    }
}

/// The cost of reading the clock.
pub(crate) struct ClockAlone(pub(crate) SystemClock);

impl Contestant for ClockAlone {
    fn name(&self) -> String {
        "reading the clock".into()
    }

    fn answer(&self, _: &Traffic) {
        for _ in 0..BLOCK {
            black_box(self.0.now());
        }
    }
}

fn governor_quota() -> GovernorQuota {
    let burst = NonZeroU32::new(BURST).expect("not zero");
    GovernorQuota::with_period(Duration::from_secs(INTERVAL)).expect("not zero").allow_burst(burst)
}

pub(crate) struct GovernorByString(DefaultKeyedRateLimiter<String>);

impl GovernorByString {
    pub(crate) fn new() -> Self {
        Self(RateLimiter::keyed(governor_quota()))
    }
}

impl Contestant for GovernorByString {
    fn name(&self) -> String {
        "governor by String".into()
    }

    fn answer(&self, traffic: &Traffic) {
        for key in &traffic.block {
            let _ = black_box(self.0.check_key(key));
        }
    }
}

pub(crate) struct GovernorByNumber(DefaultKeyedRateLimiter<u64>);

impl GovernorByNumber {
    pub(crate) fn new() -> Self {
        Self(RateLimiter::keyed(governor_quota()))
    }
}

impl Contestant for GovernorByNumber {
    fn name(&self) -> String {
        "governor by u64".into()
    }

    fn answer(&self, traffic: &Traffic) {
        for number in &traffic.numbers {
            let _ = black_box(self.0.check_key(number));
        }
    }
}

/// throttlecrab's library takes `&mut self`: threads share it through a mutex, as its server does through an actor.
pub(crate) struct Throttlecrab(Mutex<Crab<AdaptiveStore>>);

impl Throttlecrab {
    pub(crate) fn new(keys: u64) -> Self {
        Self(Mutex::new(Crab::new(AdaptiveStore::with_capacity(keys as usize))))
    }
}

impl Contestant for Throttlecrab {
    fn name(&self) -> String {
        "throttlecrab".into()
    }

    #[allow(clippy::disallowed_methods, reason = "its users read the clock for it")]
    fn answer(&self, traffic: &Traffic) {
        for key in &traffic.block {
            let mut crab = self.0.lock().expect("no panic");
            let _ =
                black_box(crab.rate_limit(key, i64::from(BURST), 1, INTERVAL as i64, 1, SystemTime::now()));
        }
    }
}
