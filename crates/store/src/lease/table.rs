//! Lease table: leases by key, in shards with a lock each, so that threads with different keys rarely contend. A lock
//! is held for a few instructions, never across an await.

use super::config::LeaseConfig;
use super::hot_list::{HotCounter, HotNames};
use super::key_lease::{Lease, LeaseAction, LeaseKey, RefillRequest, SpendReceipt, SpendResult};
use super::stats::LeaseStats;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tollgate_core::{Charge, Limit, Outcome, Outcomes, OwnedKeyPart, TimeDelta, Timestamp};

const SHARDS: usize = 64;
/// Recently seen keys remembered per shard.
const RECENT_KEYS: usize = 1_024;
/// Interval between sweeps for idle leases.
const SWEEP_INTERVAL: TimeDelta = TimeDelta::from_millis(100);

/// Hasher that passes names through: they are already hashes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassthroughHasher(u64);

impl Hasher for PassthroughHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }
    fn write_u64(&mut self, name: u64) {
        self.0 = name;
    }
}

#[derive(Default)]
struct LeaseShard {
    leases: HashMap<u64, Lease, BuildHasherDefault<PassthroughHasher>>,
    /// Name and time last seen, indexed by the name.
    seen: Vec<(u64, Timestamp)>,
    /// Charges allowed, and denied, by leases of this shard.
    local: u64,
    denied: u64,
}

pub(super) struct Table {
    shards: Box<[Mutex<LeaseShard>]>,
    /// Current and maximum number of leases.
    count: AtomicUsize,
    max: usize,
    /// Time of the last sweep, in microseconds.
    swept: AtomicU64,
    /// Due tasks, and the notification for the task that waits for them.
    due: Mutex<Vec<(u64, Arc<LeaseKey>, LeaseAction)>>,
    pub(super) task_ready: Notify,
}

/// A key with high traffic at this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotKey {
    /// Scope of its counter: domain, path, algorithm, period.
    pub scope: String,
    /// Its values, unmasked: they must be masked before they are shown.
    pub values: Vec<OwnedKeyPart>,
    /// Units per second at this node.
    pub rate: u64,
    /// The key is leased because it is hot, not because its rule requires it.
    pub promoted: bool,
    /// Units available on this node.
    pub available: u64,
}

