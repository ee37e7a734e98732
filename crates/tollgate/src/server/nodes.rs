//! Live nodes: how many processes share the counter store, learned through the store itself.
//!
//! Each node holds a permit of one concurrency limit in the store and renews it: its heartbeat. A node that stops gives it
//! back, one that dies loses it when it expires. What the limit has left tells how many nodes there are, so a node that
//! must decide without the store knows its share. `--nodes` overrides the number.
//!
//! The number falls only after it has been lower for as long as a permit lasts, without a failed heartbeat: after an
//! outage all permits have expired, and the first node to return must not take itself for the only one.

use crate::server::store::Store;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, Limit, LimitSpec, Permit, PermitId, Rate,
    Scope, TimeDelta, Timestamp,
};
use tollgate_engine::{DecisionId, Limiter};

/// Interval between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time after which a node without a heartbeat is no longer counted.
const LIFETIME: TimeDelta = TimeDelta::from_secs(10);
/// More nodes than ever share a store.
const MAX_NODES: u64 = 100_000;

/// The task that counts the nodes, with a store that several share.
pub(crate) struct Heartbeats(Option<(Arc<Heartbeat>, JoinHandle<()>)>);

impl Heartbeats {
    /// Starts it. With `fixed`, the number of nodes is configured; the others still count this one.
    pub(crate) fn start(limiter: &Arc<Limiter<Store>>, fixed: Option<u32>) -> Self {
        Self(Heartbeat::new(limiter, fixed).map(|heartbeat| {
            let heartbeat = Arc::new(heartbeat);
            let task = Arc::clone(&heartbeat);
            (heartbeat, tokio::spawn(async move { task.run().await }))
        }))
    }

    /// Tells the other nodes that this one ends.
    pub(crate) async fn end(self) {
        if let Some((heartbeat, task)) = self.0 {
            task.abort();
            heartbeat.release().await;
        }
    }
}

/// The permit that stands for this node.
struct Heartbeat {
    limiter: Arc<Limiter<Store>>,
    scope: Scope,
    limit: Limit,
    id: PermitId,
    is_counted: bool,
}

impl Heartbeat {
    /// Creates the heartbeat of this process; `None` if its store is not shared.
    fn new(limiter: &Arc<Limiter<Store>>, fixed: Option<u32>) -> Option<Self> {
        limiter.store().leases()?;
        let limit = LimitSpec::new(Algorithm::Concurrency, Rate::per(MAX_NODES, LIFETIME)).build().ok()?;
        Some(Self {
            limiter: Arc::clone(limiter),
            scope: Scope::new("tollgate|nodes"),
            limit,
            id: PermitId(DecisionId::generate().0),
            is_counted: fixed.is_none(),
        })
    }

    /// Beats as long as the process runs.
    async fn run(&self) {
        let mut count = NodeCount::default();
        loop {
            let seen = self.beat().await;
            let before = count.nodes;
            count.record(seen, self.limiter.clock().now());
            if count.nodes != before {
                tracing::info!(nodes = count.nodes, "nodes sharing the store");
                if self.is_counted {
                    self.limiter.set_live_nodes(count.nodes);
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Renews the permit. Returns the number of nodes, or `None` if the store failed.
    async fn beat(&self) -> Option<u32> {
        let charge = Charge::new(self.key(), &self.limit, Cost::ONE);
        let charge = Charge { permit: self.id, enforcement: Enforcement::Independent, ..charge };
        let outcomes = self.limiter.store().charge(&[charge]).await.ok()?;
        let remaining = outcomes.per_charge.first()?.remaining;
        u32::try_from(MAX_NODES.saturating_sub(remaining)).ok()
    }

    /// Gives the permit back, so that the others need not wait for it to expire.
    async fn release(&self) {
        let _ = self
            .limiter
            .store()
            .release(&[Permit { key: self.key(), limit: &self.limit, id: self.id }])
            .await;
    }

    fn key(&self) -> CounterKey<'_> {
        CounterKey { scope: &self.scope, parts: &[] }
    }
}

/// The number of nodes to divide by.
#[derive(Debug, Default)]
struct NodeCount {
    nodes: u32,
    /// Since when fewer were seen at every heartbeat, and the most of them.
    fewer: Option<(Timestamp, u32)>,
}

impl NodeCount {
    fn record(&mut self, seen: Option<u32>, now: Timestamp) {
        let Some(seen) = seen.map(|seen| seen.max(1)) else {
            self.fewer = None;
            return;
        };
        if seen >= self.nodes {
            (self.nodes, self.fewer) = (seen, None);
            return;
        }
        let (since, most) = self.fewer.map_or((now, seen), |(since, most)| (since, most.max(seen)));
        self.fewer = Some((since, most));
        if now.since(since) >= LIFETIME {
            (self.nodes, self.fewer) = (most, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn play(beats: &[(u64, Option<u32>)]) -> Vec<u32> {
        let mut count = NodeCount::default();
        let at = |secs| Timestamp::from_secs(1_000) + TimeDelta::from_secs(secs);
        let told = beats.iter().map(|(secs, seen)| {
            count.record(*seen, at(*secs));
            count.nodes
        });
        told.collect()
    }

    /// A node that joins counts at once; one that left, when it is certain.
    #[test]
    fn the_number_rises_at_once_and_falls_slowly() {
        assert_eq!(play(&[(0, Some(1)), (2, Some(3))]), [1, 3]);
        assert_eq!(
            play(&[(0, Some(3)), (2, Some(2)), (8, Some(1)), (11, Some(2)), (12, Some(1))]),
            [3, 3, 3, 3, 2]
        );
    }

    /// The first node that returns after an outage must not take the whole limit for itself.
    #[test]
    fn an_outage_does_not_make_a_node_the_only_one() {
        let beats = [(0, Some(3)), (2, None), (60, Some(1)), (62, Some(2)), (64, Some(3)), (80, Some(3))];
        assert_eq!(play(&beats), [3; 6]);
        assert_eq!(play(&[(0, Some(3)), (2, Some(1)), (9, None), (13, Some(1)), (20, Some(1))]), [3; 5]);
    }
}
