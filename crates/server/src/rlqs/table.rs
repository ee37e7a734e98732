//! All accounts of all streams, and the pass that assigns: allocate, charge, assign.
//!
//! A pass divides the limits by demand ([`super::allocation`]), charges what the accounts that are due need, and sends
//! what the charged units cover ([`super::account`]). A denied charge is tried once more for what remains. Charges go
//! through the engine like any check, with a bucket's entries as attributes, so every pass sees changed rules, quotas,
//! tiers and emergency measures.
//!
//! Accounts of a lost stream stay until their assignments expire, because the client may go on using them.

use super::account::{Account, BLANKET_TTL, Due, Want};
use super::allocation::{Capacity, Claim, allocate};
use super::assignment::Assignment;
use super::counter::Counter;
use super::ledger::Unspent;
use super::places::Place;
use super::sent::{PASS, SHORT_PASS, Terms};
use super::turns::{Waiting, choose};
use futures_util::StreamExt;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use tollgate_core::{Cost, CounterStore, TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, ChargeAhead, Check, CounterAhead, Limiter, Origin};

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

/// Returns the number of slots of a counter that begin before the end of the cover and that no stream has taken: none if an
/// account takes them in this pass.
fn idle_slots(
    counters: &HashMap<u64, Counter>,
    padded: &HashSet<u64>,
    counter: u64,
    cover: TimeDelta,
    now: Timestamp,
) -> u64 {
    let own = counters.get(&counter).filter(|_| !padded.contains(&counter));
    own.map_or(0, |counter| counter.idle(cover, now))
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
    stats: TableStats,
    warned: bool,
    /// Whether any account needs a charge in every pass.
    has_short: bool,
    passes: u64,
    /// Where the turn of streams ended in the last pass that could not serve all.
    last_stream: Option<StreamId>,
    has_more: bool,
    /// Units to be returned to their windows in the next pass. Not in this one: what it sends must not wait for it.
    unspent: Vec<(Key, Unspent)>,
}

