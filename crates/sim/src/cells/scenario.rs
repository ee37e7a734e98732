//! Scenarios of cells.

use tollgate_core::conformance::SplitMix64;
use tollgate_core::{Algorithm, CounterOwner, Limit, LimitSpec, Rate, RegionMode, TimeDelta};
use tollgate_rules::Bound;

/// Largest drift of a cell's clock, in parts per million.
pub(crate) const MAX_DRIFT: u64 = 100;

/// Parameters of a run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) mode: RegionMode,
    /// Whether a hash selects the owner; otherwise the first cell owns the counter.
    pub(crate) by_hash: bool,
    pub(crate) cells: usize,
    pub(crate) limit: Limit,
    /// Minimum and maximum delay of a message, in microseconds.
    pub(crate) delay: (u64, u64),
    /// Lost and duplicated messages, per thousand.
    pub(crate) loss: u64,
    pub(crate) doubles: u64,
    /// Whether links are cut.
    pub(crate) cuts: bool,
    /// Whether links hold messages back for less than the silence time, so that reports come late.
    pub(crate) stalls: bool,
    /// Whether the first two cells are cut off from each other, and from no other, all the time.
    pub(crate) apart: bool,
    /// Whether cells restart.
    pub(crate) crashes: bool,
    /// Whether the counters of cells outlive their processes, so that a cell is away for a while and restarts with those it had.
    pub(crate) keeps: bool,
    /// Whether the stores of cells are down for a while, and lose nothing.
    pub(crate) outages: bool,
    /// Mean microseconds between two checks of a cell, and their maximum cost.
    pub(crate) pace: u64,
    pub(crate) cost: u64,
    /// Checks that are reservations, and are canceled up to a second later, per thousand.
    pub(crate) cancels: u64,
    /// Whether callers pause for 8 of 20 seconds, so that their limits restore.
    pub(crate) pauses: bool,
    /// Duration of the traffic in microseconds.
    pub(crate) length: u64,
    pub(crate) tick: TimeDelta,
    pub(crate) silence: TimeDelta,
}

/// Count, period in milliseconds, burst.
const LIMITS: [(u64, u64, u64); 9] = [
    (50, 1_000, 50),
    (50, 1_000, 400),
    (1_000, 1_000, 1_000),
    (1_000, 1_000, 10),
    (7_000, 1_000, 100),
    (300, 1_000, 3),
    (40, 86_400_000, 40),
    // Never used up: each unit that is counted twice or not at all is seen.
    (4_000, 31_536_000_000, 4_000),
    (5_000, 60_000, 900),
];

/// Those whose bursts are more than they give in the time in which no cell decides what moves, so that one burst too many is seen.
const LARGE_BURSTS: [(u64, u64, u64); 3] = [(50, 1_000, 400), (100, 1_000, 2_000), (5_000, 60_000, 900)];

/// Algorithms that forget at the end of a window.
const WINDOWS: [Algorithm; 4] =
    [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::StrictWindow, Algorithm::SlidingLog];

/// Maximum difference between the clocks of cells where windows are counted by them, in microseconds.
const MAX_SKEW: u64 = 100_000;

fn limit(algorithm: Algorithm, rate: Rate, burst: u64) -> Limit {
    let spec = LimitSpec::new(algorithm, rate);
    let spec = if algorithm.has_burst() { spec.burst(burst) } else { spec };
    spec.build().unwrap_or_else(|error| panic!("{error}"))
}

