//! Clocks that go back never mint quota and never lock a key.
//!
//! Time is measured here by forward moves alone: what a clock takes back and gives again counts as passed again. By
//! that measure every promise of the monotone case still holds, and `Limit::retention` after any history a key is unused.

use crate::traces::{START, costs, gaps, limits, micros, refill_interval};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, TimeDelta, Timestamp, nonzero};

/// A move of the clock, and a cost.
type Move = (i64, u64);

fn moves(limit: &Limit) -> BoxedStrategy<Vec<Move>> {
    let period = i64::try_from(micros(limit)).expect("a short period");
    let forward = gaps(limit).prop_map(|gap| i64::try_from(gap).expect("a short gap"));
    let back = prop_oneof![Just(-1_i64), -2_i64..=2, -period..=0, -4 * period..=0, Just(-400 * period)];
    let swing = prop_oneof![3 => forward, 2 => back];
    proptest::collection::vec((swing, costs(limit)), 1..80).boxed()
}

fn moved(now: Timestamp, by: i64) -> Timestamp {
    let span = TimeDelta::from_micros(by.unsigned_abs());
    if by < 0 { now - span } else { now + span }
}

/// Admissions as (sum of forward moves until then, units).
fn admissions(limit: &Limit, moves: &[Move]) -> (Vec<(u64, u64)>, State, Timestamp) {
    // A border of every window of a whole number of milliseconds, so that small swings cross it.
    let (mut state, mut now, mut forward) = (State::default(), START, 0);
    let mut log = Vec::new();
    for (by, cost) in moves {
        now = moved(now, *by);
        forward += u64::try_from(*by).unwrap_or(0);
        if limit.step(&mut state, now, Cost::new(*cost)).verdict.is_allowed() {
            log.push((forward, *cost));
        }
    }
    (log, state, now)
}

/// The most units that `limit` may pass in a stretch of `forward` microseconds of forward moves, times the period.
fn ceiling(limit: &Limit, forward: u64) -> u128 {
    let (period, capacity) = (u128::from(micros(limit)), u128::from(limit.capacity()));
    let forward = u128::from(forward);
    match limit.algorithm() {
        Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            let forward = forward + u128::from(refill_interval(limit));
            capacity * period + forward * u128::from(limit.rate().count)
        }
        // Every window that the stretch can touch.
        Algorithm::FixedWindow | Algorithm::SlidingWindow => capacity * (forward + 2 * period),
        // Every period that has passed in full, and the one that is passing.
        _ => capacity * period * (forward / period + 1),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Without it two threads whose clocks differ by a microsecond, or a machine whose clock is set back, give a
    /// tenant its quota again and again.
    #[test]
    fn no_clock_mints((limit, moves) in limits().prop_flat_map(|limit| { let moves = moves(&limit); (Just(limit), moves) })) {
        let (log, ..) = admissions(&limit, &moves);
        let period = u128::from(micros(&limit));
        for first in 0..log.len() {
            let mut sum = 0_u128;
            for (forward, units) in &log[first..] {
                sum += u128::from(*units);
                let passed = forward - log[first].0;
                prop_assert!(sum * period <= ceiling(&limit, passed), "{sum} units in {passed} us forward");
            }
        }
    }

    /// Without it a clock that was once wrong by a year locks a tenant out for a year.
    #[test]
    fn no_clock_locks((limit, moves) in limits().prop_flat_map(|limit| { let moves = moves(&limit); (Just(limit), moves) })) {
        let (_, mut state, now) = admissions(&limit, &moves);
        let later = now + limit.retention();
        prop_assert_eq!(limit.step(&mut state, later, Cost::PEEK).remaining, limit.capacity());
        prop_assert!(limit.step(&mut state, later, Cost::new(limit.capacity())).verdict.is_allowed());
    }

    /// Without it `Limit::retention` may be an age, and the bound above says nothing.
    #[test]
    fn memory_is_a_few_periods(limit in limits()) {
        let fill = micros(&limit).saturating_mul(limit.capacity()).div_ceil(limit.rate().count);
        let longest = if limit.algorithm().has_burst() { 2 * fill.max(micros(&limit)) } else { 3 * (micros(&limit) + 120) };
        prop_assert!(limit.retention().as_micros() <= longest + refill_interval(&limit));
    }
}

/// Without it threads that read the clock a microsecond apart, just where a window turns, pass a limit each time they
/// take turns.
#[test]
fn a_clock_that_swings_over_a_border_passes_two_windows_at_most() {
    for algorithm in Algorithm::ALL {
        let limit = LimitSpec::new(algorithm, Rate::per_second(nonzero!(10))).build().expect("in range");
        for border in [START, START + TimeDelta::from_millis(100)] {
            let (mut state, mut passed) = (State::default(), 0);
            for swing in 0..1_000_u64 {
                let now = border + TimeDelta::from_micros(swing % 2) - TimeDelta::from_micros(1);
                passed += u64::from(limit.step(&mut state, now, Cost::ONE).verdict.is_allowed());
            }
            let most = if algorithm == Algorithm::FixedWindow { 20 } else { 10 };
            assert!(passed <= most, "{algorithm} passed {passed} of 10 a second within a microsecond");
        }
    }
}
