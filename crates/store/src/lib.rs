//! Where counters live.
//!
//! | module | what |
//! |---|---|
//! | [`memory`](MemoryStore) | counters of this process, in a fixed amount of memory, without locks on the usual path |
//! | [`redis`](RedisStore) | counters in Redis, Sentinel or Redis Cluster, shared by many machines |
//! | [`breaker`](Breaker) | when to stop asking a part that keeps failing, and when to try again |
//! | [`deny_cache`](DenyCache) | denials remembered until they end, over any store |
//! | [`lease`](Leased) | decisions out of units that a store has already deducted, over any store |
//! | [`hotkey`](HotKeys) | which keys are hot, in a fixed amount of memory |
//!
//! Every store is a [`tollgate_core::CounterStore`] and passes `tollgate_core::conformance`.

mod breaker;
mod deny_cache;
mod hot_key;
mod lease;
mod memory;
#[cfg(feature = "redis")]
mod redis;

/// What the scope of a counter's mark adds to its own: leases of it may be out.
pub(crate) const MARK_SUFFIX: &str = "|leased";

pub use breaker::{Breaker, BreakerConfig, BreakerState, CallGuard, Transition};
pub use deny_cache::DenyCache;
pub use hot_key::HotKeys;
pub use lease::{HotKey, LeaseConfig, LeaseStats, LeaseTask, LeasedStore};
pub use memory::{HugePages, MemoryConfig, MemoryError, MemoryStats, MemoryStore};
#[cfg(feature = "redis")]
pub use redis::{RedisConfig, RedisConfigError, RedisStore, ShardStatus};