impl<S: CounterStore> Table<S> {
    pub(super) fn new(limiter: Arc<Limiter<S>>) -> Self {
        Self {
            limiter,
            entries: BTreeMap::new(),
            counters: HashMap::new(),
            stats: TableStats::default(),
            warned: false,
            has_short: false,
            passes: 0,
            last_stream: None,
            has_more: false,
            unspent: Vec::new(),
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
                entry.into_mut().account.report(allowed, denied, now);
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
    pub(super) const fn interval(&self) -> TimeDelta {
        if self.has_short { SHORT_PASS } else { PASS }
    }

    /// Runs one pass, and returns the actions to send.
    pub(super) async fn pass(&mut self) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        self.give_back().await;
        let now = self.limiter.clock().now();
        self.passes += 1;
        self.forget(now);
        let mut actions = self.abandon(now);
        self.allocate(now);
        let due = self.due(now);
        let mut blanket = HashMap::new();
        // What lost streams may still admit comes first: they cannot be told to admit less.
        let (lost, due): (Vec<_>, Vec<_>) =
            due.into_iter().partition(|(key, _)| self.entries.get(key).is_some_and(|entry| entry.is_lost));
        for (key, want, charge, taken) in self.charge(lost.clone()).await {
            if self.apply(&key, &want, &charge, taken).is_some()
                && let Some(entry) = self.entries.get_mut(&key)
            {
                entry.account.forgive();
            }
        }
        let again = self.lacking(lost.iter());
        self.charge_again(again).await;
        for (key, want, charge, taken) in self.charge(due.clone()).await {
            if let Some(rule) = self.apply(&key, &want, &charge, taken) {
                blanket.insert(key, rule);
            }
        }
        let again = self.lacking(due.iter().filter(|(key, _)| !blanket.contains_key(key)));
        self.charge_again(again).await;
        let now = self.limiter.clock().now();
        for (key, _) in due {
            let Some(entry) = self.entries.get_mut(&key).filter(|entry| !entry.is_lost) else { continue };
            let assigned = match blanket.get(&key) {
                Some(rule) => Some(entry.account.assign_blanket(*rule, now + BLANKET_RETRY, now)),
                None => entry.account.assign(now),
            };
            let unspent = entry.account.unspent(now);
            self.unspent.extend(unspent.into_iter().map(|units| (key.clone(), units)));
            if let Some((assignment, ttl)) = assigned {
                actions.push((key.0, key.1, Action::Assign(assignment, ttl)));
            }
        }
        self.stats.assigned += actions.len() as u64;
        self.has_short = self.entries.values().any(|entry| entry.account.is_short());
        self.stats.buckets = self.entries.len() as u64;
        self.stats.outstanding = self.entries.values().map(|entry| entry.account.outstanding(now)).sum();
        actions
    }

    /// Removes lost accounts whose assignments have expired and whose reports have been charged, and counters that no account uses.
    fn forget(&mut self, now: Timestamp) {
        let unspent = &mut self.unspent;
        self.entries.retain(|key, entry| {
            let stays = !entry.is_lost || !entry.account.is_spent(now) || entry.account.has_debt();
            if !stays {
                let units = entry.account.unspent(now).into_iter();
                unspent.extend(units.map(|units| (key.clone(), units)));
            }
            stays
        });
        for counter in self.counters.values_mut() {
            counter.begin_pass();
        }
        for entry in self.entries.values() {
            for counter in &entry.counters {
                if let Some(counter) = self.counters.get_mut(counter) {
                    counter.accounts += 1;
                }
            }
        }
        self.counters.retain(|_, counter| counter.accounts > 0);
    }

    fn abandon(&mut self, now: Timestamp) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        let idle = |(_, entry): &(&Key, &Entry)| !entry.is_lost && entry.account.is_abandoned(now);
        let idle: Vec<Key> = self.entries.iter().filter(idle).map(|(key, _)| key.clone()).collect();
        for key in &idle {
            let Some(mut entry) = self.entries.remove(key) else { continue };
            let units = entry.account.unspent(now).into_iter();
            self.unspent.extend(units.map(|units| (key.clone(), units)));
        }
        idle.into_iter().map(|(stream, bucket)| (stream, bucket, Action::Abandon)).collect()
    }

