//! Fixtures of the conformance cases: every algorithm in every form that a store may store differently, and costs and
//! times at which a limit is about to change its verdict.

use super::rng::SplitMix64;
use crate::algorithm::Algorithm;
use crate::calendar::{Calendar, CalendarUnit};
use crate::cost::Cost;
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::rate::{Period, Rate};
use crate::time::TimeDelta;

pub(super) fn build(spec: LimitSpec) -> Limit {
    spec.build().expect("the suite's limits are in range")
}

pub(super) fn per_minute(algorithm: Algorithm, count: u64) -> Limit {
    build(LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(60))))
}

/// Returns every algorithm, in every form that a store may store differently.
pub(super) fn every_limit() -> Vec<Limit> {
    let spec = |algorithm, count, span| LimitSpec::new(algorithm, Rate::per(count, span));
    let minute = TimeDelta::from_secs(60);
    let zone = Calendar::new(CalendarUnit::Day, "Europe/Zurich").expect("a zone of the bundled database");
    let day = Rate { count: 7, period: Period::Calendar(zone) };
    vec![
        build(spec(Algorithm::Gcra, 10, minute)),
        build(spec(Algorithm::Gcra, 7, TimeDelta::from_secs(1)).burst(3)),
        // The TAT of this limit needs more than a word.
        build(spec(Algorithm::Gcra, 99_991, TimeDelta::from_secs(86_400)).burst(5)),
        build(spec(Algorithm::Gcra, 0, minute)),
        build(spec(Algorithm::TokenBucket, 3, TimeDelta::from_millis(7)).burst(9)),
        // Refilled at intervals: ten tokens, a fraction of one, each key at its own time, more than a word.
        build(spec(Algorithm::TokenBucket, 60, minute).burst(20).refill_interval(TimeDelta::from_secs(10))),
        build(
            spec(Algorithm::TokenBucket, 7, TimeDelta::from_secs(1))
                .refill_interval(TimeDelta::from_millis(300)),
        ),
        build(spec(Algorithm::TokenBucket, 6, minute).refill_interval(TimeDelta::from_secs(90)).jitter()),
        build(
            spec(Algorithm::TokenBucket, 99_991, TimeDelta::from_secs(86_400))
                .burst(8)
                .refill_interval(minute),
        ),
        build(spec(Algorithm::LeakyBucket, 5, minute)),
        build(spec(Algorithm::LeakyBucket, 5, TimeDelta::from_secs(1)).burst(8).with_delay()),
        build(spec(Algorithm::FixedWindow, 6, TimeDelta::from_secs(1))),
        build(spec(Algorithm::FixedWindow, 0, TimeDelta::from_secs(1))),
        build(spec(Algorithm::FixedWindow, 6, TimeDelta::from_secs(90)).jitter()),
        build(spec(Algorithm::FixedWindow, 1 << 40, TimeDelta::from_millis(1))),
        build(LimitSpec::new(Algorithm::FixedWindow, day)),
        build(spec(Algorithm::SlidingWindow, 8, TimeDelta::from_secs(1))),
        build(spec(Algorithm::SlidingWindow, 8, minute).jitter()),
        build(spec(Algorithm::SlidingWindow, 1 << 39, TimeDelta::from_secs(1))),
        build(spec(Algorithm::StrictWindow, 8, minute).jitter()),
        build(spec(Algorithm::StrictWindow, 8, TimeDelta::from_secs(1)).slots(7)),
        build(spec(Algorithm::SlidingLog, 8, TimeDelta::from_secs(1))),
        build(spec(Algorithm::Concurrency, 5, TimeDelta::from_secs(30))),
    ]
}

pub(super) fn attempts() -> [Limit; 2] {
    let spec = |span| LimitSpec::new(Algorithm::FixedWindow, Rate::per(4, span)).count_denied();
    [build(spec(TimeDelta::from_secs(1))), build(spec(TimeDelta::from_millis(5)))]
}

/// Returns a cost that fits easily, barely, or not at all; occasionally a peek or a refund.
pub(super) fn some_cost(rng: &mut SplitMix64, limit: &Limit) -> Cost {
    match rng.below(12) {
        0 => Cost::PEEK,
        1 => Cost::refund(1 + rng.below(3)),
        2 => Cost::new(limit.capacity() + rng.below(2)),
        3 | 4 => Cost::new(1 + rng.below(limit.capacity().max(1))),
        _ => Cost::new(1 + rng.below(3)),
    }
}

/// Returns a time step that fits the limit: zero, a microsecond, part of an interval, periods.
pub(super) fn some_time(rng: &mut SplitMix64, limit: &Limit) -> u64 {
    let period = limit.rate().period.length().as_micros();
    match rng.below(10) {
        0..=3 => 0,
        4 => 1,
        5..=7 => rng.below(2 * period / limit.rate().count.clamp(1, 100) + 1),
        8 => rng.below(period),
        _ => rng.below(3 * period),
    }
}
