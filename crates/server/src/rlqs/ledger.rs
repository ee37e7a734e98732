//! Escrow ledger: units that were charged for one bucket of one stream and that it has not reported as spent.
//!
//! Each charge is a tranche. A unit of a bucket may be spent until its slot of time begins, a unit of a window until the
//! window ends (see the lease proof in `docs/internals`). Units are spent in the order in which they lapse, so a tranche
//! always holds its last ones, and the number that is still valid at an instant is a minimum.
//!
//! An account has few tranches, so that its size is bounded: those that follow each other directly are joined, and beyond
//! the maximum those that lose least by it. A joined tranche never has more valid units than both had: the later units lapse
//! as early as if they followed the earlier ones directly. Rejected: forgetting the oldest, because what a stream may have
//! admitted since its last report must stay covered, and would be charged twice.

use smallvec::SmallVec;
use tollgate_core::{Escrow, TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// Maximum number of tranches. An account that is renewed once per report has three.
const MAX_TRANCHES: usize = 8;
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

/// Units that can no longer be spent, and can be returned to their windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unspent {
    pub(super) units: u64,
    /// Time of the charge, by the store's clock.
    pub(super) taken_at: Timestamp,
}

/// Units of one charge.
#[derive(Clone, Debug)]
struct Tranche {
    /// Time before the charge was sent, by this node's clock.
    taken: Timestamp,
    units: u64,
    bounds: SmallVec<[Bound; 1]>,
    /// Time of the charge by the store's clock, if its units can be returned.
    returnable: Option<Timestamp>,
}

impl Tranche {
    fn valid(&self, at: Timestamp) -> u64 {
        let passed = at.since(self.taken);
        self.bounds.iter().fold(self.units, |units, bound| match bound {
            Bound::Slots(escrow) => units.min(escrow.valid_after(passed)),
            Bound::Until(lifetime) => {
                if passed < *lifetime {
                    units
                } else {
                    0
                }
            }
        })
    }

    /// Returns the valid units with regard to slots only.
    fn in_slots(&self, at: Timestamp) -> u64 {
        let passed = at.since(self.taken);
        self.bounds.iter().fold(self.units, |units, bound| match bound {
            Bound::Slots(escrow) => units.min(escrow.valid_after(passed)),
            Bound::Until(_) => units,
        })
    }

    fn has_slots(&self) -> bool {
        self.bounds.iter().any(|bound| matches!(bound, Bound::Slots(_)))
    }

    /// Returns the end of a bound.
    fn end(&self, bound: &Bound) -> Timestamp {
        self.taken
            + match bound {
                Bound::Slots(escrow) => escrow.lifetime(),
                Bound::Until(lifetime) => *lifetime,
            }
    }

    /// Joins these units with `later` ones, and returns them with the time by which the later ones lapse earlier. `None` if
    /// they were charged to other limits.
    ///
    /// With several limits by slots the later slots must begin after the earlier ones in all of them: then as soon as any
    /// later unit has lapsed, all earlier ones have.
    fn join(&self, later: &Self) -> Option<(Self, TimeDelta)> {
        if self.bounds.len() != later.bounds.len() || later.taken < self.taken {
            return None;
        }
        let (units, more) = (self.valid(self.taken), later.valid(later.taken));
        let apart = later.taken.since(self.taken);
        let slots = self.bounds.iter().filter(|bound| matches!(bound, Bound::Slots(_))).count();
        let mut lost = TimeDelta::ZERO;
        let mut bounds = SmallVec::new();
        for (own, other) in self.bounds.iter().zip(&later.bounds) {
            let joined = match (own, other) {
                (Bound::Slots(first), Bound::Slots(second)) => {
                    let joined = first.join(units, second, more, apart)?;
                    if slots > 1 && second.taken_at(more, later.taken) < self.end(own) {
                        return None;
                    }
                    Bound::Slots(joined)
                }
                (Bound::Until(first), Bound::Until(second)) => {
                    let end = second.as_micros().saturating_add(apart.as_micros());
                    Bound::Until((*first).min(TimeDelta::from_micros(end)))
                }
                _ => return None,
            };
            lost = lost.max(later.end(other).since(self.end(&joined)));
            bounds.push(joined);
        }
        // By the earlier of both: a window that it is still in is that of both.
        let returnable = self.returnable.zip(later.returnable).map(|(first, second)| first.min(second));
        Some((Self { taken: self.taken, units: units.saturating_add(more), bounds, returnable }, lost))
    }
}

