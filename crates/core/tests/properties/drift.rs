//! No step rounds: a bucket that has counted a thousand million units stands where the rational says it does.

use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, TimeDelta, Timestamp, nonzero};

const BILLION: u64 = 1_000_000_000;

/// Rates that no whole number of microseconds divides, narrow and wide.
fn odd_rates() -> [Rate; 6] {
    [
        Rate::per_second(nonzero!(7)),
        Rate::per_minute(nonzero!(999_983)),
        Rate::per(3, TimeDelta::from_millis(7)),
        Rate::per_second(nonzero!(4_294_967_291)),
        Rate::per_day(nonzero!(99_991)),
        Rate::per(2_039, TimeDelta::from_micros(1_000_003)),
    ]
}

fn build(rate: Rate, burst: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, rate).burst(burst).build().expect("in range")
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Asserts that the TAT is `from + units * period / count`, as rationals.
fn assert_exact(limit: &Limit, state: &State, from: Timestamp, units: u64) {
    let State::Bucket(tat) = state else { panic!("a bucket keeps a TAT, not {state:?}") };
    let (count, period) =
        (u128::from(limit.rate().count), u128::from(limit.rate().period.length().as_micros()));
    let scale = gcd(count, period);
    let (k, interval) = (count / scale, period / scale);
    let stands = u128::from(tat.micros) * k + u128::from(tat.fraction);
    assert_eq!(stands, u128::from(from.as_micros()) * k + u128::from(units) * interval, "{limit}");
    assert!(u128::from(tat.fraction) < k);
}

/// Without it a limit of 7 a second becomes 6.999 in a month, and two stores that started together drift apart.
#[test]
fn a_billion_units_end_on_the_exact_value() {
    let now = Timestamp::from_secs(1_700_000_000);
    for rate in odd_rates() {
        let singles = 20_000;
        let limit = build(rate, BILLION);
        let mut state = State::default();
        for bulk in [1, 999_999_999 - singles - 12_345, 12_345] {
            assert!(limit.step(&mut state, now, Cost::new(bulk)).verdict.is_allowed());
        }
        for _ in 0..singles {
            assert!(limit.step(&mut state, now, Cost::ONE).verdict.is_allowed());
        }
        assert_exact(&limit, &state, now, BILLION);
        assert!(
            limit.step(&mut state, now, Cost::ONE).verdict.is_denied(),
            "the last unit of {limit} is spent"
        );
    }
}

/// Without it a caller that keeps the pace exactly is denied after long enough, or gets more than the rate.
#[test]
fn steady_caller_is_never_denied() {
    let start = Timestamp::from_secs(1_700_000_000);
    for rate in odd_rates() {
        // The caller comes at whole microseconds, up to one early: what comes due within it must fit at once.
        let limit = build(rate.clone(), 3 + rate.count / rate.period.length().as_micros());
        let (count, period) = (u128::from(rate.count), u128::from(rate.period.length().as_micros()));
        let mut state = State::default();
        let steps = 50_000_u64;
        for step in 0..steps {
            let due = u64::try_from(u128::from(step) * period / count).expect("a near future");
            let outcome = limit.step(&mut state, start + TimeDelta::from_micros(due), Cost::ONE);
            assert!(outcome.verdict.is_allowed(), "step {step} of {limit}");
        }
        assert_exact(&limit, &state, start, steps);
    }
}

/// Without it the word in the table and the state beside it part ways after enough steps.
#[test]
fn the_packed_word_does_not_drift_either() {
    let now = Timestamp::from_secs(1_700_000_000);
    let limit = build(Rate::per_second(nonzero!(7)), BILLION);
    let mut state = State::default();
    let _ = limit.step(&mut state, now, Cost::new(BILLION - 20_000));
    let (mut word, _) = limit.step_word(None, 0, now, Cost::new(BILLION - 20_000));
    for _ in 0..20_000 {
        let (next, outcome) = limit.step_word(Some(word), 0, now, Cost::ONE);
        assert_eq!(outcome, limit.step(&mut state, now, Cost::ONE));
        word = next;
    }
    let State::Bucket(tat) = state else { panic!("a bucket keeps a TAT") };
    assert_eq!((word >> 11, word & 2_047), (tat.micros, tat.fraction));
    assert_exact(&limit, &state, now, BILLION);
}