impl Table {
    pub(super) fn new(most: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            max: most,
            swept: AtomicU64::new(0),
            due: Mutex::default(),
            task_ready: Notify::new(),
        }
    }

    #[inline]
    fn shard(&self, name: u64) -> MutexGuard<'_, LeaseShard> {
        self.shards[(name >> 58) as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spends leased units on a charge, if its key has a lease with enough of them.
    #[inline]
    pub(super) fn spend(&self, name: u64, charge: &Charge<'_>, now: Timestamp) -> SpendResult {
        let mut part = self.shard(name);
        let Some(lease) = part.leases.get_mut(&name) else { return SpendResult::Empty };
        if !lease.is_for(charge.limit) {
            // The rule has changed: the leased units belong to the old limit.
            let (named, tasks) = (Arc::clone(&lease.key), lease.drain(now));
            part.leases.remove(&name);
            self.count.fetch_sub(1, Ordering::Relaxed);
            drop(part);
            self.schedule(name, &named, tasks);
            return SpendResult::Empty;
        }
        let (result, low) = lease.spend(charge.cost.units(), now);
        let asks = low.then(|| lease.start_refill());
        part.local += u64::from(matches!(result, SpendResult::Spent(..)));
        part.denied += u64::from(matches!(result, SpendResult::Denied(_)));
        drop(part);
        if let Some(named) = asks {
            self.schedule(name, &named, [LeaseAction::Refill].into_iter().collect());
        }
        result
    }

    /// Returns the current statistics.
    pub(super) fn stats(&self, now: Timestamp) -> LeaseStats {
        let mut stats = LeaseStats::default();
        for part in &self.shards {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            stats.local += part.local;
            stats.denied += part.denied;
            stats.leases += part.leases.len() as u64;
            for lease in part.leases.values() {
                stats.hot += u64::from(lease.promoted);
                stats.available += lease.available(now);
            }
        }
        stats
    }

    pub(super) fn unspend(&self, name: u64, receipt: SpendReceipt, now: Timestamp) {
        if let Some(lease) = self.shard(name).leases.get_mut(&name) {
            lease.unspend(receipt, now);
        }
    }

    /// Refunds units whose slots had not begun at `freed_at` to the lease of their counter. Returns whether there is one.
    pub(super) fn refund(
        &self,
        name: u64,
        (limit, units): (&Limit, u64),
        freed_at: Timestamp,
        now: Timestamp,
    ) -> bool {
        let mut part = self.shard(name);
        part.leases.get_mut(&name).is_some_and(|lease| lease.refund(limit, units, freed_at, now))
    }

    /// Returns the units that are left of a key's lease.
    pub(super) fn available(&self, name: u64, now: Timestamp) -> u64 {
        self.shard(name).leases.get(&name).map_or(0, |lease| lease.available(now))
    }

    /// Discards the cached denial of a key, because a refund may change the authority's verdict.
    pub(super) fn refunded(&self, name: u64) {
        if let Some(lease) = self.shard(name).leases.get_mut(&name) {
            lease.forget_denial();
        }
    }

    /// Drops the units of a key whose counter is reset.
    pub(super) fn reset(&self, name: u64) {
        if let Some(lease) = self.shard(name).leases.get_mut(&name) {
            lease.reset();
        }
    }

    /// Returns whether a key was seen `within` this time, and records that it was seen now.
    pub(super) fn was_seen(&self, name: u64, now: Timestamp, within: TimeDelta) -> bool {
        let mut part = self.shard(name);
        if part.leases.contains_key(&name) {
            return true;
        }
        if part.seen.is_empty() {
            part.seen = vec![(0, Timestamp::ZERO); RECENT_KEYS];
        }
        let place = &mut part.seen[name as usize % RECENT_KEYS];
        let again = place.0 == name && now.since(place.1) <= within;
        *place = (name, now);
        again
    }

    /// Records an outcome of the store; creates a lease if one is due, with the key that `due` returns. Returns whether one
    /// was created.
    pub(super) fn record_outcome(
        &self,
        name: u64,
        charge: &Charge<'_>,
        outcome: &Outcome,
        asked: Timestamp,
        due: Option<impl FnOnce() -> Option<LeaseKey>>,
        now: Timestamp,
    ) -> bool {
        let mut part = self.shard(name);
        let known = part.leases.contains_key(&name);
        if !known {
            let Some(due) = due.filter(|_| self.count.load(Ordering::Relaxed) < self.max) else {
                return false;
            };
            let Some(named) = due() else { return false };
            let promoted = charge.mode == tollgate_core::Mode::Adaptive;
            part.leases.insert(name, Lease::new(Arc::new(named), promoted, now));
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        let Some(lease) = part.leases.get_mut(&name).filter(|lease| lease.is_for(charge.limit)) else {
            return false;
        };
        lease.record_outcome(charge.cost.units(), outcome, asked, now);
        if outcome.verdict.is_allowed() && lease.is_low(now) {
            let named = lease.start_refill();
            drop(part);
            self.schedule(name, &named, [LeaseAction::Refill].into_iter().collect());
        }
        !known
    }

    fn schedule(&self, name: u64, named: &Arc<LeaseKey>, tasks: SmallVec<[LeaseAction; 2]>) {
        if tasks.is_empty() {
            return;
        }
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        due.extend(tasks.into_iter().map(|task| (name, Arc::clone(named), task)));
        drop(due);
        self.task_ready.notify_one();
    }

    /// Removes and returns the due tasks.
    pub(super) fn take_due(&self) -> Vec<(u64, Arc<LeaseKey>, LeaseAction)> {
        std::mem::take(&mut self.due.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns what a refill requests, computed when it is sent.
    pub(super) fn next_refill(
        &self,
        name: u64,
        config: &LeaseConfig,
        now: Timestamp,
    ) -> Option<(u64, u64, bool)> {
        self.shard(name).leases.get_mut(&name)?.next_refill(config, now)
    }

    pub(super) fn refilled(
        &self,
        name: u64,
        named: &Arc<LeaseKey>,
        ask: &RefillRequest,
        outcomes: &Outcomes,
        ttl: TimeDelta,
        now: Timestamp,
    ) -> bool {
        let mut part = self.shard(name);
        let lease = part.leases.get_mut(&name).filter(|lease| Arc::ptr_eq(&lease.key, named));
        lease.map(|lease| lease.refilled(ask, outcomes, ttl, now)).is_some()
    }

    pub(super) fn refill_failed(&self, name: u64, now: Timestamp) {
        if let Some(lease) = self.shard(name).leases.get_mut(&name) {
            lease.refill_failed(now);
        }
    }

    /// Visits every lease and removes those for which `keep` returns false.
    pub(super) fn retain(&self, mut keep: impl FnMut(u64, &mut Lease) -> bool) {
        for part in &self.shards {
            let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
            let before = part.leases.len();
            part.leases.retain(|name, lease| keep(*name, lease));
            self.count.fetch_sub(before - part.leases.len(), Ordering::Relaxed);
        }
    }

    /// Returns idle leases and forgets empty ones; `all` returns every lease.
    pub(super) fn sweep(
        &self,
        config: &LeaseConfig,
        hot_names: Option<&HotNames>,
        now: Timestamp,
        all: bool,
    ) -> u64 {
        // There may be many leases and frequent tasks, so sweeps are rate-limited.
        let swept = Timestamp::from_micros(self.swept.load(Ordering::Relaxed));
        if !all && now.since(swept) < SWEEP_INTERVAL {
            return 0;
        }
        self.swept.store(now.as_micros(), Ordering::Relaxed);
        let (mut demoted, mut tasks) = (0, Vec::new());
        self.retain(|name, lease| {
            // A key that is hot elsewhere stays leased at any rate, as long as it is used.
            let is_listed = hot_names.is_some_and(|names| lease.key.is_named_in(names));
            let cooled = !is_listed && lease.has_cooled(config, now);
            let idle = lease.idle_for(now) >= config.idle;
            if !(all || cooled || idle) {
                return true;
            }
            demoted += u64::from(cooled && lease.promoted);
            let named = Arc::clone(&lease.key);
            tasks.extend(lease.drain(now).into_iter().map(|task| (name, Arc::clone(&named), task)));
            // A refill in flight will find no lease, and its units are then returned.
            false
        });
        self.due.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        demoted
    }

    /// Returns the promoted leases whose own traffic has not fallen below half of the rate at which a key is hot, highest
    /// first.
    pub(super) fn hot_counters(&self, max: usize, hot: u64, now: Timestamp) -> Vec<HotCounter> {
        let mut counters = Vec::new();
        self.retain(|_, lease| {
            if let (true, Some(name)) = (lease.promoted, lease.key.fleet_name) {
                let rate = lease.rate(now);
                counters.extend((rate >= hot / 2).then_some(HotCounter { name, rate }));
            }
            true
        });
        counters.sort_unstable_by_key(|counter| (std::cmp::Reverse(counter.rate), counter.name));
        counters.truncate(max);
        counters
    }

    /// Returns promoted leases and leases of at least this rate, highest first.
    pub(super) fn hottest(&self, most: usize, hot: u64, now: Timestamp) -> Vec<HotKey> {
        let mut keys = Vec::new();
        self.retain(|_, lease| {
            let rate = lease.rate(now);
            if lease.promoted || rate >= hot {
                keys.push(HotKey {
                    scope: lease.key.scope.label().to_owned(),
                    values: lease.key.parts().iter().map(OwnedKeyPart::from).collect(),
                    rate,
                    promoted: lease.promoted,
                    available: lease.available(now),
                });
            }
            true
        });
        keys.sort_by(|a, b| b.rate.cmp(&a.rate).then_with(|| a.scope.cmp(&b.scope)));
        keys.truncate(most);
        keys
    }
}
