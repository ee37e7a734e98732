//! Counter store of the server: one stack of layers per choice, outermost first.
//!
//! | `--store` | stack |
//! |---|---|
//! | `memory` | the memory table |
//! | `redis://…` and the like | leases and local counters, over the deny cache, over Redis (with a breaker per shard) |
//! | either, with `--db` | the record of durable counters around it |
//! | either, with `--cell` | the regional store: counters of other cells beside the stack of this one |

use crate::server::cells::{self, CellStore};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_cells::durable::DurableStore;
use tollgate_core::{
    Charge, Charged, CounterKey, CounterStore, LastKnown, Outcome, Outcomes, Permit, RegionStatus,
    StoreError, SystemClock, UnitReturn,
};
use tollgate_observe::MetricsWriter;
use tollgate_store::{
    BreakerState, DenyCache, LeaseConfig, LeasedStore, MemoryStats, MemoryStore, RedisStore, ShardStatus,
};

/// Capacity of the deny cache, in denials of 64 bytes each.
const DENIALS: usize = 65_536;

/// The store of the process: that of this cell, alone or beside the counters of other cells.
#[allow(clippy::large_enum_variant, reason = "there is one in a process, and it is never moved")]
pub(crate) enum Store {
    Own(KeptStore),
    Cells(Arc<CellStore>),
}

impl Store {
    /// Returns the cell's own store with the record of durable counters.
    pub(crate) fn kept(&self) -> &KeptStore {
        match self {
            Self::Own(own) => own,
            Self::Cells(cells) => cells.own(),
        }
    }

    /// Returns the cell's own store.
    fn own(&self) -> &OwnStore {
        self.kept().inner()
    }

    /// Returns the leases, with a Redis store.
    pub(crate) fn leases(&self) -> Option<&RedisStack> {
        self.own().leases()
    }

    /// Returns the cells as JSON; null if there is one.
    pub(crate) fn cells(&self) -> Value {
        match self {
            Self::Own(_) => Value::Null,
            Self::Cells(linked) => cells::details(linked),
        }
    }

    /// Returns the store's part of `/readyz?verbose`.
    pub(crate) fn details(&self) -> Value {
        let mut details = self.own().details();
        if let Self::Cells(_) = self {
            details["cells"] = self.cells();
        }
        details
    }

    /// Writes the store's metrics.
    pub(crate) fn metrics(&self, page: &mut MetricsWriter) {
        self.own().metrics(page);
        if let Self::Cells(linked) = self {
            cells::metrics(linked, page);
        }
    }

    /// Returns the breaker state of each shard as JSON.
    pub(crate) fn breakers(&self) -> Vec<Value> {
        self.own().breakers()
    }

    /// Returns whether the breakers of all shards of a store are open.
    pub(crate) fn is_any_store_down(&self) -> bool {
        self.own().is_any_store_down()
    }

    /// Returns whether another process has this cell's name, so that this one decides nothing that cells share.
    pub(crate) fn is_displaced(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Cells(linked) => linked.members().is_displaced(linked.now()),
        }
    }

    /// Returns the number of open connections to all shards.
    pub(crate) fn connections(&self) -> u64 {
        self.own().connections()
    }

    /// Returns the kind of store, for status output.
    pub(crate) fn kind(&self) -> &'static str {
        self.own().kind()
    }
}

impl CounterStore for Store {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        match self {
            Self::Own(own) => own.charge(charges).await,
            // Asks other cells: its future is large, and charges of nodes without cells would be moved with room for it.
            Self::Cells(cells) => Box::pin(cells.charge(charges)).await,
        }
    }

    #[inline]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        match self {
            Self::Own(own) => own.try_charge(charges, outcomes),
            Self::Cells(cells) => cells.try_charge(charges, outcomes),
        }
    }

    #[inline]
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        match self {
            Self::Own(own) => own.try_charge_named(charge, name),
            Self::Cells(cells) => cells.try_charge_named(charge, name),
        }
    }

    #[inline]
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        match self {
            Self::Own(own) => own.prefetch(key),
            Self::Cells(cells) => cells.prefetch(key),
        }
    }

    #[inline]
    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        match self {
            Self::Own(own) => own.try_charge_each(charges, outcomes),
            Self::Cells(cells) => cells.try_charge_each(charges, outcomes),
        }
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        match self {
            Self::Own(own) => own.debit(charges).await,
            Self::Cells(cells) => cells.debit(charges).await,
        }
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        match self {
            Self::Own(own) => own.release(permits).await,
            Self::Cells(cells) => cells.release(permits).await,
        }
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        match self {
            Self::Own(own) => own.return_units(back).await,
            Self::Cells(cells) => cells.return_units(back).await,
        }
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        match self {
            Self::Own(own) => own.last_known(charge),
            Self::Cells(cells) => cells.last_known(charge),
        }
    }

    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus> {
        match self {
            Self::Own(_) => None,
            Self::Cells(cells) => cells.region_status(charge),
        }
    }

    #[inline]
    fn is_regional_only(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Cells(cells) => cells.is_regional_only(),
        }
    }
}

