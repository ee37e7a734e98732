//! Cluster topology: which shard has which slot, refreshed in the background.
//!
//! A single Redis and a primary behind sentinels are one shard with every slot. A cluster is queried for its slots when
//! the store starts, and again whenever a reply shows that they have changed; no check waits for that longer than its
//! own deadline, and slots that stay in place need no refresh.

use super::config::Kind;
use super::shard::{Shard, ShardStatus, Shared, connect_to, split};
use redis::Value;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// The shard of each slot.
#[derive(Clone, Default)]
pub(super) struct Slots(Vec<Option<Arc<Shard>>>);

/// The shards and their slots.
pub(super) struct Topology {
    shared: Arc<Shared>,
    shards: Mutex<HashMap<String, Arc<Shard>>>,
    slots: watch::Sender<Slots>,
    stale: Notify,
}

/// Pause between two refreshes of a cluster, even while its servers are down and checks are many.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

impl Topology {
    /// Starts the pipelines; connections are opened when they are needed.
    pub(super) fn start(shared: Arc<Shared>) -> Arc<Self> {
        let topology = Arc::new(Self {
            shared,
            shards: Mutex::default(),
            slots: watch::Sender::new(Slots::default()),
            stale: Notify::new(),
        });
        let config = &topology.shared.config;
        match config.kind {
            Kind::Cluster => {
                let weak = Arc::downgrade(&topology);
                tokio::spawn(async move {
                    while let Some(topology) = weak.upgrade() {
                        topology.refresh().await;
                        tokio::time::sleep(REFRESH_PAUSE).await;
                        topology.stale.notified().await;
                    }
                });
                topology.stale.notify_one();
            }
            Kind::Single | Kind::Sentinel => {
                let (host, port) = config.hosts.first().cloned().unwrap_or_default();
                let address = if config.kind == Kind::Single {
                    format!("{host}:{port}")
                } else {
                    config.primary.clone()
                };
                let shard = topology.shard_at(&address);
                topology.slots.send_replace(Slots(vec![Some(shard)]));
            }
        }
        topology
    }

    /// Returns the shard at an address.
    pub(super) fn shard_at(&self, address: &str) -> Arc<Shard> {
        let mut nodes = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Shard::new(address.to_owned(), &self.shared));
        Arc::clone(nodes.entry(address.to_owned()).or_insert_with(new))
    }

    /// Returns the shard of a slot; waits until one is known.
    pub(super) async fn shard_for_slot(&self, slot: u16) -> Option<Arc<Shard>> {
        let known = |slots: &Slots| slots.0.get(usize::from(slot)).and_then(Clone::clone);
        if let Some(shard) = known(&self.slots.borrow()) {
            return Some(shard);
        }
        self.mark_stale();
        let mut slots = self.slots.subscribe();
        slots.wait_for(|slots| known(slots).is_some()).await.ok().and_then(|slots| known(&slots))
    }

    /// Returns the shard of a slot if its breaker is open.
    pub(super) fn open_shard(&self, slot: u16) -> Option<Arc<Shard>> {
        let slots = self.slots.borrow();
        slots.0.get(usize::from(slot))?.as_ref().filter(|shard| shard.health.is_open()).cloned()
    }

    /// Waits until this shard is known to have slots: by then it is also known whether it took them over from a failed
    /// one.
    pub(super) async fn wait_for_slots(&self, shard: &Arc<Shard>) {
        let has = |slots: &Slots| slots.0.iter().flatten().any(|one| Arc::ptr_eq(one, shard));
        if has(&self.slots.borrow()) {
            return;
        }
        let mut slots = self.slots.subscribe();
        while !has(&slots.borrow_and_update()) {
            self.mark_stale();
            if slots.changed().await.is_err() {
                return;
            }
        }
    }

    /// Requests a refresh because a slot has moved.
    pub(super) fn mark_stale(&self) {
        self.stale.notify_one();
    }

    /// Returns whether the breakers of all servers that have slots are open, or none is known.
    pub(super) fn is_down(&self) -> bool {
        self.slots.borrow().0.iter().flatten().all(|shard| shard.health.is_open())
    }

    pub(super) fn status(&self) -> Vec<ShardStatus> {
        let nodes = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        let mut status: Vec<ShardStatus> = nodes.values().map(|shard| shard.status()).collect();
        status.sort_by(|one, other| one.address.cmp(&other.address));
        status
    }

    async fn refresh(&self) {
        let known =
            |slots: &Slots| slots.0.iter().flatten().map(|shard| shard.address.clone()).collect::<Vec<_>>();
        let mut addresses = known(&self.slots.borrow());
        addresses.dedup();
        addresses.extend(self.shared.config.hosts.iter().map(|(host, port)| format!("{host}:{port}")));
        for address in addresses {
            let asked =
                tokio::time::timeout(self.shared.config.connect_timeout(), self.fetch_slots(&address)).await;
            match asked {
                Ok(Ok(ranges)) if !ranges.is_empty() => return self.update(&ranges),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(address, %error, "cannot read the cluster's slots"),
                Err(_) => tracing::debug!(address, "timed out reading the cluster's slots"),
            }
        }
        // No server returned the slots: try again after the pause.
        self.stale.notify_one();
    }

    /// Returns (first, last, address) of every slot range.
    async fn fetch_slots(&self, address: &str) -> redis::RedisResult<Vec<(usize, usize, String)>> {
        let (host, port) = split(address)?;
        let mut connection = connect_to(&self.shared.config, &host, port).await?;
        let answer: Vec<Value> = redis::cmd("CLUSTER").arg("SLOTS").query_async(&mut connection).await?;
        Ok(answer.iter().filter_map(|range| parse_range(range, &host)).collect())
    }

    fn update(&self, ranges: &[(usize, usize, String)]) {
        let before = self.slots.borrow().clone();
        // A slot that the reply omits stays with its previous shard, so that a later successor is recognized as one.
        let mut slots = before.clone();
        slots.0.resize(16_384, None);
        for (first, last, address) in ranges {
            let shard = self.shard_at(address);
            for slot in *first..=(*last).min(16_383) {
                slots.0[slot] = Some(Arc::clone(&shard));
            }
        }
        // A server that lost all its slots at once was replaced, not resharded: its successor may lack recent writes.
        let serves =
            |slots: &Slots, shard: &Arc<Shard>| slots.0.iter().flatten().any(|one| Arc::ptr_eq(one, shard));
        let mut gone: Vec<&Arc<Shard>> = before.0.iter().flatten().collect();
        gone.dedup_by(|one, other| Arc::ptr_eq(one, other));
        gone.retain(|shard| !serves(&slots, shard));
        for (was, is) in before.0.iter().zip(&slots.0) {
            match (was, is) {
                (Some(was), Some(is)) if gone.iter().any(|shard| Arc::ptr_eq(shard, was)) => {
                    is.record_failover(self.shared.now());
                }
                (Some(was), Some(is)) if !Arc::ptr_eq(was, is) => is.inherit_losses(was),
                _ => {}
            }
        }
        self.slots.send_replace(slots);
    }
}

fn parse_range(range: &Value, asked: &str) -> Option<(usize, usize, String)> {
    let Value::Array(fields) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = fields.as_slice() else {
        return None;
    };
    let [host, Value::Int(port), ..] = primary.as_slice() else { return None };
    // A server that does not report its own host is at the address that was queried.
    let host = match host {
        Value::BulkString(name) if !name.is_empty() => String::from_utf8_lossy(name).into_owned(),
        _ => asked.to_owned(),
    };
    Some((usize::try_from(*first).ok()?, usize::try_from(*last).ok()?, format!("{host}:{port}")))
}
