//! All accounts of all streams, and the pass that assigns: allocate, charge, assign.
//!
//! A pass divides the limits by demand ([`super::allocation`]), charges what the accounts that are due need, and sends
//! what the charged units cover ([`super::account`]). A denied charge is tried once more for what remains. Charges go
//! through the engine like any check, with a bucket's entries as attributes, so every pass sees changed rules, quotas,
//! tiers and emergency measures.
//!
//! Accounts of a lost stream stay until their assignments expire, because the client may go on using them.

use super::account::{Account, BLANKET_TTL, Due};
use super::allocation::{Claim, allocate};
use super::assignment::Assignment;
use super::counter::Counter;
use super::curve::Curves;
use super::ledger::Unspent;
use super::places::Place;
use super::pool::Pool;
use super::sent::{PASS, SHORT_PASS};
use super::turns::{Waiting, choose};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use tollgate_core::{CounterStore, TimeDelta, Timestamp};
use tollgate_engine::Limiter;

/// Accounts that a pass serves: so many charges take a fraction of a second, also in Redis.
const MAX_SERVED: usize = 8_192;
/// Charges in flight at the same time.
const CONCURRENCY: usize = 64;
/// Time after which a blanket rule is decided again without a report.
const BLANKET_RETRY: TimeDelta = TimeDelta::from_secs(BLANKET_TTL / 2);

/// Number of a stream, never reused.
pub(super) type StreamId = u64;

/// A bucket: its domain, and its entries in the order of their keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Bucket {
    pub(super) domain: Arc<str>,
    pub(super) entries: Box<[(String, String)]>,
}

/// One report of one bucket.
#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) place: Arc<Place>,
    pub(super) allowed: u64,
    pub(super) denied: u64,
}

/// What a client is to do with a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Apply the assignment for so many seconds.
    Assign(Assignment, u64),
    /// Forget the bucket.
    Abandon,
}

struct Entry {
    account: Account,
    /// Free again when the account is gone.
    _place: Arc<Place>,
    counters: SmallVec<[u64; 2]>,
    is_lost: bool,
    /// Its limits have become known in this pass, and it has no share yet.
    is_new: bool,
    /// Number of the pass that served it last.
    served: u64,
}

type Key = (StreamId, Arc<Bucket>);

/// Figures of the table after a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TableStats {
    pub(super) buckets: u64,
    pub(super) outstanding: u64,
    pub(super) assigned: u64,
    pub(super) charged: u64,
    pub(super) returned: u64,
    pub(super) denied: u64,
}

/// All accounts.
pub(super) struct Table<S> {
    limiter: Arc<Limiter<S>>,
    entries: BTreeMap<Key, Entry>,
    counters: HashMap<u64, Counter>,
    /// Units that were charged, by counter.
    pools: HashMap<u64, Pool>,
    stats: TableStats,
    warned: bool,
    /// Counters of accounts that need a charge in every pass.
    short: HashSet<u64>,
    /// Counters whose accounts have changed in this pass.
    changed: Vec<u64>,
    passes: u64,
    /// Where the turn of streams ended in the last pass that could not serve all.
    last_stream: Option<StreamId>,
    has_more: bool,
    /// Units to be returned to their windows in the next pass. Not in this one: what it sends must not wait for it.
    unspent: Vec<(Arc<Bucket>, Unspent)>,
    /// A planted bug: units that were reported as spent can be spent again.
    #[cfg(test)]
    spends_twice: bool,
    /// A planted bug: units are returned that streams may still spend.
    #[cfg(test)]
    returns_all: bool,
}

impl<S: CounterStore> Table<S> {
    pub(super) fn new(limiter: Arc<Limiter<S>>) -> Self {
        Self {
            limiter,
            entries: BTreeMap::new(),
            counters: HashMap::new(),
            pools: HashMap::new(),
            stats: TableStats::default(),
            warned: false,
            short: HashSet::new(),
            changed: Vec::new(),
            passes: 0,
            last_stream: None,
            has_more: false,
            unspent: Vec::new(),
            #[cfg(test)]
            spends_twice: false,
            #[cfg(test)]
            returns_all: false,
        }
    }

