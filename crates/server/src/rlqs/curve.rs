//! What the streams of a limit may admit, beside the units that there are for it: at each instant that matters. Pure.
//!
//! The curve of a limit with slots is kept from pass to pass, and changes with each account: what an account may admit since a cell of time
//! depends on the account alone. Those of windows, and of limits that are covered until the next pass only, depend on the time
//! of the pass, and are drawn anew in each.

use super::exposed::Exposed;
use super::pool::Pool;
use smallvec::SmallVec;
use std::collections::HashMap;
use tollgate_core::{TimeDelta, Timestamp};

/// Units to charge for an account.
#[derive(Clone, Debug, Default)]
pub(super) struct Want {
    /// By counter.
    pub(super) each: SmallVec<[(u64, u64); 2]>,
    /// Of limits that are not known yet.
    pub(super) other: u64,
}

impl Want {
    /// Returns the units of a counter.
    pub(super) fn of(&self, counter: u64) -> u64 {
        self.each.iter().find(|(own, _)| *own == counter).map_or(self.most(), |(_, units)| *units)
    }

    /// Adds units to each.
    pub(super) fn add(&mut self, units: u64) {
        self.each.iter_mut().for_each(|(_, own)| *own = own.saturating_add(units));
        self.other = self.other.saturating_add(units);
    }

    /// Returns the most units of any counter.
    pub(super) fn most(&self) -> u64 {
        self.each.iter().map(|(_, units)| *units).fold(self.other, u64::max)
    }
}

/// One instant.
#[derive(Clone, Copy, Debug)]
struct Row {
    since: Timestamp,
    /// Units that were admitted and reported since.
    reported: u64,
    /// The most that streams may have admitted and may admit since, beside these.
    demand: u64,
    /// The same with what is planned in this pass.
    planned: u64,
    supply: u64,
    /// Number of accounts with an assignment whose last report was at this instant or later, and before the next one.
    settled: u32,
}

impl Row {
    const fn missing(&self) -> u64 {
        self.reported.saturating_add(self.planned).saturating_sub(self.supply)
    }

    const fn room(&self) -> u64 {
        self.supply.saturating_sub(self.reported)
    }
}

/// One limit.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    rows: Vec<Row>,
    /// Until when what is admitted counts; `None` if that has no end.
    horizon: Option<Timestamp>,
    /// Units that are being charged.
    pending: u64,
    /// Number of accounts whose last report was before the first row.
    silent: u32,
}

