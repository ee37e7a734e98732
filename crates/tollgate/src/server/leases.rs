//! Lease tasks of the server process: refills and returns in the background, the fleet's hot list, return at shutdown, stats
//! and metrics.

use crate::server::store::{RedisStack, Store};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tollgate_control::ControlPlane;
use tollgate_core::PermitId;
use tollgate_engine::{DecisionId, Limiter};
use tollgate_observe::{MetricsWriter, Telemetry};
use tollgate_store::LeaseStats;

/// Interval between two searches for idle leases.
const TASK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time that shutdown waits for leases to be returned.
const RETURN_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of hot keys in a response.
const MAX_HOT: usize = 100;

/// Refills leases before units run out and returns idle units, as long as the process runs.
pub(crate) async fn run_lease_tasks(limiter: Arc<Limiter<Store>>) {
    let Some(leases) = limiter.store().leases() else { return };
    loop {
        tokio::select! {
            () = leases.task_ready() => {}
            () = tokio::time::sleep(TASK_INTERVAL) => {}
        }
        for task in leases.due_tasks() {
            let limiter = Arc::clone(&limiter);
            tokio::spawn(async move {
                if let Some(leases) = limiter.store().leases() {
                    leases.run_task(task, PermitId(DecisionId::generate().0)).await;
                }
            });
        }
    }
}

/// Exchanges hot counters with the programs that follow this server and with the other nodes, as long as the process runs.
pub(crate) fn exchange_hot(
    limiter: Arc<Limiter<Store>>,
    control: Arc<ControlPlane>,
) -> impl Future<Output = ()> + Send {
    if let Some(leases) = limiter.store().leases() {
        let hasher = control.counter_hasher();
        leases.share_hot_keys(Arc::new(move |key| hasher.name(key)));
    }
    async move {
        let own = |max| {
            let counters = limiter.store().leases()?.hot_counters(max);
            Some(counters.into_iter().map(|counter| (counter.name, counter.rate)).collect())
        };
        let apply = |names: Vec<u64>, lifetime| {
            if let Some(leases) = limiter.store().leases() {
                leases.set_hot_list(names, lifetime);
            }
        };
        control.run_hot_exchange(own, apply).await;
    }
}

/// Returns all leased units to the store before the process ends.
pub(crate) async fn return_leases(limiter: &Arc<Limiter<Store>>) {
    let Some(leases) = limiter.store().leases() else { return };
    let mut returns = JoinSet::new();
    for task in leases.shutdown_tasks() {
        let limiter = Arc::clone(limiter);
        returns.spawn(async move {
            if let Some(leases) = limiter.store().leases() {
                leases.run_task(task, PermitId(DecisionId::generate().0)).await;
            }
        });
    }
    if tokio::time::timeout(RETURN_TIMEOUT, async { while returns.join_next().await.is_some() {} })
        .await
        .is_err()
    {
        tracing::warn!("some leases were not returned; they will expire");
    }
}

/// Returns the hot keys, for `GET /v1/hot` and the list of top callers.
pub(crate) fn hot(leases: &RedisStack, observe: &Telemetry) -> Value {
    let keys: Vec<Value> = leases
        .hot_keys(MAX_HOT)
        .iter()
        .map(|key| {
            json!({
                "counter": key.scope,
                "values": key.values.iter().map(|part| observe.mask_part(&part.as_part())).collect::<Vec<_>>(),
                "per_second": key.rate,
                "state": if key.promoted { "promoted" } else { "leased" },
                "available": key.available,
            })
        })
        .collect();
    json!({"hot": keys, "threshold_per_second": leases.config().hot})
}

/// Returns the lease stats as JSON.
pub(crate) fn stats_json(stats: &LeaseStats) -> Value {
    json!({
        "keys": stats.leases, "hot": stats.hot, "available": stats.available, "local": stats.local,
        "central": stats.central, "refused": stats.denied_refills, "failed": stats.failed,
    })
}

/// Writes the lease metrics.
pub(crate) fn metrics(stats: &LeaseStats, page: &mut MetricsWriter) {
    let gauges = [
        ("ratelimit_leases", "Number of keys with a lease on this node.", stats.leases),
        ("ratelimit_hot_keys", "Number of keys leased because they are hot.", stats.hot),
        ("ratelimit_lease_units", "Number of leased units available on this node.", stats.available),
    ];
    for (name, help, value) in gauges {
        page.gauge(name, help, value);
    }
    let counters = [
        ("lease_local", "Number of charges spent from a lease.", stats.local),
        ("lease_denials", "Number of charges denied from recent store responses.", stats.denied),
        ("lease_central", "Number of charges sent to the store.", stats.central),
        ("lease_asks", "Number of lease requests.", stats.requested),
        ("lease_granted_units", "Number of leased units granted.", stats.granted),
        ("lease_refusals", "Number of lease requests that the store denied.", stats.denied_refills),
        ("lease_failures", "Number of lease requests that failed.", stats.failed),
        ("lease_returned_units", "Number of unused units returned.", stats.returned),
        (
            "lease_unrefunded_units",
            "Number of units not refunded because leases were outstanding.",
            stats.unrefunded,
        ),
        ("hot_promotions", "Number of keys that became hot.", stats.promoted),
        ("hot_list_promotions", "Number of keys leased because the fleet's hot list has them.", stats.listed),
        ("hot_demotions", "Number of keys that are no longer hot.", stats.demoted),
    ];
    for (name, help, value) in counters {
        page.counter(&format!("ratelimit_{name}_total"), help, value);
    }
}
