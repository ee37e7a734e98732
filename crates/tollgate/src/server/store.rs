//! Counter store of the server: one stack of layers per choice, outermost first.
//!
//! | `--store` | stack |
//! |---|---|
//! | `memory` | the memory table |
//! | `redis://…` and the like | leases and local counters, over the deny cache, over Redis (with a breaker per shard) |

use serde_json::{Value, json};
use tollgate_core::{
    Charge, CounterStore, LastKnown, Outcome, Outcomes, Permit, StoreError, SystemClock, UnitReturn,
};
use tollgate_observe::MetricsWriter;
use tollgate_store::{
    BreakerState, DenyCache, LeaseConfig, LeasedStore, MemoryStats, MemoryStore, RedisStore, ShardStatus,
};

/// Capacity of the deny cache, in denials of 64 bytes each.
const DENIALS: usize = 65_536;

#[allow(clippy::large_enum_variant, reason = "there is one in a process, and it is never moved")]
pub(crate) enum Store {
    Memory(MemoryStore<SystemClock>),
    Redis(RedisStack),
}

/// Counters in Redis, behind leases and the deny cache.
pub(crate) type RedisStack = LeasedStore<DenyCache<RedisStore, SystemClock>, RedisStore, SystemClock>;

impl Store {
    pub(crate) fn redis(
        redis: &RedisStore,
        local: MemoryStore<SystemClock>,
        leases: LeaseConfig,
        clock: SystemClock,
    ) -> Self {
        let remembered = DenyCache::new(redis.clone(), clock, DENIALS);
        Self::Redis(LeasedStore::new(remembered, redis.clone(), clock, leases).with_local(local))
    }

    /// Returns the leases, with a Redis store.
    pub(crate) const fn leases(&self) -> Option<&RedisStack> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(far) => Some(far),
        }
    }

    /// Returns the store's part of `/readyz?verbose`.
    pub(crate) fn details(&self) -> Value {
        match self {
            Self::Memory(_) => json!({"kind": "memory"}),
            Self::Redis(far) => {
                let shards: Vec<Value> = far
                    .inner()
                    .inner()
                    .status()
                    .into_iter()
                    .map(|shard| {
                        json!({
                            "store": shard.store,
                            "address": shard.address,
                            "connections": shard.connections,
                            "breaker": shard.breaker.name(),
                            "error": shard.error,
                            "lost_writes_at": shard.lost_writes_at.map(tollgate_core::Timestamp::as_secs),
                        })
                    })
                    .collect();
                json!({"kind": "redis", "shards": shards})
            }
        }
    }

    /// Writes the store's metrics.
    pub(crate) fn metrics(&self, page: &mut MetricsWriter) {
        match self {
            Self::Memory(memory) => memory_metrics(&memory.stats(), page),
            Self::Redis(far) => {
                redis_metrics(far.inner().inner(), page);
                let help = "Number of requests denied from the deny cache, without the store.";
                page.counter("ratelimit_deny_cache_denials_total", help, far.inner().hits());
                crate::server::leases::metrics(&far.stats(), page);
            }
        }
    }

    /// Returns the breaker state of each shard as JSON.
    pub(crate) fn breakers(&self) -> Vec<Value> {
        let Self::Redis(far) = self else { return Vec::new() };
        let shards = far.inner().inner().status();
        let told = shards.iter().map(
            |shard| json!({"store": shard.store, "shard": shard.address, "state": shard.breaker.name(), "error": shard.error}),
        );
        told.collect()
    }

    /// Returns the kind of store, for status output.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Redis(_) => "redis",
        }
    }
}

impl CounterStore for Store {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        match self {
            Self::Memory(memory) => memory.charge(charges).await,
            Self::Redis(redis) => redis.charge(charges).await,
        }
    }

    #[inline]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        match self {
            Self::Memory(memory) => memory.try_charge(charges, outcomes),
            Self::Redis(redis) => redis.try_charge(charges, outcomes),
        }
    }

    #[inline]
    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        match self {
            Self::Memory(memory) => memory.try_charge_each(charges, outcomes),
            Self::Redis(_) => false,
        }
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        match self {
            Self::Memory(memory) => memory.debit(charges).await,
            Self::Redis(redis) => redis.debit(charges).await,
        }
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        match self {
            Self::Memory(memory) => memory.release(permits).await,
            Self::Redis(redis) => redis.release(permits).await,
        }
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        match self {
            Self::Memory(memory) => memory.return_units(back).await,
            Self::Redis(redis) => redis.return_units(back).await,
        }
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis) => redis.last_known(charge),
        }
    }
}