    /// Divides the limits by demand.
    fn allocate(&mut self, now: Timestamp) {
        let mut index = HashMap::new();
        let mut capacity = Vec::with_capacity(self.counters.len());
        let mut held: HashMap<u64, u64> = HashMap::new();
        for entry in self.entries.values().filter(|entry| !entry.is_lost) {
            for counter in &entry.counters {
                *held.entry(*counter).or_default() += entry.account.held(*counter, now);
            }
        }
        for (key, counter) in &self.counters {
            index.insert(*key, u32::try_from(capacity.len()).unwrap_or(u32::MAX));
            capacity.push(counter.assignable(held.get(key).copied().unwrap_or(0), now));
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

    /// Returns the accounts to serve in this pass, with the units to charge for each.
    ///
    /// One account of a limit takes its idle slots, and those after it in the same pass have later ones. If charges overtake
    /// each other, what some then lack is charged in the second round.
    fn due(&mut self, now: Timestamp) -> Vec<(Key, Want)> {
        let mut padded: HashSet<u64> = HashSet::new();
        let mut all = Vec::new();
        for key in self.in_turn(now) {
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            entry.served = self.passes;
            let (counters, cover) = (&self.counters, entry.account.cover());
            let idle = |counter: u64| idle_slots(counters, &padded, counter, cover, now);
            let want = match entry.is_lost {
                true => entry.account.charge_after_loss(idle, now),
                false => entry.account.charge(idle, now),
            };
            padded.extend(want.padding(idle));
            all.push((key, want));
        }
        all
    }

    /// Returns those of the accounts that are due whose turn it is.
    fn in_turn(&mut self, now: Timestamp) -> Vec<Key> {
        let (mut keys, mut waiting) = (Vec::new(), Vec::new());
        for (key, entry) in &mut self.entries {
            let due = match entry.is_lost {
                true if entry.account.is_uncovered(now) => Due::Now,
                true if entry.account.has_debt() => Due::InTurn,
                true => Due::No,
                false => entry.account.due(now),
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

    /// Returns those of the accounts that lack units and whose limits have some, with the units to charge for each. Of those
    /// whose streams are lost, only what was admitted without an assignment counts as lack.
    ///
    /// An assignment needs units of all its limits. What was admitted without one has happened, and is charged to each limit as
    /// far as that has units.
    fn lacking<'k>(&mut self, due: impl Iterator<Item = &'k (Key, Want)>) -> Vec<(Key, Want)> {
        let now = self.limiter.clock().now();
        let mut padded: HashSet<u64> = HashSet::new();
        let mut all = Vec::new();
        for (key, _) in due {
            let is_asked = |entry: &&mut Entry| !entry.is_lost || entry.account.has_debt();
            let Some(entry) = self.entries.get_mut(key).filter(is_asked) else { continue };
            let known = &self.counters;
            let counters = || entry.counters.iter().filter_map(|counter| known.get(counter));
            if entry.is_new {
                let shares = counters().map(|counter| {
                    let Capacity { most, sustained, .. } = counter.assignable(0, now);
                    sustained.min(most / f64::from(counter.accounts.max(1)))
                });
                (entry.account.share, entry.is_new) = (shares.fold(f64::INFINITY, f64::min), false);
            }
            if counters().all(|counter| counter.remaining == 0) {
                entry.account.forgive();
            }
            let cover = entry.account.cover();
            let idle = |counter: u64| idle_slots(known, &padded, counter, cover, now);
            let mut want = match entry.is_lost {
                true => entry.account.charge_after_loss(idle, now),
                false => entry.account.lack(idle, now),
            };
            let remaining = |counter: u64| known.get(&counter).map_or(0, |own| own.remaining);
            want.limit(&entry.account.least(idle, now), entry.account.debt(), remaining);
            if want.each.iter().any(|(_, units)| *units > 0) {
                padded.extend(want.padding(idle));
                all.push((key.clone(), want));
            }
        }
        all
    }

    /// Charges what accounts lack, and records what becomes of that which was admitted without an assignment.
    async fn charge_again(&mut self, all: Vec<(Key, Want)>) {
        for (key, want, charge, taken) in self.charge(all).await {
            let is_blanket = self.apply(&key, &want, &charge, taken).is_some();
            let is_per_request = charge.counters.iter().any(|one| one.cost != want.of(one.counter));
            let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.account.has_debt()) else {
                continue;
            };
            match charge.decision.is_allowed() {
                true if is_blanket || !is_per_request || entry.is_lost => entry.account.forgive(),
                true => {}
                false => entry.account.try_again(),
            }
        }
    }

    async fn charge(&self, all: Vec<(Key, Want)>) -> Vec<(Key, Want, ChargeAhead, Timestamp)> {
        let limiter = &*self.limiter;
        let charge = |(key, want): (Key, Want)| async move {
            let taken = limiter.clock().now();
            let attributes: SmallVec<[(&str, &str); 8]> =
                key.1.entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let check = Check::attributes(&key.1.domain, &attributes).with_cost(Cost::new(want.most()));
            let charge = limiter.charge_ahead(&check.with_protocol("rlqs"), &want.each).await;
            drop(attributes);
            (key, want, charge, taken)
        };
        futures_util::stream::iter(all).map(charge).buffer_unordered(CONCURRENCY).collect().await
    }

    /// Returns to their windows what streams cannot spend anymore.
    async fn give_back(&mut self) {
        let limiter = &*self.limiter;
        let rest = self.unspent.split_off(self.unspent.len().min(MAX_SERVED));
        let all = std::mem::replace(&mut self.unspent, rest);
        for (_, Unspent { counter, units, .. }) in &all {
            self.stats.returned += units;
            if let Some(counter) = self.counters.get_mut(counter) {
                counter.give_back(*units);
            }
        }
        let back = |(key, Unspent { counter, units, taken_at }): (Key, Unspent)| async move {
            let attributes: SmallVec<[(&str, &str); 8]> =
                key.1.entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let check = Check::attributes(&key.1.domain, &attributes).with_protocol("rlqs");
            limiter.return_ahead(&check, &[counter], units, taken_at).await;
        };
        futures_util::stream::iter(all).map(back).buffer_unordered(CONCURRENCY).collect::<()>().await;
    }

    /// Records a decision. Returns the blanket rule that it means, if it does.
    fn apply(
        &mut self,
        key: &Key,
        want: &Want,
        charge: &ChargeAhead,
        taken: Timestamp,
    ) -> Option<Assignment> {
        let is_allowed = charge.decision.is_allowed();
        for counter in &charge.counters {
            self.record(counter, !is_allowed && counter.remaining < want.of(counter.counter), taken);
        }
        let entry = self.entries.get_mut(key)?;
        let has_permits = charge.counters.iter().any(|counter| counter.kind == AheadKind::Permits);
        if has_permits && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(domain = %key.1.domain, "a quota bucket matches a concurrency limit and is denied; use the rate limit service for it");
        }
        let is_charged = charge
            .counters
            .iter()
            .all(|counter| counter.escrow.is_some() || counter.kind == AheadKind::Counted);
        let by_policy = !matches!(
            charge.decision.origin,
            Origin::Store | Origin::Regional | Origin::Local | Origin::Grant | Origin::Shed
        );
        let rule = match is_allowed {
            _ if has_permits => Some(Assignment::DenyAll),
            true if charge.counters.is_empty() || by_policy => Some(Assignment::AllowAll),
            // Shadow mode: nothing is denied, and what is admitted is charged when it is reported.
            true if !is_charged && charge.decision.origin != Origin::Grant => Some(Assignment::AllowAll),
            false if charge.counters.is_empty() || by_policy => Some(Assignment::DenyAll),
            _ => None,
        };
        entry.counters = match rule {
            Some(_) => SmallVec::new(),
            None => charge.counters.iter().map(|counter| counter.counter).collect(),
        };
        if rule.is_some() {
            // What is in escrow stays: the limits may apply again soon.
            entry.account.terms = None;
            return rule;
        }
        entry.is_new |= entry.account.terms.is_none();
        entry.account.terms = Some(Terms::new(&charge.counters));
        entry.account.set_limits(&charge.counters, taken);
        if entry.is_new {
            for counter in &entry.counters {
                if let Some(counter) = self.counters.get_mut(counter) {
                    counter.accounts += 1;
                }
            }
        }
        if is_allowed {
            let is_stored = charge.decision.origin == Origin::Store;
            let charged = charge.counters.iter().map(|counter| {
                // A rule whose cost comes from the request's attributes charges it for one request at a time.
                let is_per_request = counter.cost != want.of(counter.counter);
                let requests = if is_per_request { counter.cost.min(1) } else { counter.cost };
                let is_returnable = is_stored && !is_per_request && counter.escrow.is_some();
                (counter, requests, is_returnable.then_some(charge.decision.at))
            });
            self.stats.charged += entry.account.add(charged, taken);
        } else {
            self.stats.denied += 1;
        }
        None
    }

    fn record(&mut self, counter: &CounterAhead, is_denied: bool, now: Timestamp) {
        let known = self.counters.entry(counter.counter).or_insert_with(|| Counter::new(now));
        known.record(counter, is_denied, now);
    }
}

#[cfg(test)]
mod tests;
