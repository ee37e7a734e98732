//! Names to leases: parts with a lock each, so that threads with different keys seldom meet. A lock is held for a few
//! instructions, never over an await.

use super::config::LeaseConfig;
use super::key_lease::{Lease, LeaseAction, LeaseKey, RefillRequest, SpendReceipt, SpendResult};
use super::stats::LeaseStats;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tollgate_core::{Charge, Outcome, Outcomes, OwnedKeyPart, TimeDelta, Timestamp};

const SHARDS: usize = 64;
/// Names that were seen once, a part.
const RECENT_KEYS: usize = 1_024;
/// How often leases are looked at for those that are idle.
const SWEEP_INTERVAL: TimeDelta = TimeDelta::from_millis(100);

/// Names are hashes already.
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
    /// Name and instant, by the name's own place.
    seen: Vec<(u64, Timestamp)>,
    /// Charges paid for, and denied, here.
    local: u64,
    denied: u64,
}

pub(super) struct Table {
    shards: Box<[Mutex<LeaseShard>]>,
    /// How many leases there are, and may be.
    count: AtomicUsize,
    max: usize,
    /// When all leases were last looked at, in microseconds.
    swept: AtomicU64,
    /// What is to be done, and who waits for it.
    due: Mutex<Vec<(u64, Arc<LeaseKey>, LeaseAction)>>,
    pub(super) task_ready: Notify,
}

/// A key with much traffic at this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotKey {
    /// The scope of its counter: domain, path, algorithm, period.
    pub scope: String,
    /// Its values as they came: whoever tells of them hides what is not to be told.
    pub values: Vec<OwnedKeyPart>,
    /// Units a second at this node.
    pub rate: u64,
    /// Leased because it is hot, not because its rule says so.
    pub promoted: bool,
    /// Units in hand.
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

    /// Pays for a charge, if its key has a lease with enough in hand.
    #[inline]
    pub(super) fn spend(&self, name: u64, charge: &Charge<'_>, now: Timestamp) -> SpendResult {
        let mut part = self.shard(name);
        let Some(lease) = part.leases.get_mut(&name) else { return SpendResult::Empty };
        if !lease.is_for(charge.limit) {
            // Its rule has changed: what is in hand is of the old numbers.
            let (named, tasks) = (Arc::clone(&lease.key), lease.drain(now));
            part.leases.remove(&name);
            self.count.fetch_sub(1, Ordering::Relaxed);
            drop(part);
            self.schedule(name, &named, tasks);
            return SpendResult::Empty;
        }
        let (said, low) = lease.spend(charge.cost.units(), now);
        let asks = low.then(|| lease.start_refill());
        part.local += u64::from(matches!(said, SpendResult::Spent(..)));
        part.denied += u64::from(matches!(said, SpendResult::Denied(_)));
        drop(part);
        if let Some(named) = asks {
            self.schedule(name, &named, [LeaseAction::Refill].into_iter().collect());
        }
        said
    }

    /// What there is at present.
    pub(super) fn stats(&self, now: Timestamp) -> LeaseStats {
        let mut figures = LeaseStats::default();
        for part in &self.shards {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            figures.local += part.local;
            figures.denied += part.denied;
            figures.leases += part.leases.len() as u64;
            for lease in part.leases.values() {
                figures.hot += u64::from(lease.promoted);
                figures.available += lease.available(now);
            }
        }
        figures
    }

    pub(super) fn unspend(&self, name: u64, receipt: SpendReceipt) {
        if let Some(lease) = self.shard(name).leases.get_mut(&name) {
            lease.unspend(receipt);
        }
    }

    /// A refund changes what the authority would say.
    pub(super) fn refunded(&self, name: u64) {
        if let Some(lease) = self.shard(name).leases.get_mut(&name) {
            lease.forget_denial();
        }
    }

    /// Whether a key was seen `within` this time; it has been now.
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

    /// Learns from an answer of the store; makes a lease where one is `due`. Whether one was made.
    #[allow(clippy::too_many_arguments, reason = "all of what an answer is about")]
    pub(super) fn record_outcome(
        &self,
        name: u64,
        charge: &Charge<'_>,
        outcome: &Outcome,
        asked: Timestamp,
        due: bool,
        config: &LeaseConfig,
        now: Timestamp,
    ) -> bool {
        let mut part = self.shard(name);
        let known = part.leases.contains_key(&name);
        if !known && (!due || self.count.load(Ordering::Relaxed) >= self.max) {
            return false;
        }
        if !known {
            let Some(named) = LeaseKey::from_charge(charge, config) else { return false };
            let promoted = charge.mode == tollgate_core::Mode::Adaptive;
            part.leases.insert(name, Lease::new(Arc::new(named), promoted, now));
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        let Some(lease) = part.leases.get_mut(&name).filter(|lease| lease.is_for(charge.limit)) else {
            return false;
        };
        lease.record_outcome(charge.cost.units(), outcome, asked);
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

    /// Takes what is to be done.
    pub(super) fn take_due(&self) -> Vec<(u64, Arc<LeaseKey>, LeaseAction)> {
        std::mem::take(&mut self.due.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What an ask is for, at the time that it is sent.
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

    /// Looks at every lease; those for which `keep` is false are given back.
    pub(super) fn retain(&self, mut keep: impl FnMut(u64, &mut Lease) -> bool) {
        for part in &self.shards {
            let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
            let before = part.leases.len();
            part.leases.retain(|name, lease| keep(*name, lease));
            self.count.fetch_sub(before - part.leases.len(), Ordering::Relaxed);
        }
    }

    /// Gives back what is idle, and forgets what has nothing; asks again for what has waited. `all` gives back everything.
    pub(super) fn sweep(&self, config: &LeaseConfig, now: Timestamp, all: bool) -> u64 {
        // There may be many leases, and something to do for one of them at any moment.
        let swept = Timestamp::from_micros(self.swept.load(Ordering::Relaxed));
        if !all && now.since(swept) < SWEEP_INTERVAL {
            return 0;
        }
        self.swept.store(now.as_micros(), Ordering::Relaxed);
        let (mut demoted, mut tasks) = (0, Vec::new());
        self.retain(|name, lease| {
            let cooled = lease.has_cooled(config, now);
            let idle = lease.idle_for(now) >= config.idle;
            if !(all || cooled || idle) {
                return true;
            }
            demoted += u64::from(cooled && lease.promoted);
            let named = Arc::clone(&lease.key);
            tasks.extend(lease.drain(now).into_iter().map(|task| (name, Arc::clone(&named), task)));
            // An ask under way comes back to nobody, and is then given back.
            false
        });
        self.due.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        demoted
    }

    /// Leases of at least half this rate, the highest first.
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