/// Returns the labels of a shard: its address and, with a named store, that name; then the others.
fn labels<'a>(shard: &'a ShardStatus, others: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let store = shard.store.as_deref().map(|store| ("store", store));
    std::iter::once(("shard", shard.address.as_str())).chain(store).chain(others.iter().copied()).collect()
}

fn redis_metrics(redis: &RedisStore, page: &mut MetricsWriter) {
    let shards = redis.status();
    let help = "State of each shard's circuit breaker: 0 closed, 1 half-open, 2 open.";
    let mut family = page.gauges("ratelimit_circuit_state", help);
    for shard in &shards {
        let state = match shard.breaker {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        family.add(&labels(shard, &[]), state);
    }
    let mut family = page.gauges("ratelimit_redis_connections", "Number of open connections to each shard.");
    for shard in &shards {
        family.add(&labels(shard, &[]), shard.connections);
    }
    let help = "Seconds by which a shard's clock is ahead of this node's, by the last response.";
    let mut family = page.gauges("ratelimit_clock_offset_seconds", help);
    for shard in &shards {
        family.add(&labels(shard, &[]), shard.clock_ahead as f64 / 1e6);
    }
    let help = "Number of failed calls to a shard, by kind of error.";
    let mut family = page.counters("ratelimit_redis_errors_total", help);
    for shard in &shards {
        for (kind, count) in &shard.errors {
            family.add(&labels(shard, &[("kind", kind)]), count);
        }
    }
    let help = "Number of calls that a shard refused, by the code of its error.";
    let mut family = page.counters("ratelimit_redis_refusals_total", help);
    for shard in &shards {
        // Codes that never came are left out, but for one.
        for (code, count) in shard.refusals.iter().filter(|(code, count)| *count > 0 || *code == "other") {
            family.add(&labels(shard, &[("code", code)]), count);
        }
    }
    let help =
        "Unix time at which another process took over a shard, so that writes may be lost; 0 if never.";
    let mut family = page.gauges("ratelimit_redis_lost_writes_timestamp_seconds", help);
    for shard in &shards {
        let at = shard.lost_writes_at.map_or(0, tollgate_core::Timestamp::as_secs);
        family.add(&labels(shard, &[]), at);
    }
    let mismatches = redis.mismatches() as u64;
    let help = "Number of Redis script results that differ from this node's own computation; any is a bug.";
    page.counter("ratelimit_redis_mismatches_total", help, mismatches);
}

fn memory_metrics(figures: &MemoryStats, page: &mut MetricsWriter) {
    let gauges = [
        ("ratelimit_memory_cap_bytes", "Maximum bytes for counters.", figures.bytes_cap),
        ("ratelimit_memory_slots", "Number of slots in the counter table.", figures.slots),
        ("ratelimit_memory_live_slots", "Estimated number of slots with a live counter.", figures.live),
        (
            "ratelimit_memory_wide_counters",
            "Number of wide counters, whose state does not fit a table slot.",
            figures.wide,
        ),
        ("ratelimit_memory_wide_bytes", "Bytes used by wide counters.", figures.wide_bytes),
    ];
    for (name, help, value) in gauges {
        page.gauge(name, help, value);
    }
    let counters = [
        ("inserted", "Number of keys that were given a slot.", figures.inserted),
        ("reused", "Number of keys that were given an expired slot.", figures.reused),
        (
            "evicted",
            "Number of live keys evicted by a new key; each had used less than half of its limit.",
            figures.evicted,
        ),
        (
            "overflow_charges",
            "Number of charges on a counter shared by new keys, because no slot was free.",
            figures.overflowed,
        ),
        ("overflow_evicted", "Number of shared counters evicted.", figures.overflow_evicted),
        ("wide_evicted", "Number of wide counters evicted.", figures.wide_evicted),
        ("wide_overflow_charges", "Number of charges on a shared wide counter.", figures.wide_overflowed),
        ("wide_denied", "Number of wide charges denied because memory was full.", figures.wide_denied),
    ];
    for (name, help, value) in counters {
        page.counter(&format!("ratelimit_memory_{name}_total"), help, value);
    }
}
