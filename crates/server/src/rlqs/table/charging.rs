//! The part of a pass that charges: what the limits of the accounts that are due lack, and what becomes of it.

use super::{AccountId, Bucket, CONCURRENCY, Entry, MAX_SERVED, Table};
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
    /// Returns the curves of limits that every pass checks: units of a window end with it, and those of short limits last until
    /// this pass.
    pub(super) fn draw_checked(&mut self, now: Timestamp) -> Curves {
        let is_checked = |(key, counter): &(&u64, &Counter)| {
            counter.short_accounts > 0 || self.pools.get(key).is_some_and(Pool::has_window)
        };
        let checked: HashSet<u64> = self.counters.iter().filter(is_checked).map(|(key, _)| *key).collect();
        let mut curves = Curves::default();
        self.draw(&mut curves, &checked, now);
        curves
    }

    /// Adds the curves of these counters, unless they are there.
    pub(super) fn draw(&mut self, curves: &mut Curves, wanted: &HashSet<u64>, now: Timestamp) {
        for key in wanted.iter().filter(|key| !curves.0.contains_key(key)).collect::<Vec<_>>() {
            let (Some(counter), Some(pool)) = (self.counters.get(key), self.pools.get_mut(key)) else {
                continue;
            };
            let accounts = counter.accounts.iter().filter_map(|id| self.accounts.get(*id));
            let all: Vec<Exposed<'_>> = accounts.filter_map(|entry| entry.account.exposed(now)).collect();
            curves.0.insert(*key, Curve::new(pool, &all, now));
        }
    }

    /// Makes the curves of these accounts' limits ready for what they may be assigned: reads the units again.
    pub(super) fn ready(&mut self, curves: &mut Curves, ids: &[AccountId], now: Timestamp) {
        for counter in self.counters_of(ids) {
            if let (Some(curve), Some(pool)) = (curves.0.get_mut(&counter), self.pools.get_mut(&counter)) {
                curve.advance(pool, now);
            }
        }
        for entry in ids.iter().filter_map(|id| self.accounts.get(*id)) {
            let end = now + entry.account.cover();
            for counter in &entry.counters {
                if let (Some(curve), Some(pool)) = (curves.0.get_mut(counter), self.pools.get(counter)) {
                    curve.reach(pool, end);
                }
            }
        }
        for counter in self.counters_of(ids) {
            if let (Some(curve), Some(pool)) = (curves.0.get_mut(&counter), self.pools.get(&counter)) {
                curve.refill(pool, now);
            }
        }
    }

    /// Makes curves true after charges: draws those anew whose windows or accounts have changed.
    pub(super) fn draw_again(&mut self, curves: &mut Curves, ids: &[AccountId], drawn: Timestamp) {
        self.drop_changed(curves);
        let due = self.counters_of(ids);
        for counter in &due {
            let is_of = |curve: &Curve| self.pools.get(counter).is_some_and(|pool| curve.is_of(pool, drawn));
            if curves.0.get(counter).is_some_and(|curve| !is_of(curve)) {
                curves.0.remove(counter);
            }
        }
        self.draw(curves, &due, drawn);
        self.ready(curves, ids, drawn);
    }

    fn drop_changed(&mut self, curves: &mut Curves) {
        for counter in self.changed.drain(..) {
            curves.0.remove(&counter);
        }
    }

    /// Keeps the curves that the next passes can use.
    pub(super) fn keep(&mut self, mut curves: Curves) {
        self.drop_changed(&mut curves);
        let is_short = |counter: &u64| self.counters.get(counter).is_none_or(|own| own.short_accounts > 0);
        curves.0.retain(|counter, curve| !curve.is_window() && !is_short(counter));
        self.curves = curves;
    }

    /// Checks what is kept from pass to pass: curves are those of their accounts, and no account is due unseen.
    #[cfg(test)]
    pub(super) fn check_kept(&self, now: Timestamp) {
        self.accounts.check_looks(now);
        for (key, curve) in &self.curves.0 {
            let accounts = self.counters[key].accounts.iter().filter_map(|id| self.accounts.get(*id));
            let all: Vec<Exposed<'_>> = accounts.filter_map(|entry| entry.account.exposed(now)).collect();
            curve.check(&self.pools[key], &all);
        }
    }

    pub(super) fn counters_of(&self, ids: &[AccountId]) -> HashSet<u64> {
        let entries = ids.iter().filter_map(|id| self.accounts.get(*id));
        entries.flat_map(|entry| entry.counters.iter().copied()).collect()
    }

    /// Returns the units to charge for each account.
    pub(super) fn wants(
        &mut self,
        ids: &[AccountId],
        curves: &mut Curves,
        now: Timestamp,
    ) -> Vec<(AccountId, Want)> {
        let mut all = Vec::new();
        for id in ids {
            let Some(entry) = self.accounts.get_mut(*id) else { continue };
            entry.served = self.passes;
            entry.account.begin();
            let known = &self.counters;
            let idle = |counter: u64, time| known.get(&counter).map_or(0, |own| own.idle(time, now));
            let mut want = entry.plan(curves, idle, now);
            curves.charge(&want.each);
            want.add(entry.account.debt());
            all.push((*id, want));
        }
        all
    }

    /// Returns those of the accounts that lack units and whose limits have some, with the units to charge for each. Of those
    /// whose streams are lost, only what was admitted without an assignment counts as lack.
    ///
    /// An assignment needs units of all its limits. What was admitted without one has happened, and is charged to each limit as
    /// far as that has units.
    pub(super) fn lacking(
        &mut self,
        due: impl Iterator<Item = AccountId>,
        curves: &mut Curves,
        now: Timestamp,
    ) -> Vec<(AccountId, Want)> {
        let mut all = Vec::new();
        for id in due {
            let is_asked = |entry: &&mut Entry| !entry.is_lost || entry.account.has_debt();
            let Some(entry) = self.accounts.get_mut(id).filter(is_asked) else { continue };
            let known = &self.counters;
            let counters = || entry.counters.iter().filter_map(|counter| known.get(counter));
            if entry.is_new {
                let shares = counters().map(|counter| {
                    let Capacity { most, sustained, .. } = counter.assignable(0, now);
                    sustained.min(most / counter.accounts.len().max(1) as f64)
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
                all.push((id, want));
            }
        }
        all
    }

    /// Charges what accounts lack, and records what becomes of that which was admitted without an assignment.
    pub(super) async fn charge_again(&mut self, all: Vec<(AccountId, Want)>) {
        for (id, want, charge, taken) in self.charge(all).await {
            let is_blanket = self.apply(id, &want, &charge, taken).is_some();
            let is_per_request = charge.counters.iter().any(|one| one.cost != want.of(one.counter));
            let Some(entry) = self.accounts.get_mut(id).filter(|entry| entry.account.has_debt()) else {
                continue;
            };
            match charge.decision.is_allowed() {
                true if is_blanket || !is_per_request || entry.is_lost => entry.account.forgive(),
                true => {}
                false => entry.account.try_again(),
            }
        }
    }

    pub(super) async fn charge(
        &self,
        all: Vec<(AccountId, Want)>,
    ) -> Vec<(AccountId, Want, ChargeAhead, Timestamp)> {
        let limiter = &*self.limiter;
        let of = |(id, want)| self.accounts.get(id).map(|entry| (id, want, Arc::clone(&entry.bucket)));
        let all: Vec<(AccountId, Want, Arc<Bucket>)> = all.into_iter().filter_map(of).collect();
        let charge = |(id, want, bucket): (AccountId, Want, Arc<Bucket>)| async move {
            let taken = limiter.clock().now();
            let attributes: SmallVec<[(&str, &str); 8]> =
                bucket.entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let check = Check::attributes(&bucket.domain, &attributes).with_cost(Cost::new(want.most()));
            let charge = limiter.charge_ahead(&check.with_protocol("rlqs"), &want.each).await;
            drop(attributes);
            (id, want, charge, taken)
        };
        futures_util::stream::iter(all).map(charge).buffer_unordered(CONCURRENCY).collect().await
    }

    /// Finds the units of windows that streams have not spent and cannot spend, of these accounts' limits.
    pub(super) fn find_unspent(&mut self, curves: &Curves, ids: &[AccountId], now: Timestamp) {
        for counter in self.counters_of(ids) {
            let window = curves.0.get(&counter).and_then(Curve::of_window);
            let Some(((spent, outstanding), pool)) = window.zip(self.pools.get_mut(&counter)) else {
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
        id: AccountId,
        want: &Want,
        charge: &ChargeAhead,
        taken: Timestamp,
    ) -> Option<Assignment> {
        let is_allowed = charge.decision.is_allowed();
        for counter in &charge.counters {
            self.record(counter, !is_allowed && counter.remaining < want.of(counter.counter), taken);
        }
        let entry = self.accounts.get_mut(id)?;
        let has_permits = charge.counters.iter().any(|counter| counter.kind == AheadKind::Permits);
        if has_permits && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(domain = %entry.bucket.domain, "a quota bucket matches a concurrency limit and is denied; use the rate limit service for it");
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
        // A limit that a bucket matches twice is one.
        let mut counters: SmallVec<[u64; 2]> = SmallVec::new();
        let terms = rule.is_none().then(|| Terms::new(&charge.counters));
        for counter in charge.counters.iter().filter(|_| rule.is_none()) {
            if !counters.contains(&counter.counter) {
                counters.push(counter.counter);
            }
        }
        entry.is_new |= rule.is_none() && entry.account.terms.is_none();
        if counters != entry.counters || terms != entry.account.terms {
            if counters != entry.counters {
                entry.leave(&mut self.pools, taken);
            }
            self.changed.extend(entry.counters.iter().chain(&counters));
            self.part(id);
            let entry = self.accounts.get_mut(id)?;
            (entry.counters, entry.account.terms) = (counters, terms);
            self.join(id);
        }
        if rule.is_some() {
            return rule;
        }
        let entry = self.accounts.get_mut(id)?;
        entry.account.has_windows = charge.counters.iter().any(|counter| counter.window.is_some());
        for counter in &charge.counters {
            let new = || Pool::new(counter, Arc::clone(&entry.bucket), taken);
            if self.pools.entry(counter.counter).or_insert_with(new).learn(counter, taken) {
                self.changed.push(counter.counter);
            }
        }
        if is_allowed {
            let is_stored = charge.decision.origin == Origin::Store;
            let debt = entry.account.debt();
            let (mut paid, mut most) = (debt, 0);
            for (at, counter) in charge.counters.iter().enumerate() {
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
        let new = || {
            let index = self.claimed.insert(());
            Counter::new(u32::try_from(index).unwrap_or(u32::MAX), now)
        };
        let known = self.counters.entry(counter.counter).or_insert_with(new);
        known.record(counter, is_denied, now);
    }
}
