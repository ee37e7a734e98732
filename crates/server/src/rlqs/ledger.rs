//! Escrow ledger: units that were charged for one bucket of one stream and that it has not reported as spent.
//!
//! Each charge is a tranche. A unit of a bucket may be spent until its slot of time begins, a unit of a window until the
//! window ends (see the lease proof in `docs/internals`). Units are spent in the order in which they lapse, so a tranche
//! always holds its last ones, and the number that is still valid at an instant is a minimum.

use smallvec::SmallVec;
use std::collections::VecDeque;
use tollgate_core::{Escrow, TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// Maximum number of tranches; beyond it the oldest is forgotten, and its units stay charged.
const MAX_TRANCHES: usize = 64;

/// Until when the units of one limit may be spent.
#[derive(Clone, Copy, Debug)]
enum Bound {
    /// Each until its slot begins.
    Slots(Escrow),
    /// All for this long.
    Until(TimeDelta),
}

/// Units of one charge.
#[derive(Clone, Debug)]
struct Tranche {
    /// Time before the charge was sent, by this node's clock.
    taken: Timestamp,
    units: u64,
    bounds: SmallVec<[Bound; 2]>,
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
}

/// All units in escrow, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(VecDeque<Tranche>);

impl Ledger {
    /// Adds `units` that were charged to these counters.
    pub(super) fn add(&mut self, units: u64, counters: &[CounterAhead], taken: Timestamp) {
        if units == 0 {
            return;
        }
        let bounds = counters.iter().map(|counter| match (counter.escrow, counter.kind) {
            (Some(escrow), AheadKind::Slots) => Bound::Slots(escrow),
            (Some(escrow), _) => Bound::Until(escrow.lifetime()),
            (None, _) => Bound::Until(counter.period),
        });
        if self.0.len() == MAX_TRANCHES {
            self.0.pop_front();
        }
        self.0.push_back(Tranche { taken, units, bounds: bounds.collect() });
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
}