impl Curve {
    /// Returns the curve of the accounts that use this pool.
    pub(super) fn new(pool: &mut Pool, all: &[Exposed<'_>], now: Timestamp) -> Self {
        let row =
            |(since, reported, supply)| Row { since, reported, demand: 0, planned: 0, supply, settled: 0 };
        let (rows, horizon): (Vec<_>, _) = match pool.window_at(now) {
            Some((start, horizon)) => {
                pool.forget(now);
                (vec![row((start, 0, pool.kept(now))), row((now, 0, pool.valid(now)))], Some(horizon))
            }
            None => {
                pool.catch_up(all, now);
                let end = all.iter().map(|of| of.until).fold(now, Timestamp::max);
                (pool.cells(end).map(row).collect(), None)
            }
        };
        let mut curve = Self { rows, horizon, pending: 0, silent: 0 };
        all.iter().for_each(|of| curve.commit(None, Some(of)));
        curve.advance(pool, now);
        curve
    }

    /// Returns whether its window is the one that the pool has now, or neither has one.
    pub(super) fn is_of(&self, pool: &Pool, now: Timestamp) -> bool {
        let window = self.horizon.map(|horizon| (self.rows[0].since, horizon));
        window == pool.window_at(now)
    }

    /// Returns whether the limit has windows.
    pub(super) const fn is_window(&self) -> bool {
        self.horizon.is_some()
    }

    /// Returns whether it has rows until after `now`. Otherwise all assignments have expired for some time, and it is drawn anew: what
    /// is reported has no row, and there may be no end of rows to add, if the process was suspended.
    pub(super) fn reaches(&self, now: Timestamp) -> bool {
        self.horizon.is_some() || self.rows.last().is_some_and(|row| row.since > now)
    }

    /// Adds rows until after `end`. No account may admit anything then, unless it is assigned more.
    pub(super) fn reach(&mut self, pool: &Pool, end: Timestamp) {
        if self.reaches(end) {
            return;
        }
        let new = pool.cells(end).skip(self.rows.len());
        self.rows.extend(new.map(|(since, reported, supply)| Row {
            since,
            reported,
            demand: 0,
            planned: 0,
            supply,
            settled: 0,
        }));
    }

    /// Removes cells before the last report of every stream. What those that have not reported for long may have admitted in
    /// them counts as admitted.
    pub(super) fn advance(&mut self, pool: &mut Pool, now: Timestamp) {
        if self.horizon.is_some() {
            return;
        }
        self.reach(pool, now);
        let mut dropped = 0;
        while let [first, next, ..] = &self.rows[dropped..]
            && next.since <= now
            && (pool.is_first_too_old(now) || (self.silent == 0 && first.settled == 0))
        {
            pool.drop_first(first.demand.saturating_sub(next.demand));
            self.silent += first.settled;
            dropped += 1;
        }
        self.rows.drain(..dropped);
        if let Some(first) = self.rows.first() {
            pool.forget(first.since);
        }
    }

    /// Reads what was reported and the units of the pool again, and forgets what was planned.
    pub(super) fn refill(&mut self, pool: &Pool, now: Timestamp) {
        if self.horizon.is_some() {
            (self.rows[0].supply, self.rows[1].supply) = (pool.kept(now), pool.valid(now));
        } else if let Some(last) = self.rows.last().map(|row| row.since) {
            for (row, (_, reported, supply)) in self.rows.iter_mut().zip(pool.cells(last)) {
                (row.reported, row.supply) = (reported, supply);
            }
        }
        self.pending = 0;
        self.rows.iter_mut().for_each(|row| row.planned = row.demand);
    }

    /// Returns the most that a stream may have admitted and may admit since each instant.
    fn demands(&self, of: Option<&Exposed<'_>>) -> impl Iterator<Item = u64> {
        let of = of.map(|of| (of, self.horizon.map_or(of.until, |end| of.until.min(end))));
        let mut since_report = None;
        self.rows.iter().map(move |row| match of {
            Some((of, until)) if row.since <= of.settled => {
                *since_report.get_or_insert_with(|| of.between(of.settled, until))
            }
            Some((of, until)) if row.since < until => of.between(row.since, until),
            _ => 0,
        })
    }

    /// Replaces what an account may admit.
    pub(super) fn commit(&mut self, old: Option<&Exposed<'_>>, new: Option<&Exposed<'_>>) {
        let changes: SmallVec<[(u64, u64); 64]> = self.demands(old).zip(self.demands(new)).collect();
        for (row, (old, new)) in self.rows.iter_mut().zip(changes) {
            row.demand = row.demand.saturating_sub(old).saturating_add(new);
            row.planned = row.demand;
        }
        if let Some(old) = old {
            let settled = self.settled_at(old.settled);
            *settled = settled.saturating_sub(1);
        }
        if let Some(new) = new {
            *self.settled_at(new.settled) += 1;
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Checks that it is the curve of these accounts.
    #[cfg(test)]
    pub(super) fn check(&self, pool: &Pool, all: &[Exposed<'_>]) {
        let mut fresh = Self { silent: 0, ..self.clone() };
        fresh.rows.iter_mut().for_each(|row| (row.demand, row.settled) = (0, 0));
        all.iter().for_each(|of| fresh.commit(None, Some(of)));
        let figures = |curve: &Self| -> Vec<_> {
            curve.rows.iter().map(|row| (row.since, row.demand, row.settled)).collect()
        };
        assert_eq!((figures(self), self.silent), (figures(&fresh), fresh.silent));
        let last = self.rows.last().map(|row| row.since).expect("rows");
        assert_eq!(pool.cells(last).next().expect("a cell").0, self.rows[0].since);
        let later = |of: &Exposed<'_>| of.between(last.max(of.settled), of.until);
        assert_eq!(all.iter().map(later).sum::<u64>(), 0, "after the last row");
    }

    /// Returns the number of accounts whose last report was in the same cell.
    fn settled_at(&mut self, at: Timestamp) -> &mut u32 {
        let after = self.rows.partition_point(|row| row.since <= at);
        after.checked_sub(1).map_or(&mut self.silent, |row| &mut self.rows[row].settled)
    }

    /// Returns whether the units suffice if what an account may admit is added.
    pub(super) fn fits(&self, new: &Exposed<'_>) -> bool {
        self.rows
            .iter()
            .zip(self.demands(Some(new)))
            .all(|(row, new)| row.demand.saturating_add(new) <= row.room())
    }

    /// Returns whether the units suffice.
    pub(super) fn is_covered(&self) -> bool {
        self.rows.iter().all(|row| row.demand <= row.room())
    }

    /// Plans that an account changes so.
    fn plan(&mut self, old: Option<&Exposed<'_>>, new: Option<&Exposed<'_>>) {
        let changes: SmallVec<[(u64, u64); 64]> = self.demands(old).zip(self.demands(new)).collect();
        for (row, (old, new)) in self.rows.iter_mut().zip(changes) {
            row.planned = row.planned.saturating_sub(old).saturating_add(new);
        }
    }

    /// Returns how many units to charge for what is planned, beside those that are being charged. `idle` is the number of slots
    /// that begin within a time and that no stream has taken: units that are charged now begin with those.
    fn need(&self, idle: impl Fn(TimeDelta) -> u64, now: Timestamp) -> u64 {
        let missing = self.rows.iter().zip(1..).filter(|(row, _)| row.missing() > 0);
        let each = missing.map(|(row, next)| {
            let end = self.rows.get(next).map_or(row.since, |next| next.since);
            row.missing().saturating_add(if self.horizon.is_some() { 0 } else { idle(end.since(now)) })
        });
        each.max().unwrap_or(0).saturating_sub(self.pending)
    }

    /// Returns the most that streams may have admitted since the window began, and may still admit in it.
    pub(super) fn of_window(&self) -> Option<(u64, u64)> {
        self.horizon.map(|_| (self.rows[0].demand, self.rows[1].demand))
    }
}

/// The curves of a pass, by counter.
#[derive(Debug, Default)]
pub(super) struct Curves(pub(super) HashMap<u64, Curve>);

impl Curves {
    /// Removes those of these counters that have no row after `now`.
    pub(super) fn drop_outdated(&mut self, counters: &[u64], now: Timestamp) {
        for counter in counters {
            if self.0.get(counter).is_some_and(|curve| !curve.reaches(now)) {
                self.0.remove(counter);
            }
        }
    }

    /// Returns how many units of each counter to charge if an account changes so, and plans it.
    pub(super) fn want(
        &mut self,
        counters: &[u64],
        (old, new): (Option<&Exposed<'_>>, Option<&Exposed<'_>>),
        idle: impl Fn(u64, TimeDelta) -> u64,
        now: Timestamp,
    ) -> SmallVec<[(u64, u64); 2]> {
        let each = counters.iter().map(|counter| {
            let units = self.0.get_mut(counter).map_or(0, |curve| {
                curve.plan(old, new);
                curve.need(|time| idle(*counter, time), now)
            });
            (*counter, units)
        });
        each.collect()
    }

    /// Takes a plan back.
    pub(super) fn cancel(
        &mut self,
        counters: &[u64],
        (old, new): (Option<&Exposed<'_>>, Option<&Exposed<'_>>),
    ) {
        for counter in counters {
            if let Some(curve) = self.0.get_mut(counter) {
                curve.plan(new, old);
            }
        }
    }

    /// Records that units are being charged.
    pub(super) fn charge(&mut self, want: &[(u64, u64)]) {
        for (counter, units) in want {
            if let Some(curve) = self.0.get_mut(counter) {
                curve.pending = curve.pending.saturating_add(*units);
            }
        }
    }

    /// Returns the units of a counter that are being charged.
    pub(super) fn pending(&self, counter: u64) -> u64 {
        self.0.get(&counter).map_or(0, |curve| curve.pending)
    }

    /// Returns whether the units of all these counters suffice if what an account may admit is added.
    pub(super) fn fits(&self, counters: &[u64], new: &Exposed<'_>) -> bool {
        counters.iter().all(|counter| self.0.get(counter).is_some_and(|curve| curve.fits(new)))
    }

    /// Returns whether they suffice as it is.
    pub(super) fn are_covered(&self, counters: &[u64]) -> bool {
        counters.iter().all(|counter| self.0.get(counter).is_none_or(Curve::is_covered))
    }

    /// Records that an account has changed so.
    pub(super) fn commit(&mut self, counters: &[u64], old: Option<&Exposed<'_>>, new: Option<&Exposed<'_>>) {
        for counter in counters {
            if let Some(curve) = self.0.get_mut(counter) {
                curve.commit(old, new);
            }
        }
    }
}
