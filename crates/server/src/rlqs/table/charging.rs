//! The part of a pass that charges: what the limits of the accounts that are due lack, and what becomes of it.

use super::{Bucket, CONCURRENCY, Entry, Key, MAX_SERVED, Table};
use crate::rlqs::allocation::Capacity;
use crate::rlqs::assignment::Assignment;
use crate::rlqs::counter::Counter;
use crate::rlqs::curve::{Curve, Curves, Want};
use crate::rlqs::exposed::Exposed;
use crate::rlqs::ledger::Unspent;
use crate::rlqs::pool::Pool;
use crate::rlqs::sent::Terms;
use futures_util::StreamExt;
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tollgate_core::{Cost, CounterStore, TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, ChargeAhead, Check, CounterAhead, Origin};

impl Entry {
    /// Plans the assignment that the account is to have, and returns the units that its limits lack. A lost stream keeps what it
    /// has.
    pub(super) fn plan(
        &self,
        curves: &mut Curves,
        idle: impl Fn(u64, TimeDelta) -> u64,
        now: Timestamp,
    ) -> Want {
        let old = self.account.exposed(now);
        let new = if self.is_lost { old } else { self.account.wanted(now).or(old) };
        Want { each: curves.want(&self.counters, (old.as_ref(), new.as_ref()), idle, now), other: 0 }
    }

    /// Records in its pools that so many units were spent since the last report.
    pub(super) fn settle(&self, pools: &mut HashMap<u64, Pool>, units: u64, now: Timestamp) {
        let Some(of) = self.account.exposed(now) else { return };
        for counter in &self.counters {
            if let Some(pool) = pools.get_mut(counter) {
                pool.settle(units, &of, now);
            }
        }
    }

    /// Records in its pools that all was spent that may have been, because the account does not use them anymore.
    pub(super) fn leave(&self, pools: &mut HashMap<u64, Pool>, now: Timestamp) {
        self.settle(pools, self.account.assigned_part(u64::MAX, now), now);
    }
}

impl<S: CounterStore> Table<S> {
    /// Adds the curves of these counters, unless they are there.
    pub(super) fn draw(
        &mut self,
        curves: &mut Curves,
        is_wanted: impl Fn(&Self, u64) -> bool,
        now: Timestamp,
    ) {
        let mut users: HashMap<u64, (Vec<Exposed<'_>>, TimeDelta)> = HashMap::new();
        for counter in self.counters.keys() {
            if !curves.0.contains_key(counter) && is_wanted(self, *counter) {
                users.insert(*counter, (Vec::new(), TimeDelta::ZERO));
            }
        }
        if users.is_empty() {
            return;
        }
        for entry in self.entries.values() {
            for counter in &entry.counters {
                if let Some((all, cover)) = users.get_mut(counter) {
                    all.extend(entry.account.exposed(now));
                    *cover = (*cover).max(entry.account.cover());
                }
            }
        }
        for (counter, (all, cover)) in users {
            if let Some(pool) = self.pools.get_mut(&counter) {
                curves.0.insert(counter, Curve::new(pool, &all, cover, now));
            }
        }
    }

    /// Makes curves true after charges: reads the units again, and draws those anew whose windows or accounts have changed, or
    /// whose accounts may be assigned what lasts longer.
    pub(super) fn draw_again(&mut self, curves: &mut Curves, due: &HashSet<u64>, drawn: Timestamp) {
        for counter in self.changed.drain(..) {
            curves.0.remove(&counter);
        }
        let pools = &self.pools;
        curves.0.retain(|counter, curve| pools.get(counter).is_some_and(|pool| curve.is_of(pool, drawn)));
        for entry in self.entries.values() {
            let end = drawn + entry.account.cover();
            for counter in &entry.counters {
                if curves.0.get(counter).is_some_and(|curve| !curve.reaches(end)) {
                    curves.0.remove(counter);
                }
            }
        }
        curves.0.retain(|counter, _| due.contains(counter));
        self.refill(curves, drawn);
        self.draw(curves, |_, counter| due.contains(&counter), drawn);
    }

    /// Reads the units of all pools again.
    pub(super) fn refill(&self, curves: &mut Curves, now: Timestamp) {
        for (counter, curve) in &mut curves.0 {
            if let Some(pool) = self.pools.get(counter) {
                curve.refill(pool, now);
            }
        }
    }

    pub(super) fn counters_of<'k>(&self, keys: impl IntoIterator<Item = &'k Key>) -> HashSet<u64> {
        let entries = keys.into_iter().filter_map(|key| self.entries.get(key));
        entries.flat_map(|entry| entry.counters.iter().copied()).collect()
    }