    /// Returns whether there is nothing to do until the next report.
    pub(super) fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.unspent.is_empty()
    }

    /// Returns whether accounts wait for the next pass.
    pub(super) const fn has_more(&self) -> bool {
        self.has_more
    }

    pub(super) const fn stats(&self) -> TableStats {
        self.stats
    }

    /// Records the report of a stream; its first report of a bucket is a subscription.
    pub(super) fn report(&mut self, stream: StreamId, report: Report, now: Timestamp) {
        let Report { place, allowed, denied } = report;
        match self.entries.entry((stream, Arc::clone(&place.bucket))) {
            std::collections::btree_map::Entry::Occupied(entry) => {
                let entry = entry.into_mut();
                let own = entry.account.assigned_part(allowed, now);
                #[cfg(test)]
                let own = if self.spends_twice { 0 } else { own };
                entry.settle(&mut self.pools, own, now);
                entry.account.report((allowed, own), denied, now);
            }
            std::collections::btree_map::Entry::Vacant(entry) => {
                let (account, counters) = (Account::new(allowed, now), SmallVec::new());
                entry.insert(Entry {
                    account,
                    _place: place,
                    counters,
                    is_lost: false,
                    is_new: false,
                    served: 0,
                });
            }
        }
    }

    /// Marks the accounts of a stream that has ended.
    pub(super) fn lose(&mut self, stream: StreamId) {
        for (_, entry) in self.of_stream(stream) {
            entry.is_lost = true;
        }
    }

    fn of_stream(&mut self, stream: StreamId) -> impl Iterator<Item = (&Key, &mut Entry)> {
        let first = Bucket { domain: Arc::from(""), entries: Box::default() };
        self.entries.range_mut((stream, Arc::new(first))..).take_while(move |((own, _), _)| *own == stream)
    }

    /// Returns the longest time until the next pass.
    pub(super) fn interval(&self) -> TimeDelta {
        if self.short.is_empty() { PASS } else { SHORT_PASS }
    }

    /// Runs one pass, and returns the actions to send.
    pub(super) async fn pass(&mut self) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        self.give_back().await;
        let now = self.limiter.clock().now();
        self.passes += 1;
        self.forget(now);
        let mut actions = self.abandon(now);
        self.allocate(now);
        let mut curves = Curves::default();
        // Units of a window end with it, and those of short limits last until this pass.
        let is_checked = |table: &Self, counter| {
            table.short.contains(&counter) || table.pools.get(&counter).is_some_and(Pool::has_window)
        };
        self.draw(&mut curves, is_checked, now);
        let keys = self.in_turn(&curves, now);
        let due: HashSet<u64> = self.counters_of(&keys);
        self.draw(&mut curves, |_, counter| due.contains(&counter), now);
        // What lost streams may still admit comes first: they cannot be told to admit less.
        let is_lost = |key: &Key| self.entries.get(key).is_some_and(|entry| entry.is_lost);
        let (lost, mut due): (Vec<_>, Vec<_>) = keys.into_iter().partition(is_lost);
        // If there is not enough, it is another one's turn to get less.
        let turn = usize::try_from(self.passes).unwrap_or(0) % due.len().max(1);
        due.rotate_left(turn);
        let (of_lost, wants) = (self.wants(&lost, &mut curves, now), self.wants(&due, &mut curves, now));
        for (key, want, charge, taken) in self.charge(of_lost).await {
            if self.apply(&key, &want, &charge, taken).is_some()
                && let Some(entry) = self.entries.get_mut(&key)
            {
                entry.account.forgive();
            }
        }
        let mut blanket = HashMap::new();
        for (key, want, charge, taken) in self.charge(wants).await {
            if let Some(rule) = self.apply(&key, &want, &charge, taken) {
                blanket.insert(key, rule);
            }
        }
        // By the same clock as before, because the curves are.
        let drawn = now;
        let counters = self.counters_of(lost.iter().chain(&due));
        self.draw_again(&mut curves, &counters, drawn);
        let asked = lost.iter().chain(&due).filter(|key| !blanket.contains_key(*key));
        let again = self.lacking(asked, &mut curves, drawn);
        self.charge_again(again).await;
        let now = self.limiter.clock().now();
        self.refill(&mut curves, now);
        for key in due {
            let Some(entry) = self.entries.get_mut(&key).filter(|entry| !entry.is_lost) else { continue };
            curves.commit(&entry.counters, entry.account.exposed(drawn).as_ref(), None);
            let assigned = match blanket.get(&key) {
                Some(rule) => Some(entry.account.assign_blanket(*rule, now + BLANKET_RETRY, now)),
                None => {
                    let pools = entry.counters.iter().filter_map(|counter| self.pools.get(counter));
                    let ends = pools.filter_map(|pool| pool.window_end(now)).min();
                    entry.account.assign(|new| curves.fits(&entry.counters, new), ends, now)
                }
            };
            curves.commit(&entry.counters, None, entry.account.exposed(now).as_ref());
            if let Some((assignment, ttl)) = assigned {
                actions.push((key.0, Arc::clone(&key.1), Action::Assign(assignment, ttl)));
            }
        }
        self.find_unspent(&curves, now);
        self.stats.assigned += actions.len() as u64;
        let short = self.entries.values().filter(|entry| entry.account.is_short());
        self.short = short.flat_map(|entry| entry.counters.iter().copied()).collect();
        self.stats.buckets = self.entries.len() as u64;
        self.stats.outstanding = self.entries.values().map(|entry| entry.account.outstanding(now)).sum();
        actions
    }

    /// Removes lost accounts whose assignments have expired and whose reports have been charged, and counters that no account uses.
    fn forget(&mut self, now: Timestamp) {
        let pools = &mut self.pools;
        self.entries.retain(|_, entry| {
            let stays = !entry.is_lost || !entry.account.is_spent(now) || entry.account.has_debt();
            if !stays {
                entry.leave(pools, now);
            }
            stays
        });
        for counter in self.counters.values_mut() {
            counter.begin_pass(now);
        }
        for entry in self.entries.values() {
            for counter in &entry.counters {
                if let Some(counter) = self.counters.get_mut(counter) {
                    counter.accounts += 1;
                }
            }
        }
        self.counters.retain(|_, counter| counter.accounts > 0);
        let counters = &self.counters;
        for (_, mut pool) in self.pools.extract_if(|counter, _| !counters.contains_key(counter)) {
            let bucket = pool.bucket();
            self.unspent
                .extend(pool.give_back(u64::MAX, now).into_iter().map(|units| (bucket.clone(), units)));
        }
    }

    fn abandon(&mut self, now: Timestamp) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        let idle = |(_, entry): &(&Key, &Entry)| !entry.is_lost && entry.account.is_abandoned(now);
        let idle: Vec<Key> = self.entries.iter().filter(idle).map(|(key, _)| key.clone()).collect();
        for key in &idle {
            let Some(entry) = self.entries.remove(key) else { continue };
            entry.leave(&mut self.pools, now);
        }
        idle.into_iter().map(|(stream, bucket)| (stream, bucket, Action::Abandon)).collect()
    }

    /// Divides the limits by demand.
    fn allocate(&mut self, now: Timestamp) {
        let mut index = HashMap::new();
        let mut capacity = Vec::with_capacity(self.counters.len());
        let mut spent: HashMap<u64, u64> = HashMap::new();
        for entry in self.entries.values() {
            for counter in &entry.counters {
                let window = self.pools.get(counter).and_then(|pool| pool.window_at(now));
                let gain = window.map_or(0, |(start, _)| entry.account.gain_since(start, now));
                *spent.entry(*counter).or_default() += gain;
            }
        }
        for (key, counter) in &self.counters {
            index.insert(*key, u32::try_from(capacity.len()).unwrap_or(u32::MAX));
            let spent = spent.get(key).copied().unwrap_or(0);
            let held = self.pools.get(key).map_or(0, |pool| pool.held(spent, now));
            capacity.push(counter.assignable(held, now));
        }
        // What lost streams may still admit is charged already, or if their limits are short, in every pass.
        for entry in self.entries.values().filter(|entry| entry.is_lost && entry.account.is_short()) {
            for counter in entry.counters.iter().filter_map(|counter| index.get(counter)) {
                let capacity = &mut capacity[*counter as usize];
                capacity.most = (capacity.most - entry.account.rate(now)).max(0.0);
            }
        }
        let live = || self.entries.values().filter(|entry| !entry.is_lost && !entry.counters.is_empty());
        let claims: Vec<Claim> = live()
            .map(|entry| {
                let limits: SmallVec<[u32; 2]> =
                    entry.counters.iter().filter_map(|counter| index.get(counter).copied()).collect();
                // Until its first report a stream wants no more than the rate, whatever is left of the burst or window.
                let first = || limits.iter().map(|limit| capacity[*limit as usize].sustained);
                let want = entry.account.want();
                Claim {
                    is_active: want.is_some_and(|want| want > 0.0),
                    want: want.unwrap_or_else(|| first().fold(f64::INFINITY, f64::min)),
                    limits,
                }
            })
            .collect();
        let rates = allocate(&claims, &capacity);
        let live = self.entries.values_mut().filter(|entry| !entry.is_lost && !entry.counters.is_empty());
        for (entry, rate) in live.zip(rates) {
            entry.account.share = if rate.is_finite() { rate } else { 0.0 };
        }
    }

    /// Returns those of the accounts that are due whose turn it is.
    fn in_turn(&mut self, curves: &Curves, now: Timestamp) -> Vec<Key> {
        let (mut keys, mut waiting) = (Vec::new(), Vec::new());
        for (key, entry) in &mut self.entries {
            let is_covered = curves.are_covered(&entry.counters);
            let due = match entry.is_lost {
                true if !is_covered => Due::Now,
                true if entry.account.has_debt() => Due::InTurn,
                true => Due::No,
                false => entry.account.due(is_covered, now),
            };
            if due != Due::No {
                keys.push(key.clone());
                waiting.push(Waiting { stream: key.0, is_urgent: due == Due::Now, served: entry.served });
            }
        }
        let chosen = choose(&waiting, MAX_SERVED, &mut self.last_stream);
        self.has_more = chosen.len() < waiting.len();
        chosen.into_iter().map(|at| keys[at].clone()).collect()
    }
}

mod charging;
#[cfg(test)]
mod tests;
