//! Counters in Redis behind leases: decisions from units that Redis has already deducted, without a network call on the
//! usual path and never above the limit (`docs/internals/lease-proof.md`). The same stack as a server's, so programs and servers share
//! their counters.

use crate::in_process::{InProcess, MEMORY};
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::{Clock, PermitId, SystemClock};
use tollgate_engine::{DecisionId, Limiter};
use tollgate_rules::Ruleset;
use tollgate_store::{
    DenyCache, LeaseConfig, LeasedStore, MemoryConfig, MemoryError, MemoryStore, RedisConfig, RedisRecords,
    RedisStore,
};

/// Counters in Redis, behind leases and a deny cache.
pub type LeasedRedis = LeasedStore<DenyCache<RedisStore, SystemClock>, RedisStore, SystemClock>;

/// Capacity of the deny cache, in denials of 64 bytes each.
const DENIALS: usize = 65_536;
/// Interval between two searches for idle leases.
const TASK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time that returning leases takes.
const RETURN_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns an engine over Redis. Without Redis, rules decide by their `on_error`, with local counters in 64 MiB of memory.
pub(crate) fn engine(
    rules: Arc<Ruleset>,
    redis: RedisConfig,
    leases: LeaseConfig,
) -> Result<Limiter<LeasedRedis>, MemoryError> {
    let clock = SystemClock::new();
    let time: Arc<dyn Clock> = Arc::new(clock);
    let fallback = MemoryStore::new(&MemoryConfig::with_bytes(MEMORY), Arc::clone(&time))?;
    // For rules whose counters are local to each process.
    let local = MemoryConfig::with_bytes((MEMORY / 16).max(MemoryConfig::MIN_BYTES));
    let local = MemoryStore::new(&local, clock)?;
    let redis = RedisStore::connect(redis);
    let records = Arc::new(RedisRecords::new(redis.clone()));
    let cached = DenyCache::new(redis.clone(), clock, DENIALS);
    let store = LeasedStore::new(cached, redis, clock, leases).with_local(local);
    Ok(Limiter::new(rules, store, time).with_fallback(fallback).with_shared_reservations(records))
}

/// Refills leases before units run out and returns idle units, as long as the limiter exists.
pub(crate) fn spawn_tasks(limiter: &Arc<Limiter<LeasedRedis>>) {
    let weak = Arc::downgrade(limiter);
    tokio::spawn(async move {
        while let Some(limiter) = weak.upgrade() {
            tokio::select! {
                () = limiter.store().task_ready() => {}
                () = tokio::time::sleep(TASK_INTERVAL) => {}
            }
            for task in limiter.store().due_tasks() {
                let limiter = Arc::clone(&limiter);
                tokio::spawn(async move {
                    limiter.store().run_task(task, PermitId(DecisionId::generate().0)).await;
                });
            }
        }
    });
}

impl InProcess<LeasedRedis> {
    /// Returns all leased units to Redis, before the program ends. Those that are not returned expire.
    pub async fn return_leases(&self) {
        let mut returns = tokio::task::JoinSet::new();
        for task in self.limiter.store().shutdown_tasks() {
            let limiter = Arc::clone(&self.limiter);
            returns.spawn(async move {
                limiter.store().run_task(task, PermitId(DecisionId::generate().0)).await;
            });
        }
        let all = async { while returns.join_next().await.is_some() {} };
        if tokio::time::timeout(RETURN_TIMEOUT, all).await.is_err() {
            tracing::warn!("some leases were not returned; they will expire");
        }
    }
}