impl Scenario {
    pub(crate) fn from_seed(rng: &mut SplitMix64) -> Self {
        let mode = *rng.pick(&RegionMode::ALL);
        let keeps = mode.has_owner() && rng.chance(100);
        let (count, period, burst) = if keeps { *rng.pick(&LARGE_BURSTS) } else { *rng.pick(&LIMITS) };
        let rate = Rate::per(count, TimeDelta::from_millis(period));
        let algorithm = match rng.chance(400) {
            true => *rng.pick(&WINDOWS),
            false if rng.chance(200) => Algorithm::TokenBucket,
            false => Algorithm::Gcra,
        };
        let burst = if algorithm.has_burst() { burst } else { count };
        // Of two cells none decides for the other.
        let cells = usize::try_from(rng.between(if keeps { 3 } else { 2 }, 4)).unwrap_or(3);
        let calm = !keeps && rng.chance(250);
        let apart = cells > 2 && mode == RegionMode::Shared && rng.chance(150);
        // Long enough for what is too much to exceed what cells may admit before they notice, and for owners to move and return.
        let outages = !calm && mode.has_owner() && rng.chance(400);
        let crashes = keeps || !calm && mode.has_owner() && rng.chance(300);
        let length = match (apart || outages, keeps) {
            (_, true) => 60,
            (true, _) => 30,
            _ => rng.between(3, 8),
        } * 1_000_000;
        // From half of the limit to twenty times the limit, in a bounded number of checks.
        let per_second = (count * 1_000 / period).max(4);
        let demand = (per_second * rng.between(5, 200) / 10).max(20);
        let cost = (demand * length / 1_000_000 / 600).max(1);
        Self {
            mode,
            by_hash: keeps || mode.has_owner() && cells > 2 && rng.chance(500),
            cells,
            limit: limit(algorithm, rate, burst),
            delay: (*rng.pick(&[100, 1_000, 20_000]), *rng.pick(&[21_000, 40_000, 120_000])),
            loss: if calm { 0 } else { *rng.pick(if keeps { &[0, 10] } else { &[0, 10, 200] }) },
            doubles: if calm { 0 } else { *rng.pick(&[0, 10, 100]) },
            cuts: !calm && rng.chance(if keeps { 200 } else { 700 }),
            stalls: !calm && mode == RegionMode::Shared && rng.chance(600),
            apart,
            crashes,
            keeps,
            pace: (1_000_000 * cells as u64 * cost / demand).max(300),
            cost: if rng.chance(300) { (cost * 3).min(burst) } else { cost.min(burst) },
            cancels: if mode == RegionMode::Shared && rng.chance(400) {
                *rng.pick(&[100, 500, 900])
            } else {
                0
            },
            pauses: keeps && rng.chance(700),
            length,
            tick: TimeDelta::from_millis(*rng.pick(&[50, 200, 500])),
            silence: TimeDelta::from_millis(*rng.pick(&[1_000, 2_000])),
            outages,
        }
    }

    pub(crate) fn owner(&self) -> CounterOwner<'static> {
        if self.by_hash { CounterOwner::Hash } else { CounterOwner::Region("r0") }
    }

    /// Returns the units that cells admit more because their clocks run fast.
    pub(crate) fn drift(&self) -> u64 {
        let rate = self.limit.rate();
        let units = u128::from(rate.count) * u128::from(self.length * MAX_DRIFT / 1_000_000);
        let units = units / u128::from(rate.period.length().as_micros());
        u64::try_from(units).unwrap_or(u64::MAX / 2) + self.cells as u64
    }

    /// Returns the maximum offset of a cell's clock. Buckets compare no clocks; the windows of two owners, one after the
    /// other, are the same only if their clocks nearly agree.
    pub(crate) fn max_offset(&self) -> u64 {
        if self.has_windows() { MAX_SKEW } else { 3_600_000_000 }
    }

    fn has_windows(&self) -> bool {
        WINDOWS.contains(&self.limit.algorithm())
    }

    /// Returns the units of canceled reservations that other cells may count nevertheless, on the safe side. What a cell has
    /// taken by its part while another was silent is not refunded there: time may have restored it already. And what time had
    /// restored of a unit when a reservation was canceled is owed for a lag longer elsewhere.
    pub(crate) fn max_owed_longer(&self) -> u64 {
        let may_be_silent = self.cuts || self.apart || self.stalls || self.loss > 0;
        match self.cancels > 0 {
            true if may_be_silent => u64::MAX,
            true => 1,
            false => 0,
        }
    }

    /// Returns the limit that admissions of all cells together may not exceed: a bucket with the burst and the rate that
    /// are stated of the limit ([`Bound`]).
    pub(crate) fn bound(&self) -> Limit {
        // A peer counts as silent after its time; a tick notices that, another carries the last batch, which may take a
        // round trip.
        let lag = self.silence.as_micros() + 2 * self.tick.as_micros() + 2 * self.delay.1;
        let cells = u32::try_from(self.cells).unwrap_or(u32::MAX);
        let stated = Bound::new(&self.limit, self.mode, cells, TimeDelta::from_micros(lag));
        let Rate { count, period } = self.limit.rate().clone();
        let rate = Rate { count: count * stated.rates, period };
        limit(Algorithm::Gcra, rate, stated.burst + stated.beyond)
    }
}
