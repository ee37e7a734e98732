//! Names to leases: parts with a lock each, so that threads with different keys seldom meet. A lock is held for a few
//! instructions, never over an await.

use super::config::LeaseConfig;
use super::key_lease::{Asked, Lease, Named, Receipt, Said, Task};
use super::stats::LeaseFigures;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tollgate_core::{Charge, Outcome, Outcomes, OwnedKeyPart, TimeDelta, Timestamp};

const PARTS: usize = 64;
/// Names that were seen once, a part.
const SEEN: usize = 1_024;
/// How often leases are looked at for those that are idle.
const GLANCE: TimeDelta = TimeDelta::from_millis(100);

/// Names are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Plain(u64);

impl Hasher for Plain {
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
struct PartOf {
    leases: HashMap<u64, Lease, BuildHasherDefault<Plain>>,
    /// Name and instant, by the name's own place.
    seen: Vec<(u64, Timestamp)>,
    /// Charges paid for, and denied, here.
    local: u64,
    denied: u64,
}

pub(super) struct Table {
    parts: Box<[Mutex<PartOf>]>,
    /// How many leases there are, and may be.
    count: AtomicUsize,
    most: usize,
    /// When all leases were last looked at, in microseconds.
    swept: AtomicU64,
    /// What is to be done, and who waits for it.
    due: Mutex<Vec<(u64, Arc<Named>, Task)>>,
    pub(super) called: Notify,
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
    pub in_hand: u64,
}

impl Table {
    pub(super) fn new(most: usize) -> Self {
        Self {
            parts: (0..PARTS).map(|_| Mutex::default()).collect(),
            count: AtomicUsize::new(0),
            most,
            swept: AtomicU64::new(0),
            due: Mutex::default(),
            called: Notify::new(),
        }
    }

