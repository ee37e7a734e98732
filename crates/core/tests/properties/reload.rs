//! An operator changes a number while traffic flows: what has been used stays used.

use crate::traces::START;
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, TimeDelta, nonzero};

fn gcra(count: u64, burst: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(1)))
        .burst(burst)
        .build()
        .expect("in range")
}

proptest! {
    /// Without it every change of a rate gives all of its keys a fresh burst, or locks them until the bucket would be
    /// full: the state must mean the same instant to the new rate, narrow or wide.
    #[test]
    fn a_changed_rate_keeps_when_the_bucket_is_full(
        old in prop_oneof![1_u64..5_000, Just(99_991_u64), Just(4_294_967_291)],
        new in prop_oneof![1_u64..5_000, Just(99_991_u64), Just(4_294_967_291)],
        used in 1_u64..=100,
    ) {
        // Bursts of ten seconds each, so that the debt carries over whole.
        let (before, after) = (gcra(old, 10 * old), gcra(new, 10 * new));
        let mut state = State::default();
        let was = before.step(&mut state, START, Cost::new(10 * old * used / 100)).reset_after.as_micros();
        let is = after.step(&mut state, START, Cost::PEEK).reset_after.as_micros();
        prop_assert!(is.abs_diff(was) <= 1, "full after {is} us, was {was} us");
    }
}

proptest! {
    /// Without it a key that a limit of a shorter burst denies has used less afterwards.
    #[test]
    fn a_limit_of_the_same_period_takes_nothing_from_what_another_counted(
        old in (1_u64..500, 1_u64..500), new in (1_u64..500, 1_u64..500), used in 1_u64..=100, cost in 0_u64..600,
    ) {
        // No burst is above its count: none takes longer than a period to come back.
        let (before, after) = (gcra(old.0, old.1.min(old.0)), gcra(new.0, new.1.min(new.0)));
        let mut state = State::default();
        let taken = (before.capacity() * used).div_ceil(100);
        let was = before.step(&mut state, START, Cost::new(taken));
        let other = after.step(&mut state, START, Cost::new(cost));
        if cost > 0 && other.verdict.is_allowed() {
            return Ok(());
        }
        let is = before.step(&mut state, START, Cost::PEEK);
        prop_assert_eq!((is.remaining, is.reset_after), (was.remaining, was.reset_after));
        // And all of it can be given back.
        let _ = after.step(&mut state, START, Cost::refund(after.refill_cost()));
        prop_assert_eq!(before.step(&mut state, START, Cost::PEEK).remaining, before.capacity());
    }
}

/// Without it a window whose count is lowered below what was used starts again, or counts on for ever.
#[test]
fn a_lowered_window_stays_used_and_turns_in_time() {
    for algorithm in
        [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::StrictWindow, Algorithm::SlidingLog]
    {
        let build = |count| {
            LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(1))).build().expect("in range")
        };
        let mut state = State::default();
        assert!(build(100).step(&mut state, START, Cost::new(90)).verdict.is_allowed());
        let lowered = build(10);
        let denied = lowered.step(&mut state, START, Cost::ONE);
        assert!(denied.verdict.is_denied(), "{algorithm} forgot");
        assert_eq!(denied.remaining, 0);
        lowered.debit(tollgate_core::PermitId::ANONYMOUS, &mut state, START, 5);
        assert!(lowered.step(&mut state, START + lowered.retention(), Cost::new(10)).verdict.is_allowed());
    }
}

/// Without it a spec says something that the limit silently does not do.
#[test]
fn meaningless_options_are_rejected() {
    let rate = Rate::per_second(nonzero!(1));
    for algorithm in Algorithm::ALL {
        let plain = || LimitSpec::new(algorithm, rate.clone());
        assert!(plain().build().is_ok());
        assert_eq!(plain().burst(1).build().is_ok(), algorithm.has_burst(), "burst of {algorithm}");
        assert_eq!(plain().jitter().build().is_ok(), algorithm.has_windows(), "jitter of {algorithm}");
        assert_eq!(
            plain().with_delay().build().is_ok(),
            algorithm == Algorithm::LeakyBucket,
            "delays of {algorithm}"
        );
        assert_eq!(
            plain().slots(4).build().is_ok(),
            algorithm == Algorithm::StrictWindow,
            "slots of {algorithm}"
        );
        assert_eq!(
            plain().count_denied().build().is_ok(),
            algorithm == Algorithm::FixedWindow,
            "attempts of {algorithm}"
        );
    }
    let slow = LimitSpec::new(Algorithm::Gcra, Rate::per_day(nonzero!(1))).burst(Rate::MAX_COUNT).build();
    assert_eq!(slow, Err(tollgate_core::LimitError::TooSlow));
    let short = LimitSpec::new(Algorithm::Gcra, Rate::per(1, TimeDelta::from_micros(999))).build();
    assert_eq!(short, Err(tollgate_core::LimitError::Period(TimeDelta::from_micros(999))));
}
