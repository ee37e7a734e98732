//! Escrow ledger: units of one limit that were charged for streams, and until when they may be spent.
//!
//! Each charge is a tranche. A unit of a bucket may be spent until its slot of time begins, a unit of a window until the
//! window ends (see the lease proof in `docs/internals`).
//! Rejected: one ledger for all limits of a bucket, because what lapses by one of them (a second's slots) would be lost to the
//! others (a day's window), and a bucket that is hardly used would drain them.
//!
//! A ledger has few tranches, so that its size is bounded: those that follow each other directly are joined, and beyond
//! the maximum those that lose least by it. A joined tranche never has more valid units than both had: the later units lapse
//! as early as if they followed the earlier ones directly. Rejected: forgetting the oldest, because what streams may have
//! admitted since their last reports must stay covered, and would be charged twice.

use smallvec::SmallVec;
use tollgate_core::{Escrow, TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// Maximum number of tranches: of limits that others use too, every charge is one until it has lapsed.
const MAX_TRANCHES: usize = 32;
/// Tranches are joined at once if the later one lapses by no more than this earlier. Longer losses would add up.
const ADJACENT: TimeDelta = TimeDelta::from_millis(1);

/// Until when the units of one limit may be spent.
#[derive(Clone, Copy, Debug)]
enum Bound {
    /// Each until its slot begins.
    Slots(Escrow),
    /// All for this long.
    Until(TimeDelta),
}

/// Units that can no longer be spent, and can be returned to their window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unspent {
    pub(super) counter: u64,
    pub(super) units: u64,
    /// Time of the charge, by the store's clock.
    pub(super) taken_at: Timestamp,
}

/// Units of one charge.
#[derive(Clone, Copy, Debug)]
struct Tranche {
    /// Time before the charge was sent, by this node's clock.
    taken: Timestamp,
    units: u64,
    bound: Bound,
    /// Time of the charge by the store's clock, if its units can be returned.
    returnable: Option<Timestamp>,
    /// The limit has been lowered since: nothing more is assigned by these units.
    is_stale: bool,
}

impl Tranche {
    fn valid(&self, at: Timestamp) -> u64 {
        let passed = at.since(self.taken);
        match self.bound {
            Bound::Slots(escrow) => self.units.min(escrow.valid_after(passed)),
            Bound::Until(lifetime) if passed < lifetime => self.units,
            Bound::Until(_) => 0,
        }
    }

    fn end(&self) -> Timestamp {
        self.taken
            + match self.bound {
                Bound::Slots(escrow) => escrow.lifetime(),
                Bound::Until(lifetime) => lifetime,
            }
    }

    /// Joins these units with `later` ones, and returns them with the time by which the later ones lapse earlier. `None` if
    /// their kinds differ.
    fn join(&self, later: &Self) -> Option<(Self, TimeDelta)> {
        if later.taken < self.taken || self.is_stale != later.is_stale {
            return None;
        }
        let (units, more) = (self.valid(self.taken), later.valid(later.taken));
        let apart = later.taken.since(self.taken);
        let bound = match (self.bound, later.bound) {
            (Bound::Slots(first), Bound::Slots(second)) => {
                Bound::Slots(first.join(units, &second, more, apart)?)
            }
            (Bound::Until(first), Bound::Until(second)) => {
                let end = second.as_micros().saturating_add(apart.as_micros());
                Bound::Until(first.min(TimeDelta::from_micros(end)))
            }
            _ => return None,
        };
        // By the earlier of both: a window that it is still in is that of both.
        let returnable = self.returnable.zip(later.returnable).map(|(first, second)| first.min(second));
        let joined = Self { units: units.saturating_add(more), bound, returnable, ..*self };
        Some((joined, later.end().since(joined.end())))
    }
}

/// All units of one limit in escrow, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(Vec<Tranche>);

