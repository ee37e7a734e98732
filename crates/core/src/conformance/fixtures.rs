//! What the cases are made of: every algorithm in every form that a store may keep differently, and costs and times that
//! fall where a limit is about to change its mind.

use super::rng::SplitMix64;
use crate::algorithm::Algorithm;
use crate::calendar::{Calendar, CalendarUnit};
use crate::cost::Cost;
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::rate::{Period, Quota};
use crate::time::Span;

pub(super) fn build(spec: LimitSpec) -> Limit {
    spec.build().expect("the suite's limits are in range")
}

pub(super) fn per_minute(algorithm: Algorithm, count: u64) -> Limit {
    build(LimitSpec::new(algorithm, Quota::per_minute(count)))
}

/// Every algorithm, in every form that a store may keep differently.
pub(super) fn every_form() -> Vec<Limit> {
    let spec = |algorithm, count, span| LimitSpec::new(algorithm, Quota::per(count, span));
    let minute = Span::from_secs(60);
    let zone = Calendar::new(CalendarUnit::Day, "Europe/Zurich").expect("a zone of the bundled database");
    let day = Quota { count: 7, period: Period::Calendar(zone) };
    vec![
        build(spec(Algorithm::Gcra, 10, minute)),
        build(spec(Algorithm::Gcra, 7, Span::from_secs(1)).burst(3)),
        // Its TAT needs more than a word.
        build(spec(Algorithm::Gcra, 99_991, Span::from_secs(86_400)).burst(5)),
        build(spec(Algorithm::Gcra, 0, minute)),
        build(spec(Algorithm::TokenBucket, 3, Span::from_millis(7)).burst(9)),
        build(spec(Algorithm::LeakyBucket, 5, minute)),
        build(spec(Algorithm::LeakyBucket, 5, Span::from_secs(1)).burst(8).delays()),
        build(spec(Algorithm::FixedWindow, 6, Span::from_secs(1))),
        build(spec(Algorithm::FixedWindow, 0, Span::from_secs(1))),
        build(spec(Algorithm::FixedWindow, 6, Span::from_secs(90)).jitter()),
        build(spec(Algorithm::FixedWindow, 1 << 40, Span::from_millis(1))),
        build(LimitSpec::new(Algorithm::FixedWindow, day)),
        build(spec(Algorithm::SlidingWindow, 8, Span::from_secs(1))),
        build(spec(Algorithm::SlidingWindow, 8, minute).jitter()),
        build(spec(Algorithm::SlidingWindow, 1 << 39, Span::from_secs(1))),
        build(spec(Algorithm::StrictWindow, 8, minute).jitter()),
        build(spec(Algorithm::StrictWindow, 8, Span::from_secs(1)).slots(7)),
        build(spec(Algorithm::SlidingLog, 8, Span::from_secs(1))),
        build(spec(Algorithm::Concurrency, 5, Span::from_secs(30))),
    ]
}

pub(super) fn attempts() -> [Limit; 2] {
    let spec = |span| LimitSpec::new(Algorithm::FixedWindow, Quota::per(4, span)).counts_attempts();
    [build(spec(Span::from_secs(1))), build(spec(Span::from_millis(5)))]
}

/// A cost that fits easily, just, or not at all; now and then a look or a refund.
pub(super) fn some_cost(dice: &mut SplitMix64, limit: &Limit) -> Cost {
    match dice.below(12) {
        0 => Cost::LOOK,
        1 => Cost::refund(1 + dice.below(3)),
        2 => Cost::take(limit.capacity() + dice.below(2)),
        3 | 4 => Cost::take(1 + dice.below(limit.capacity().max(1))),
        _ => Cost::take(1 + dice.below(3)),
    }
}

/// A step of time that fits the limit: none, a microsecond, part of an interval, periods.
pub(super) fn some_time(dice: &mut SplitMix64, limit: &Limit) -> u64 {
    let period = limit.quota().period.length().as_micros();
    match dice.below(10) {
        0..=3 => 0,
        4 => 1,
        5..=7 => dice.below(2 * period / limit.quota().count.clamp(1, 100) + 1),
        8 => dice.below(period),
        _ => dice.below(3 * period),
    }
}
