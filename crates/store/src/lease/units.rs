//! Leased units: deducted by the authority at one instant, each with an end of validity.

use tollgate_core::{Escrow, PermitId, TimeDelta, Timestamp};

/// Where units were spent, so that it can be undone.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpendMark {
    voids: u32,
    /// Number of units that were void before.
    void: u64,
    /// Number of units spent or void afterwards, and of those undone by then.
    end: u64,
}

impl SpendMark {
    /// Of units that are not undone by it.
    pub(super) const NONE: Self = Self { voids: 0, void: 0, end: 0 };
}

/// The units of one refill.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeasedUnits {
    escrow: Escrow,
    /// When the refill was requested, by this node's clock: before the authority deducted the units.
    asked_at: Timestamp,
    /// When the units were deducted, by the authority's clock.
    pub(super) at: Timestamp,
    /// When the bucket was to be full again, by the authority's clock.
    pub(super) full_at: Timestamp,
    /// Number of units spent or void. The first to become void is the first to be spent.
    used: u64,
    /// How many times units became void before they could be spent, or were restored.
    voids: u32,
    /// Number of units whose spending was undone.
    undone: u64,
    /// Number of units that were void when some were last spent.
    last_void: u64,
    /// Number of units reported to the authority as no longer outstanding.
    reported: u64,
    /// ID of the refill, for returning its units.
    pub(super) id: PermitId,
    /// Time after the request during which units may be spent.
    ttl: TimeDelta,
}

impl LeasedUnits {
    pub(super) fn new(
        escrow: Escrow,
        asked: Timestamp,
        (at, full_at): (Timestamp, Timestamp),
        id: PermitId,
        ttl: TimeDelta,
    ) -> Self {
        Self {
            escrow,
            asked_at: asked,
            at,
            full_at,
            used: 0,
            voids: 0,
            undone: 0,
            last_void: 0,
            reported: 0,
            id,
            ttl,
        }
    }

    /// Returns how many units can be spent at `now`.
    pub(super) fn available(&self, now: Timestamp) -> u64 {
        self.escrow.units() - self.used.max(self.void(now))
    }

    /// Spends `units` if that many are available. Returns the mark for [`LeasedUnits::unspend`], if spent, and the units left.
    #[inline]
    pub(super) fn spend(&mut self, units: u64, now: Timestamp) -> (Option<SpendMark>, u64) {
        let void = self.void(now);
        let gone = self.used.max(void);
        let good = self.escrow.units() - gone;
        if units > good {
            return (None, good);
        }
        if void >= self.used {
            self.voids = self.voids.wrapping_add(1);
        }
        self.used = gone + units;
        self.last_void = void;
        (Some(SpendMark { voids: self.voids, void, end: self.used + self.undone }), good - units)
    }

    /// Undoes a recent spend. Units that had become void when others were spent later stay spent: without them, the later requests
    /// would have spent units further on, not those that are void. Does nothing if all units spent before had become void then.
    pub(super) fn unspend(&mut self, units: u64, mark: SpendMark) {
        if mark.voids != self.voids {
            return;
        }
        let restored = match mark.void == self.last_void {
            true => units,
            // What was undone meanwhile may have been spent before these: they were then nearer to the void ones.
            false => units.min(mark.end.saturating_sub(self.undone + self.last_void)),
        };
        let restored = restored.min(self.used);
        self.used -= restored;
        self.undone += restored;
    }

    /// Makes up to this many spent units available again, whose holders have got other slots that have not begun. Returns how
    /// many: those whose own slots have not begun.
    pub(super) fn restore(&mut self, units: u64, now: Timestamp) -> u64 {
        let restored = units.min(self.used.saturating_sub(self.void(now)));
        if restored > 0 {
            self.used -= restored;
            // Requests in flight may have got the other slots, which may begin before these are undone.
            self.voids = self.voids.wrapping_add(1);
        }
        restored
    }

    /// Returns how many units were spent or became void since the last call.
    pub(super) fn report(&mut self, now: Timestamp) -> u64 {
        let gone = self.used.max(self.void(now));
        let news = gone.saturating_sub(self.reported);
        self.reported = self.reported.max(gone);
        news
    }