    /// Returns the units to charge for each account.
    pub(super) fn wants(&mut self, keys: &[Key], curves: &mut Curves, now: Timestamp) -> Vec<(Key, Want)> {
        let mut all = Vec::new();
        for key in keys {
            let Some(entry) = self.entries.get_mut(key) else { continue };
            entry.served = self.passes;
            entry.account.begin();
            let known = &self.counters;
            let idle = |counter: u64, time| known.get(&counter).map_or(0, |own| own.idle(time, now));
            let mut want = entry.plan(curves, idle, now);
            curves.charge(&want.each);
            want.add(entry.account.debt());
            all.push((key.clone(), want));
        }
        all
    }

    /// Returns those of the accounts that lack units and whose limits have some, with the units to charge for each. Of those
    /// whose streams are lost, only what was admitted without an assignment counts as lack.
    ///
    /// An assignment needs units of all its limits. What was admitted without one has happened, and is charged to each limit as
    /// far as that has units.
    pub(super) fn lacking<'k>(
        &mut self,
        due: impl Iterator<Item = &'k Key>,
        curves: &mut Curves,
        now: Timestamp,
    ) -> Vec<(Key, Want)> {
        let mut all = Vec::new();
        for key in due {
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
            let idle = |counter: u64, time| known.get(&counter).map_or(0, |own| own.idle(time, now));
            let remaining = |counter: u64| known.get(&counter).map_or(0, |own| own.remaining);
            let left = |curves: &Curves, counter| remaining(counter).saturating_sub(curves.pending(counter));
            // Nothing is charged for an assignment if a limit has less than the smallest one needs.
            let is_vain = !entry.is_lost && {
                let (old, least) = (entry.account.exposed(now), entry.account.least(now));
                let need = curves.want(&entry.counters, (old.as_ref(), Some(&least)), idle, now);
                curves.cancel(&entry.counters, (old.as_ref(), Some(&least)));
                need.iter().any(|(counter, units)| left(curves, *counter) < *units)
            };
            let mut want = if is_vain {
                Want { each: entry.counters.iter().map(|counter| (*counter, 0)).collect(), other: 0 }
            } else {
                entry.plan(curves, idle, now)
            };
            for (counter, units) in &mut want.each {
                *units = (*units).min(left(curves, *counter));
            }
            curves.charge(&want.each);
            want.add(entry.account.debt());
            for (counter, units) in &mut want.each {
                *units = (*units).min(remaining(*counter));
            }
            want.other = 0;
            if want.each.iter().any(|(_, units)| *units > 0) {
                all.push((key.clone(), want));
            }
        }
        all
    }

    /// Charges what accounts lack, and records what becomes of that which was admitted without an assignment.
    pub(super) async fn charge_again(&mut self, all: Vec<(Key, Want)>) {
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

    pub(super) async fn charge(&self, all: Vec<(Key, Want)>) -> Vec<(Key, Want, ChargeAhead, Timestamp)> {
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

    /// Finds the units of windows that streams have not spent and cannot spend.
    pub(super) fn find_unspent(&mut self, curves: &Curves, now: Timestamp) {
        for (counter, curve) in &curves.0 {
            let Some(((spent, outstanding), pool)) = curve.of_window().zip(self.pools.get_mut(counter))
            else {
                continue;
            };
            #[cfg(test)]
            let (spent, outstanding) = if self.returns_all { (0, 0) } else { (spent, outstanding) };
            let bucket = pool.bucket();
            let units = pool.unspent(spent, outstanding, now).into_iter();
            self.unspent.extend(units.map(|units| (Arc::clone(&bucket), units)));
        }
    }

    /// Returns to their windows what streams cannot spend anymore.
    pub(super) async fn give_back(&mut self) {
        let limiter = &*self.limiter;
        let rest = self.unspent.split_off(self.unspent.len().min(MAX_SERVED));
        let all = std::mem::replace(&mut self.unspent, rest);
        for (_, Unspent { counter, units, .. }) in &all {
            self.stats.returned += units;
            if let Some(counter) = self.counters.get_mut(counter) {
                counter.give_back(*units);
            }
        }
        let back = |(bucket, Unspent { counter, units, taken_at }): (Arc<Bucket>, Unspent)| async move {
            let attributes: SmallVec<[(&str, &str); 8]> =
                bucket.entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let check = Check::attributes(&bucket.domain, &attributes).with_protocol("rlqs");
            limiter.return_ahead(&check, &[counter], units, taken_at).await;
        };
        futures_util::stream::iter(all).map(back).buffer_unordered(CONCURRENCY).collect::<()>().await;
    }

    /// Records a decision. Returns the blanket rule that it means, if it does.
    pub(super) fn apply(
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
        let counters: SmallVec<[u64; 2]> = match rule {
            Some(_) => SmallVec::new(),
            None => charge.counters.iter().map(|counter| counter.counter).collect(),
        };
        if counters != entry.counters {
            entry.leave(&mut self.pools, taken);
            self.changed.extend(entry.counters.iter().chain(&counters));
            entry.counters = counters;
        }
        if rule.is_some() {
            entry.account.terms = None;
            return rule;
        }
        entry.is_new |= entry.account.terms.is_none();
        let terms = Some(Terms::new(&charge.counters));
        if std::mem::replace(&mut entry.account.terms, terms) != terms {
            self.changed.extend(&entry.counters);
        }
        entry.account.has_windows = charge.counters.iter().any(|counter| counter.window.is_some());
        for counter in &charge.counters {
            let new = || Pool::new(counter, Arc::clone(&key.1), taken);
            self.pools.entry(counter.counter).or_insert_with(new).learn(counter, taken);
        }
        if entry.is_new {
            for counter in &entry.counters {
                if let Some(counter) = self.counters.get_mut(counter) {
                    counter.accounts += 1;
                }
            }
        }
        if is_allowed {
            let is_stored = charge.decision.origin == Origin::Store;
            let debt = entry.account.debt();
            let (mut paid, mut most) = (debt, 0);
            for (at, counter) in charge.counters.iter().enumerate() {
                // A limit that a bucket matches twice is one.
                if charge.counters[..at].iter().any(|other| other.counter == counter.counter) {
                    continue;
                }
                // A rule whose cost comes from the request's attributes charges it for one request at a time.
                let is_per_request = counter.cost != want.of(counter.counter);
                let requests = if is_per_request { counter.cost.min(1) } else { counter.cost };
                let is_returnable = is_stored && !is_per_request && counter.escrow.is_some();
                // What was admitted without an assignment is paid first, to each limit.
                let past = requests.min(debt);
                if let Some(pool) = self.pools.get_mut(&counter.counter) {
                    let taken_at = is_returnable.then_some(charge.decision.at);
                    pool.add(requests - past, counter, taken, taken_at);
                }
                (paid, most) = (paid.min(past), most.max(requests));
            }
            entry.account.pay(paid);
            self.stats.charged += most;
        } else {
            self.stats.denied += 1;
        }
        None
    }

    pub(super) fn record(&mut self, counter: &CounterAhead, is_denied: bool, now: Timestamp) {
        let known = self.counters.entry(counter.counter).or_insert_with(|| Counter::new(now));
        known.record(counter, is_denied, now);
    }
}
