//! All accounts of all streams, and the pass that assigns: allocate, charge, assign.
//!
//! A pass looks at the accounts that have reported or whose time has come (`accounts`), divides the limits by demand
//! ([`super::allocation`]), charges what the accounts that are due need, and sends what the charged units cover
//! ([`super::account`]). A denied charge is tried once more for what remains. Charges go through the engine like any check, with a
//! bucket's entries as attributes, so every pass sees changed rules, quotas, tiers and emergency measures.
//!
//! Accounts of a lost stream stay until their assignments expire, because the client may go on using them.

use super::account::{Account, BLANKET_TTL, Due};
use super::allocation::{Capacity, Claim, allocate};
use super::assignment::Assignment;
use super::counter::Counter;
use super::curve::Curves;
use super::ledger::Unspent;
use super::places::Place;
use super::pool::Pool;
use super::sent::{PASS, SHORT_PASS};
use super::turns::{Waiting, choose};
use accounts::{Accounts, Entry};
use slab::Slab;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{CounterStore, TimeDelta, Timestamp};
use tollgate_engine::Limiter;

pub(super) use accounts::AccountId;

/// Accounts that a pass serves: so many charges take a fraction of a second, also in Redis.
const MAX_SERVED: usize = 8_192;
/// Charges in flight at the same time.
const CONCURRENCY: usize = 64;
/// Time after which the units that are out are counted again.
const COUNTED: TimeDelta = TimeDelta::from_secs(1);
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
    accounts: Accounts,
    counters: HashMap<u64, Counter>,
    /// Units that were charged, by counter.
    pools: HashMap<u64, Pool>,
    /// Curves that are kept: of limits for which they do not depend on the time of the pass.
    curves: Curves,
    /// What accounts claim, by their numbers.
    claims: Vec<Claim>,
    /// Numbers by which claims name counters.
    claimed: Slab<()>,
    stats: TableStats,
    warned: bool,
    /// Counters whose accounts have changed in this pass.
    changed: Vec<u64>,
    passes: u64,
    /// Where the turn of streams ended in the last pass that could not serve all.
    last_stream: Option<StreamId>,
    has_more: bool,
    /// When the units that are out were counted.
    counted: Timestamp,
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
            accounts: Accounts::default(),
            counters: HashMap::new(),
            pools: HashMap::new(),
            curves: Curves::default(),
            claims: Vec::new(),
            claimed: Slab::new(),
            stats: TableStats::default(),
            warned: false,
            changed: Vec::new(),
            passes: 0,
            last_stream: None,
            has_more: false,
            counted: Timestamp::from_micros(0),
            unspent: Vec::new(),
            #[cfg(test)]
            spends_twice: false,
            #[cfg(test)]
            returns_all: false,
        }
    }

    /// Returns whether there is nothing to do until the next report.
    pub(super) fn is_idle(&self) -> bool {
        self.accounts.is_empty() && self.unspent.is_empty()
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
        let Some(id) = self.accounts.find(stream, &place.bucket) else {
            self.accounts.insert(stream, place, Account::new(allowed, now));
            return;
        };
        let Some(entry) = self.accounts.get_mut(id) else { return };
        let own = entry.account.assigned_part(allowed, now);
        #[cfg(test)]
        let own = if self.spends_twice { 0 } else { own };
        entry.settle(&mut self.pools, own, now);
        self.curves.drop_outdated(&entry.counters, now);
        self.curves.commit(&entry.counters, entry.account.exposed(now).as_ref(), None);
        entry.account.report((allowed, own), denied, now);
        self.curves.commit(&entry.counters, None, entry.account.exposed(now).as_ref());
        self.claim(id);
        self.accounts.look_next(id);
    }

    /// Marks the accounts of a stream that has ended.
    pub(super) fn lose(&mut self, stream: StreamId) {
        for id in self.accounts.of_stream(stream) {
            if let Some(entry) = self.accounts.get_mut(id) {
                entry.is_lost = true;
            }
            self.claim(id);
            self.accounts.look_next(id);
        }
    }

    /// Returns the longest time until the next pass.
    pub(super) fn interval(&self) -> TimeDelta {
        let is_short = self.counters.values().any(|counter| counter.short_accounts > 0);
        if is_short { SHORT_PASS } else { PASS }
    }

    /// Runs one pass, and returns the actions to send.
    pub(super) async fn pass(&mut self) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        self.give_back().await;
        let now = self.limiter.clock().now();
        self.passes += 1;
        let mut looked = self.accounts.take(now);
        let mut actions = self.remove_ended(&looked, now);
        self.begin_counters(now);
        let shares = self.allocate(now);
        let mut curves = self.draw_checked(now);
        self.add_uncovered(&mut looked, &curves);
        let ids = self.in_turn(&looked, &shares, &curves, now);
        curves.0.extend(self.curves.0.drain().filter(|(_, curve)| curve.reaches(now)));
        let due = self.counters_of(&ids);
        self.draw(&mut curves, &due, now);
        self.ready(&mut curves, &ids, now);
        // What lost streams may still admit comes first: they cannot be told to admit less.
        let is_lost = |id: &AccountId| self.accounts.get(*id).is_some_and(|entry| entry.is_lost);
        let (lost, mut due): (Vec<_>, Vec<_>) = ids.into_iter().partition(is_lost);
        // If there is not enough, it is another one's turn to get less.
        let turn = usize::try_from(self.passes).unwrap_or(0) % due.len().max(1);
        due.rotate_left(turn);
        let (of_lost, wants) = (self.wants(&lost, &mut curves, now), self.wants(&due, &mut curves, now));
        for (id, want, charge, taken) in self.charge(of_lost).await {
            if self.apply(id, &want, &charge, taken).is_some()
                && let Some(entry) = self.accounts.get_mut(id)
            {
                entry.account.forgive();
            }
        }
        let mut blanket = HashMap::new();
        for (id, want, charge, taken) in self.charge(wants).await {
            if let Some(rule) = self.apply(id, &want, &charge, taken) {
                blanket.insert(id, rule);
            }
        }
        // By the same clock as before, because the curves are.
        let drawn = now;
        let asked: Vec<AccountId> = lost.iter().chain(&due).copied().collect();
        self.draw_again(&mut curves, &asked, drawn);
        let unlimited = |id: &AccountId| blanket.contains_key(id);
        let again = self.lacking(asked.iter().copied().filter(|id| !unlimited(id)), &mut curves, drawn);
        self.charge_again(again).await;
        if !self.changed.is_empty() {
            self.draw_again(&mut curves, &asked, drawn);
        }
        let now = self.limiter.clock().now();
        self.ready(&mut curves, &due, now);
        for id in due {
            let Some(entry) = self.accounts.get_mut(id).filter(|entry| !entry.is_lost) else { continue };
            curves.commit(&entry.counters, entry.account.exposed(drawn).as_ref(), None);
            let assigned = match blanket.get(&id) {
                Some(rule) => Some(entry.account.assign_blanket(*rule, now + BLANKET_RETRY, now)),
                None => {
                    let pools = entry.counters.iter().filter_map(|counter| self.pools.get(counter));
                    let ends = pools.filter_map(|pool| pool.window_end(now)).min();
                    entry.account.assign(|new| curves.fits(&entry.counters, new), ends, now)
                }
            };
            curves.commit(&entry.counters, None, entry.account.exposed(now).as_ref());
            if let Some((assignment, ttl)) = assigned {
                actions.push((entry.stream, Arc::clone(&entry.bucket), Action::Assign(assignment, ttl)));
            }
        }
        self.find_unspent(&curves, &asked, now);
        self.keep(curves);
        self.accounts.look_later(&looked);
        self.count(actions.len(), now);
        actions
    }

    fn count(&mut self, assigned: usize, now: Timestamp) {
        self.stats.assigned += assigned as u64;
        self.stats.buckets = self.accounts.len() as u64;
        if self.accounts.is_empty() {
            // Gives the memory back.
            (self.accounts, self.claims) = (Accounts::default(), Vec::new());
        }
        // Of all accounts, so not in every pass.
        if now.since(self.counted) >= COUNTED || self.accounts.is_empty() {
            self.stats.outstanding = self.accounts.values().map(|entry| entry.account.outstanding(now)).sum();
            self.counted = now;
        }
    }

    /// Removes lost accounts whose assignments have expired and whose reports have been charged, and idle ones, for which it
    /// returns that their clients are to forget them.
    fn remove_ended(&mut self, looked: &[AccountId], now: Timestamp) -> Vec<(StreamId, Arc<Bucket>, Action)> {
        let mut actions = Vec::new();
        for id in looked {
            let Some(Entry { account, is_lost, .. }) = self.accounts.get(*id) else { continue };
            let has_ended = match is_lost {
                true => account.is_spent(now) && !account.has_debt(),
                false => account.is_abandoned(now),
            };
            if !has_ended {
                continue;
            }
            self.part(*id);
            let Some(entry) = self.accounts.remove(*id) else { continue };
            entry.leave(&mut self.pools, now);
            self.curves.commit(&entry.counters, entry.account.exposed(now).as_ref(), None);
            if !entry.is_lost {
                actions.push((entry.stream, entry.bucket, Action::Abandon));
            }
        }
        actions
    }

    /// Removes counters that no account uses, and begins a pass for the others.
    fn begin_counters(&mut self, now: Timestamp) {
        let claimed = &mut self.claimed;
        self.counters.retain(|_, counter| {
            counter.begin_pass(now);
            let is_used = !counter.accounts.is_empty();
            if !is_used {
                claimed.try_remove(counter.index as usize);
            }
            is_used
        });
        let counters = &self.counters;
        for (counter, mut pool) in self.pools.extract_if(|counter, _| !counters.contains_key(counter)) {
            self.curves.0.remove(&counter);
            let bucket = pool.bucket();
            self.unspent
                .extend(pool.give_back(u64::MAX, now).into_iter().map(|units| (bucket.clone(), units)));
        }
    }

    /// Makes an account one of those that use its limits.
    fn join(&mut self, id: AccountId) {
        let Some(entry) = self.accounts.get(id) else { return };
        for counter in &entry.counters {
            if let Some(counter) = self.counters.get_mut(counter)
                && counter.accounts.insert(id)
            {
                counter.short_accounts += usize::from(entry.account.is_short());
            }
        }
        self.claim(id);
    }

    /// Takes an account from those that use its limits, before its limits or terms change.
    fn part(&mut self, id: AccountId) {
        let Some(entry) = self.accounts.get(id) else { return };
        for counter in &entry.counters {
            if let Some(counter) = self.counters.get_mut(counter)
                && counter.accounts.remove(&id)
            {
                counter.short_accounts -= usize::from(entry.account.is_short());
            }
        }
        if let Some(claim) = self.claims.get_mut(id as usize) {
            *claim = Claim::default();
        }
    }

    /// Records what an account claims.
    fn claim(&mut self, id: AccountId) {
        let Some(entry) = self.accounts.get(id) else { return };
        let index = |counter| self.counters.get(counter).map(|counter| counter.index);
        let claim = match entry.is_lost {
            true => Claim::default(),
            false => Claim {
                want: entry.account.want(),
                limits: entry.counters.iter().filter_map(index).collect(),
            },
        };
        let at = id as usize;
        if self.claims.len() <= at {
            self.claims.resize_with(at + 1, Claim::default);
        }
        self.claims[at] = claim;
    }

    /// Divides the limits by demand, and returns the share of each account.
    fn allocate(&mut self, now: Timestamp) -> Vec<f64> {
        let none = Capacity { most: 0.0, sustained: 0.0, unclaimed: 0.0 };
        let mut capacity = vec![none; self.claimed.iter().map(|(index, _)| index + 1).max().unwrap_or(0)];
        for (key, counter) in &self.counters {
            let entries = || counter.accounts.iter().filter_map(|id| self.accounts.get(*id));
            let pool = self.pools.get(key);
            let window = pool.and_then(|pool| pool.window_at(now));
            let spent = window.map_or(0, |(start, _)| {
                entries().map(|entry| entry.account.gain_since(start, now)).fold(0, u64::saturating_add)
            });
            let held = pool.map_or(0, |pool| pool.held(spent, now));
            let mut own = counter.assignable(held, now);
            // What lost streams may still admit is charged already, or if their limits are short, in every pass.
            if counter.short_accounts > 0 {
                let lost = entries().filter(|entry| entry.is_lost && entry.account.is_short());
                own.most = (own.most - lost.map(|entry| entry.account.rate(now)).sum::<f64>()).max(0.0);
            }
            capacity[counter.index as usize] = own;
        }
        allocate(&self.claims, &capacity)
    }

    /// Adds all accounts of limits whose units do not suffice.
    fn add_uncovered(&self, looked: &mut Vec<AccountId>, curves: &Curves) {
        let uncovered = curves.0.iter().filter(|(_, curve)| !curve.is_covered());
        let counters = uncovered.filter_map(|(counter, _)| self.counters.get(counter));
        let before = looked.len();
        looked.extend(counters.flat_map(|counter| &counter.accounts));
        if looked.len() > before {
            looked.sort_unstable();
            looked.dedup();
        }
    }

    /// Returns those of the accounts that are due whose turn it is.
    fn in_turn(
        &mut self,
        looked: &[AccountId],
        shares: &[f64],
        curves: &Curves,
        now: Timestamp,
    ) -> Vec<AccountId> {
        let mut waiting = Vec::new();
        for id in looked {
            let Some(entry) = self.accounts.get_mut(*id) else { continue };
            let is_covered = curves.are_covered(&entry.counters);
            if !entry.is_lost && !entry.counters.is_empty() {
                let share = shares.get(*id as usize).copied();
                entry.account.share = share.filter(|share| share.is_finite()).unwrap_or(0.0);
            }
            let due = match entry.is_lost {
                true if !is_covered => Due::Now,
                true if entry.account.has_debt() => Due::InTurn,
                true => Due::No,
                false => entry.account.due(is_covered, now),
            };
            if due != Due::No {
                let (stream, served) = (entry.stream, entry.served);
                waiting.push((*id, Waiting { stream, is_urgent: due == Due::Now, served }));
            }
        }
        waiting.sort_unstable_by_key(|(id, waiting)| (waiting.stream, *id));
        let (ids, waiting): (Vec<AccountId>, Vec<Waiting>) = waiting.into_iter().unzip();
        let chosen = choose(&waiting, MAX_SERVED, &mut self.last_stream);
        self.has_more = chosen.len() < waiting.len();
        chosen.into_iter().map(|at| ids[at]).collect()
    }
}

mod accounts;
mod charging;
#[cfg(test)]
mod tests;