impl Ledger {
    /// Adds `units` that were charged to this counter. `taken_at` is the time by the store's clock if they can be returned.
    pub(super) fn add(
        &mut self,
        units: u64,
        counter: &CounterAhead,
        taken: Timestamp,
        taken_at: Option<Timestamp>,
    ) {
        if units == 0 {
            return;
        }
        let bound = match (counter.escrow, counter.kind) {
            (Some(escrow), AheadKind::Slots) => Bound::Slots(escrow),
            (Some(escrow), _) => Bound::Until(escrow.lifetime()),
            (None, _) => Bound::Until(counter.period),
        };
        let returnable = taken_at.filter(|_| counter.kind == AheadKind::Window);
        self.push(Tranche { taken, units, bound, returnable, is_stale: false });
    }

    fn push(&mut self, new: Tranche) {
        let now = new.taken;
        if let Some(last) = self.0.last_mut()
            && let Some((joined, lost)) = last.join(&new)
            && lost <= ADJACENT
        {
            *last = joined;
            return;
        }
        self.0.push(new);
        if self.0.len() > MAX_TRANCHES {
            self.join_one(now);
        }
    }

    /// Joins the two neighbors that lose least by it. Of two that have lapsed already only the sum matters, until the next
    /// report. If none can be joined, the oldest is forgotten, and its units stay charged.
    fn join_one(&mut self, now: Timestamp) {
        let pairs = self.0.windows(2).enumerate().filter_map(|(at, pair)| {
            let (joined, lost) = pair[0].join(&pair[1])?;
            let has_lapsed = pair[1].valid(now) == 0 && pair[0].valid(now) == 0;
            Some((if has_lapsed { TimeDelta::ZERO } else { lost }, at, joined))
        });
        match pairs.min_by_key(|(lost, at, _)| (*lost, *at)) {
            Some((_, at, joined)) => {
                self.0[at] = joined;
                self.0.remove(at + 1);
            }
            None => {
                self.0.remove(0);
            }
        }
    }

    /// Returns the units that may be spent at `at` by what is assigned now.
    pub(super) fn valid(&self, at: Timestamp) -> u64 {
        self.0.iter().filter(|tranche| !tranche.is_stale).map(|tranche| tranche.valid(at)).sum()
    }

    /// Returns the units that may be spent at `at` by what has been assigned.
    pub(super) fn kept(&self, at: Timestamp) -> u64 {
        self.0.iter().map(|tranche| tranche.valid(at)).sum()
    }

    /// Removes `units` that were spent of those that are valid at `now`.
    pub(super) fn spend(&mut self, units: u64, now: Timestamp) {
        let mut left = units;
        for tranche in self.0.iter_mut().filter(|tranche| tranche.valid(now) > 0) {
            let spent = tranche.units.min(left);
            tranche.units -= spent;
            left -= spent;
        }
        self.0.retain(|tranche| tranche.units > 0);
    }

    /// Removes units that had lapsed at this instant, before which nothing is asked anymore.
    pub(super) fn forget(&mut self, before: Timestamp) {
        self.0.iter_mut().for_each(|tranche| tranche.units = tranche.valid(before));
        self.0.retain(|tranche| tranche.units > 0);
    }

    /// Removes up to `units` of windows that are valid at `now`, to be returned to this counter.
    pub(super) fn give_back(
        &mut self,
        counter: u64,
        mut units: u64,
        now: Timestamp,
    ) -> SmallVec<[Unspent; 1]> {
        let mut back = SmallVec::new();
        for tranche in &mut self.0 {
            let Some(taken_at) = tranche.returnable else { continue };
            let given = tranche.valid(now).min(units);
            if given > 0 {
                back.push(Unspent { counter, units: given, taken_at });
            }
            tranche.units -= given;
            units -= given;
        }
        self.0.retain(|tranche| tranche.units > 0);
        back
    }

    /// From now on, nothing more is assigned by the units in escrow: the limit has been lowered.
    pub(super) fn mark_stale(&mut self) {
        self.0.iter_mut().for_each(|tranche| tranche.is_stale = true);
    }

    /// Returns the number of tranches.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests;