    /// Returns how many units were not reported as no longer outstanding.
    pub(super) const fn unreported(&self) -> u64 {
        self.escrow.units() - self.reported
    }

    /// Returns the instant at which the authority counts the last `units` as taken.
    pub(super) fn taken_at(&self, units: u64) -> Timestamp {
        self.escrow.taken_at(units, self.at)
    }

    /// Returns how many units can no longer be spent. Clock rates may differ by a thousandth: a margin for that is
    /// deducted.
    #[inline]
    fn void(&self, now: Timestamp) -> u64 {
        let passed = now.since(self.asked_at);
        if passed >= self.ttl {
            return self.escrow.units();
        }
        let passed = passed.as_micros();
        let at_most = TimeDelta::from_micros(passed + (passed >> 10) + 1);
        self.escrow.units() - self.escrow.valid_after(at_most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, State, nonzero};

    const START: Timestamp = Timestamp::from_secs(1_000);

    /// Units of which one becomes void every 100 ms.
    fn leased(units: u64) -> LeasedUnits {
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10)))
            .burst(40)
            .build()
            .expect("a limit");
        let outcome = limit.step(&mut State::default(), START, Cost::new(units));
        let escrow = limit.escrow(units, START, &outcome).expect("a bucket");
        let id = PermitId(7);
        LeasedUnits::new(escrow, START, (START, START), id, TimeDelta::from_secs(600))
    }

    /// What a node may still spend if it spends the first unit that is not void each time, and had never spent what was undone.
    fn oracle(units: u64, void: impl Fn(Timestamp) -> u64, kept: &[(Timestamp, u64)], now: Timestamp) -> u64 {
        let used = kept.iter().fold(0, |used: u64, (at, spent)| used.max(void(*at)) + spent);
        units - used.max(void(now)).min(units)
    }

    /// Two of four units become void before they are undone, and another request has spent the fifth meanwhile.
    #[test]
    fn void_units_are_not_handed_back_at_the_expense_of_later_ones() {
        let mut leased = leased(10);
        let (first, _) = leased.spend(4, START);
        let later = START + TimeDelta::from_millis(250);
        assert_eq!(leased.void(later), 3);
        leased.spend(1, later).0.expect("there are six left");
        leased.unspend(4, first.expect("spent"));
        assert_eq!(leased.available(later), 6, "three are void, and one is spent");
    }

    /// A request that another limit denies costs nothing, in whatever order such requests end.
    #[test]
    fn units_that_are_not_void_are_handed_back_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
            let mut leased = leased(10);
            let before = leased.available(START);
            let marks = [2, 3, 3].map(|units| (units, leased.spend(units, START).0.expect("spent")));
            order
                .map(|at: usize| marks[at])
                .into_iter()
                .for_each(|(units, mark)| leased.unspend(units, mark));
            assert_eq!(leased.available(START), before, "{order:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]
        /// Whatever is spent and undone, in any order: no more is available than if what was undone had never been spent.
        #[test]
        fn no_more_is_handed_back_than_was_spent(
            steps in prop::collection::vec((0_u64..7, 0_u64..400, any::<bool>(), any::<prop::sample::Index>()), 1..60),
        ) {
            let mut leased = leased(40);
            let probe = leased;
            let void = |at: Timestamp| probe.void(at);
            let mut now = START;
            let mut kept: Vec<(Timestamp, u64)> = Vec::new();
            let mut open: Vec<(Timestamp, u64, SpendMark)> = Vec::new();
            for (units, pause, is_undo, pick) in steps {
                now = now + TimeDelta::from_millis(pause / 4);
                if is_undo && !open.is_empty() {
                    let (at, units, mark) = open.swap_remove(pick.index(open.len()));
                    leased.unspend(units, mark);
                    let place = kept.iter().position(|one| *one == (at, units)).expect("it was spent");
                    kept.remove(place);
                } else if let (Some(mark), _) = leased.spend(units + 1, now) {
                    kept.push((now, units + 1));
                    open.push((now, units + 1, mark));
                }
                let may = oracle(40, void, &kept, now);
                prop_assert!(leased.available(now) <= may, "{} of {}: {:?}", leased.available(now), may, kept);
            }
        }
    }
}