    #[inline]
    fn part(&self, name: u64) -> MutexGuard<'_, PartOf> {
        self.parts[(name >> 58) as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pays for a charge, if its key has a lease with enough in hand.
    #[inline]
    pub(super) fn take(&self, name: u64, charge: &Charge<'_>, now: Timestamp) -> Said {
        let mut part = self.part(name);
        let Some(lease) = part.leases.get_mut(&name) else { return Said::Nothing };
        if !lease.is_for(charge.limit) {
            // Its rule has changed: what is in hand is of the old numbers.
            let (named, tasks) = (Arc::clone(&lease.named), lease.empty(now));
            part.leases.remove(&name);
            self.count.fetch_sub(1, Ordering::Relaxed);
            drop(part);
            self.call(name, &named, tasks);
            return Said::Nothing;
        }
        let (said, low) = lease.take(charge.cost.units(), now);
        let asks = low.then(|| lease.starts_asking());
        part.local += u64::from(matches!(said, Said::Spent(..)));
        part.denied += u64::from(matches!(said, Said::Denied(_)));
        drop(part);
        if let Some(named) = asks {
            self.call(name, &named, [Task::Ask].into_iter().collect());
        }
        said
    }

    /// What there is at present.
    pub(super) fn figures(&self, now: Timestamp) -> LeaseFigures {
        let mut figures = LeaseFigures::default();
        for part in &self.parts {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            figures.local += part.local;
            figures.denied += part.denied;
            figures.leases += part.leases.len() as u64;
            for lease in part.leases.values() {
                figures.hot += u64::from(lease.promoted);
                figures.in_hand += lease.good(now);
            }
        }
        figures
    }

    pub(super) fn put_back(&self, name: u64, receipt: Receipt) {
        if let Some(lease) = self.part(name).leases.get_mut(&name) {
            lease.put_back(receipt);
        }
    }

    /// A refund changes what the authority would say.
    pub(super) fn refunded(&self, name: u64) {
        if let Some(lease) = self.part(name).leases.get_mut(&name) {
            lease.forget_denial();
        }
    }

    /// Whether a key was seen `within` this time; it has been now.
    pub(super) fn seen(&self, name: u64, now: Timestamp, within: TimeDelta) -> bool {
        let mut part = self.part(name);
        if part.leases.contains_key(&name) {
            return true;
        }
        if part.seen.is_empty() {
            part.seen = vec![(0, Timestamp::ZERO); SEEN];
        }
        let place = &mut part.seen[name as usize % SEEN];
        let again = place.0 == name && now.since(place.1) <= within;
        *place = (name, now);
        again
    }

    /// Learns from an answer of the store; makes a lease where one is `due`. Whether one was made.
    #[allow(clippy::too_many_arguments, reason = "all of what an answer is about")]
    pub(super) fn hear(
        &self,
        name: u64,
        charge: &Charge<'_>,
        outcome: &Outcome,
        asked: Timestamp,
        due: bool,
        config: &LeaseConfig,
        now: Timestamp,
    ) -> bool {
        let mut part = self.part(name);
        let known = part.leases.contains_key(&name);
        if !known && (!due || self.count.load(Ordering::Relaxed) >= self.most) {
            return false;
        }
        if !known {
            let Some(named) = Named::of(charge, config) else { return false };
            let promoted = charge.mode == tollgate_core::Mode::Adaptive;
            part.leases.insert(name, Lease::new(Arc::new(named), promoted, now));
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        let Some(lease) = part.leases.get_mut(&name).filter(|lease| lease.is_for(charge.limit)) else {
            return false;
        };
        lease.hear(charge.cost.units(), outcome, asked);
        if outcome.verdict.is_allowed() && lease.is_low(now) {
            let named = lease.starts_asking();
            drop(part);
            self.call(name, &named, [Task::Ask].into_iter().collect());
        }
        !known
    }

    fn call(&self, name: u64, named: &Arc<Named>, tasks: SmallVec<[Task; 2]>) {
        if tasks.is_empty() {
            return;
        }
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        due.extend(tasks.into_iter().map(|task| (name, Arc::clone(named), task)));
        drop(due);
        self.called.notify_one();
    }

    /// Takes what is to be done.
    pub(super) fn due(&self) -> Vec<(u64, Arc<Named>, Task)> {
        std::mem::take(&mut self.due.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What an ask is for, at the time that it is sent.
    pub(super) fn ask(&self, name: u64, config: &LeaseConfig, now: Timestamp) -> Option<(u64, u64, bool)> {
        self.part(name).leases.get_mut(&name)?.ask(config, now)
    }

    pub(super) fn granted(
        &self,
        name: u64,
        named: &Arc<Named>,
        ask: &Asked,
        outcomes: &Outcomes,
        ttl: TimeDelta,
        now: Timestamp,
    ) -> bool {
        let mut part = self.part(name);
        let lease = part.leases.get_mut(&name).filter(|lease| Arc::ptr_eq(&lease.named, named));
        lease.map(|lease| lease.granted(ask, outcomes, ttl, now)).is_some()
    }

    pub(super) fn unanswered(&self, name: u64, now: Timestamp) {
        if let Some(lease) = self.part(name).leases.get_mut(&name) {
            lease.unanswered(now);
        }
    }

    /// Looks at every lease; those for which `keep` is false are given back.
    pub(super) fn each(&self, mut keep: impl FnMut(u64, &mut Lease) -> bool) {
        for part in &self.parts {
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
        if !all && now.since(swept) < GLANCE {
            return 0;
        }
        self.swept.store(now.as_micros(), Ordering::Relaxed);
        let (mut demoted, mut tasks) = (0, Vec::new());
        self.each(|name, lease| {
            let cooled = lease.has_cooled(config, now);
            let idle = lease.idle_for(now) >= config.idle;
            if !(all || cooled || idle) {
                return true;
            }
            demoted += u64::from(cooled && lease.promoted);
            let named = Arc::clone(&lease.named);
            tasks.extend(lease.empty(now).into_iter().map(|task| (name, Arc::clone(&named), task)));
            // An ask under way comes back to nobody, and is then given back.
            false
        });
        self.due.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        demoted
    }

    /// Leases of at least half this rate, the highest first.
    pub(super) fn hottest(&self, most: usize, hot: u64, now: Timestamp) -> Vec<HotKey> {
        let mut keys = Vec::new();
        self.each(|_, lease| {
            let rate = lease.rate(now);
            if lease.promoted || rate >= hot {
                keys.push(HotKey {
                    scope: lease.named.scope.label().to_owned(),
                    values: lease.named.parts().iter().map(OwnedKeyPart::from).collect(),
                    rate,
                    promoted: lease.promoted,
                    in_hand: lease.good(now),
                });
            }
            true
        });
        keys.sort_by(|a, b| b.rate.cmp(&a.rate).then_with(|| a.scope.cmp(&b.scope)));
        keys.truncate(most);
        keys
    }
}