/// The store of one cell, with the record of its durable counters.
pub(crate) type KeptStore = DurableStore<OwnStore, SystemClock>;

/// The store of one cell.
#[allow(clippy::large_enum_variant, reason = "there is one in a process, and it is never moved")]
pub(crate) enum OwnStore {
    Memory(MemoryStore<SystemClock>),
    Redis(RedisStack),
}

/// Counters in Redis, behind leases and the deny cache.
pub(crate) type RedisStack = LeasedStore<DenyCache<RedisStore, SystemClock>, RedisStore, SystemClock>;

impl OwnStore {
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
    pub(crate) fn leases(&self) -> Option<&RedisStack> {
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
        let breakers = shards.iter().map(
            |shard| json!({"store": shard.store, "shard": shard.address, "state": shard.breaker.name(), "error": shard.error}),
        );
        breakers.collect()
    }

    /// Returns whether the breakers of all shards of a store are open.
    pub(crate) fn is_any_store_down(&self) -> bool {
        let Self::Redis(far) = self else { return false };
        let shards = far.inner().inner().status();
        shards.iter().any(|one| {
            let mut same = shards.iter().filter(|shard| shard.store == one.store);
            same.all(|shard| shard.breaker != BreakerState::Closed)
        })
    }

    /// Returns the number of open connections to all shards.
    pub(crate) fn connections(&self) -> u64 {
        let Self::Redis(far) = self else { return 0 };
        far.inner().inner().status().iter().map(|shard| shard.connections as u64).sum()
    }

    /// Returns the kind of store, for status output.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Redis(_) => "redis",
        }
    }
}

impl CounterStore for OwnStore {
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
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        match self {
            Self::Memory(memory) => memory.try_charge_named(charge, name),
            Self::Redis(redis) => redis.try_charge_named(charge, name),
        }
    }

    #[inline]
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        match self {
            Self::Memory(memory) => memory.prefetch(key),
            Self::Redis(_) => None,
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

    fn leased_units(&self, charge: &Charge<'_>) -> u64 {
        match self {
            Self::Memory(_) => 0,
            Self::Redis(redis) => redis.leased_units(charge),
        }
    }

    fn is_down(&self) -> bool {
        match self {
            Self::Memory(_) => false,
            Self::Redis(redis) => redis.is_down(),
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

fn memory_metrics(stats: &MemoryStats, page: &mut MetricsWriter) {
    let gauges = [
        ("ratelimit_memory_cap_bytes", "Maximum bytes for counters.", stats.bytes_cap),
        ("ratelimit_memory_slots", "Number of slots in the counter table.", stats.slots),
        ("ratelimit_memory_live_slots", "Estimated number of slots with a live counter.", stats.live),
        (
            "ratelimit_memory_wide_counters",
            "Number of wide counters, whose state does not fit a table slot.",
            stats.wide,
        ),
        ("ratelimit_memory_wide_bytes", "Bytes used by wide counters.", stats.wide_bytes),
    ];
    for (name, help, value) in gauges {
        page.gauge(name, help, value);
    }
    let counters = [
        ("inserted", "Number of keys that were given a slot.", stats.inserted),
        ("reused", "Number of keys that were given an expired slot.", stats.reused),
        (
            "evicted",
            "Number of live keys evicted by a new key; each had used less than half of its limit.",
            stats.evicted,
        ),
        (
            "overflow_charges",
            "Number of charges on a counter shared by new keys, because no slot was free.",
            stats.overflowed,
        ),
        ("overflow_evicted", "Number of shared counters evicted.", stats.overflow_evicted),
        ("wide_evicted", "Number of wide counters evicted.", stats.wide_evicted),
        ("wide_overflow_charges", "Number of charges on a shared wide counter.", stats.wide_overflowed),
        ("wide_denied", "Number of wide charges denied because memory was full.", stats.wide_denied),
    ];
    for (name, help, value) in counters {
        page.counter(&format!("ratelimit_memory_{name}_total"), help, value);
    }
}
