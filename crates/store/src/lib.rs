//! Counter stores.
//!
//! | module | contents |
//! |---|---|
//! | [`memory`](MemoryStore) | counters of this process, in a fixed amount of memory, without locks on the fast path |
//! | [`redis`](RedisStore) | counters in Redis, Sentinel or Redis Cluster, shared by many nodes |
//! | [`breaker`](Breaker) | circuit breaker per shard |
//! | [`deny_cache`](DenyCache) | denials repeated until they end, over any store |
//! | [`lease`](LeasedStore) | decisions from units that a store has already deducted, over any store |
//! | [`hot_key`](HotKeys) | hot key detection in a fixed amount of memory |
//!
//! Every store is a [`tollgate_core::CounterStore`] and passes `tollgate_core::conformance`.

mod breaker;
mod deny_cache;
mod hot_key;
mod lease;
mod memory;
#[cfg(feature = "redis")]
mod redis;

/// Suffix of a counter's scope for the mark that leases of it may be outstanding.
pub(crate) const MARK_SUFFIX: &str = "|leased";

pub use breaker::{Breaker, BreakerConfig, BreakerState, ShardFailure, Transition};
pub use deny_cache::DenyCache;
pub use hot_key::HotKeys;
pub use lease::{CounterNamer, HotCounter, HotKey, LeaseConfig, LeaseStats, LeaseTask, LeasedStore};
pub use memory::{HugePages, KeyHasher, MemoryConfig, MemoryError, MemoryStats, MemoryStore, prefetch};
#[cfg(feature = "redis")]
pub use redis::{
    MAX_STORES, RedisConfig, RedisConfigError, RedisRecords, RedisStore, RedisTls, ServerNameCheck,
    SettingNames, ShardStatus,
};