/// All units in escrow, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(Vec<Tranche>);

impl Ledger {
    /// Adds `units` that were charged to these counters. `taken_at` is the time by the store's clock if they can be returned.
    pub(super) fn add(
        &mut self,
        units: u64,
        counters: &[CounterAhead],
        taken: Timestamp,
        taken_at: Option<Timestamp>,
    ) {
        if units == 0 {
            return;
        }
        let bounds = counters.iter().map(|counter| match (counter.escrow, counter.kind) {
            (Some(escrow), AheadKind::Slots) => Bound::Slots(escrow),
            (Some(escrow), _) => Bound::Until(escrow.lifetime()),
            (None, _) => Bound::Until(counter.period),
        });
        let has_window = counters.iter().any(|counter| counter.kind == AheadKind::Window);
        let returnable = taken_at.filter(|_| has_window);
        self.push(Tranche { taken, units, bounds: bounds.collect(), returnable });
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

    /// Returns the units that may be spent at `at`.
    pub(super) fn valid(&self, at: Timestamp) -> u64 {
        self.0.iter().map(|tranche| tranche.valid(at)).sum()
    }

    /// Returns the units whose slots begin after `at`. Windows that end before do not count against them: they are
    /// charged again when they have ended.
    pub(super) fn in_slots(&self, at: Timestamp) -> u64 {
        self.0.iter().map(|tranche| tranche.in_slots(at)).sum()
    }

    /// Returns the instants at which a charge has no valid slot left. Between two of them the number of valid units is
    /// concave in time.
    pub(super) fn ends(&self) -> impl Iterator<Item = Timestamp> {
        self.0.iter().flat_map(|tranche| {
            tranche.bounds.iter().filter_map(|bound| match bound {
                Bound::Slots(escrow) => Some(tranche.taken + escrow.lifetime()),
                Bound::Until(_) => None,
            })
        })
    }

    /// Removes `units` that were spent after `since`, and those that had lapsed by then.
    pub(super) fn spend(&mut self, mut units: u64, since: Timestamp) {
        for tranche in &mut self.0 {
            tranche.units = tranche.valid(since);
            let spent = tranche.units.min(units);
            tranche.units -= spent;
            units -= spent;
        }
        self.0.retain(|tranche| tranche.units > 0);
    }

    /// Removes units that had lapsed at this instant, before which nothing is asked anymore. Returns those whose slots have
    /// passed while their windows may last: they were not spent, and can no longer be.
    pub(super) fn forget(&mut self, before: Timestamp) -> SmallVec<[Unspent; 1]> {
        let mut lapsed = SmallVec::new();
        for tranche in &mut self.0 {
            let valid = tranche.valid(before);
            if let Some(taken_at) =
                tranche.returnable.filter(|_| valid < tranche.units && tranche.has_slots())
            {
                lapsed.push(Unspent { units: tranche.units - valid, taken_at });
            }
            tranche.units = valid;
        }
        self.0.retain(|tranche| tranche.units > 0);
        lapsed
    }

    /// Removes up to `units` that are valid at `now` from windows, to be returned.
    pub(super) fn give_back(&mut self, mut units: u64, now: Timestamp) -> SmallVec<[Unspent; 1]> {
        let mut back = SmallVec::new();
        for tranche in self.0.iter_mut().filter(|tranche| !tranche.has_slots()) {
            let Some(taken_at) = tranche.returnable else { continue };
            let given = tranche.valid(now).min(units);
            if given > 0 {
                back.push(Unspent { units: given, taken_at });
            }
            tranche.units -= given;
            units -= given;
        }
        self.0.retain(|tranche| tranche.units > 0);
        back
    }

    /// From now on, the units in escrow cannot be returned: the bucket is charged to other counters.
    pub(super) fn keep_all(&mut self) {
        self.0.iter_mut().for_each(|tranche| tranche.returnable = None);
    }

    /// Returns the number of tranches.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests;
