//! Where counters live, as the binary stacks it: one list a choice, outermost first.
//!
//! | `--store` | stack |
//! |---|---|
//! | `memory` | the memory table |
//! | `redis://…` and the like | leases and local counters, over denials remembered, over Redis (with a breaker for each shard inside) |

use serde_json::{Value, json};
use tollgate_core::{Charge, CounterStore, Outcome, Outcomes, Permit, StoreError, SystemClock, UnitReturn};
use tollgate_observe::MetricsWriter;
use tollgate_store::{
    BreakerState, DenyCache, LeaseConfig, LeasedStore, MemoryStats, MemoryStore, RedisStore,
};

/// Denials that are remembered, 64 bytes each.
const DENIALS: usize = 65_536;

#[allow(clippy::large_enum_variant, reason = "there is one in a process, and it is never moved")]
pub(crate) enum Store {
    Memory(MemoryStore<SystemClock>),
    Redis(RedisStack),
}

/// Counters in Redis, with what stands in front of them.
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

    /// The leases, where there are any.
    pub(crate) const fn leases(&self) -> Option<&RedisStack> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(far) => Some(far),
        }
    }

    /// For `/readyz?verbose`.
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
                            "address": shard.address,
                            "connections": shard.connections,
                            "breaker": shard.breaker.name(),
                            "lost_writes_at": shard.lost_writes_at.map(tollgate_core::Timestamp::as_secs),
                        })
                    })
                    .collect();
                json!({"kind": "redis", "shards": shards})
            }
        }
    }

    /// Writes its figures.
    pub(crate) fn metrics(&self, page: &mut MetricsWriter) {
        match self {
            Self::Memory(memory) => memory_metrics(&memory.stats(), page),
            Self::Redis(far) => {
                redis_metrics(far.inner().inner(), page);
                let help = "Requests denied by a denial that is remembered, without asking the store.";
                page.counter("ratelimit_deny_cache_denials_total", help, far.inner().hits());
                crate::server::leases::metrics(&far.stats(), page);
            }
        }
    }

    /// The breaker of each shard, for those who look on.
    pub(crate) fn breakers(&self) -> Vec<Value> {
        let Self::Redis(far) = self else { return Vec::new() };
        let shards = far.inner().inner().status();
        shards.iter().map(|shard| json!({"shard": shard.address, "state": shard.breaker.name()})).collect()
    }

    /// Which kind it is.
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
}

fn redis_metrics(redis: &RedisStore, page: &mut MetricsWriter) {
    let shards = redis.status();
    let help = "State of each shard's breaker: 0 closed, 1 half open, 2 open.";
    let mut family = page.gauges("ratelimit_circuit_state", help);
    for shard in &shards {
        let state = match shard.breaker {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        family.add(&[("shard", &shard.address)], state);
    }
    let mut family = page.gauges("ratelimit_redis_connections", "Connections to each shard that stand.");
    for shard in &shards {
        family.add(&[("shard", &shard.address)], shard.connections);
    }
    let help = "By how much a shard's clock is ahead of this node's, as the last answer showed.";
    let mut family = page.gauges("ratelimit_clock_offset_seconds", help);
    for shard in &shards {
        family.add(&[("shard", &shard.address)], shard.clock_ahead as f64 / 1e6);
    }
    let help = "Asks of a shard that came to nothing, by why.";
    let mut family = page.counters("ratelimit_redis_errors_total", help);
    for shard in &shards {
        for (kind, count) in &shard.errors {
            family.add(&[("shard", &shard.address), ("kind", kind)], count);
        }
    }
    let help =
        "When another process took a shard's place, which may not know all that was written; 0 for never.";
    let mut family = page.gauges("ratelimit_redis_lost_writes_timestamp_seconds", help);
    for shard in &shards {
        let at = shard.lost_writes_at.map_or(0, tollgate_core::Timestamp::as_secs);
        family.add(&[("shard", &shard.address)], at);
    }
    let disagreements = redis.mismatches() as u64;
    let help = "Decisions on which a script and this program differed; anything but 0 is a bug.";
    page.counter("ratelimit_redis_disagreements_total", help, disagreements);
}

fn memory_metrics(figures: &MemoryStats, page: &mut MetricsWriter) {
    let gauges = [
        ("ratelimit_memory_cap_bytes", "The most bytes that counters can take.", figures.bytes_cap),
        ("ratelimit_memory_slots", "Slots of the counter table.", figures.slots),
        ("ratelimit_memory_live_slots", "Slots with a live counter, estimated.", figures.live),
        ("ratelimit_memory_aside_counters", "Counters too wide for a slot.", figures.wide),
        ("ratelimit_memory_aside_bytes", "Bytes that those take.", figures.wide_bytes),
    ];
    for (name, help, value) in gauges {
        page.gauge(name, help, value);
    }
    let counters = [
        ("inserted", "Keys that got a slot.", figures.inserted),
        ("reused", "Of these, in a slot that had expired.", figures.reused),
        (
            "evicted",
            "Of these, in the slot of a live key that had used less than half of its limit.",
            figures.evicted,
        ),
        (
            "overflow_charges",
            "Charges on a counter shared by newcomers, for want of a slot.",
            figures.overflowed,
        ),
        ("overflow_evicted", "Shared counters given up for others.", figures.overflow_evicted),
        ("aside_evicted", "Wide counters given up.", figures.wide_evicted),
        ("aside_overflow_charges", "Wide charges on a shared counter.", figures.wide_overflowed),
        ("aside_refused", "Wide charges denied for want of memory.", figures.wide_denied),
    ];
    for (name, help, value) in counters {
        page.counter(&format!("ratelimit_memory_{name}_total"), help, value);
    }
}
