//! Random limits and random arrivals, in proportion to each other: most arrivals fall where a limit is about to change
//! its mind.

use proptest::collection::vec;
use proptest::prelude::*;
use tollgate_core::{Algorithm, Limit, LimitSpec, Rate, TimeDelta, Timestamp};

/// Where traces start: a usual day.
pub(crate) const START: Timestamp = Timestamp::from_secs(1_700_000_000);

/// One request: how long after the one before, and what it costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) gap: u64,
    pub(crate) cost: u64,
}

pub(crate) fn micros(limit: &Limit) -> u64 {
    limit.rate().period.length().as_micros()
}

/// The interval of a bucket that is refilled in steps; 0 for others.
pub(crate) fn refill_interval(limit: &Limit) -> u64 {
    limit.refill_interval().map_or(0, TimeDelta::as_micros)
}

/// Limits of one algorithm, small enough that a short trace exhausts them.
pub(crate) fn limits_of(algorithm: Algorithm) -> BoxedStrategy<Limit> {
    let period = prop_oneof![
        Just(1_000_u64),
        Just(7_000),
        Just(1_000_000),
        Just(60_000_000),
        1_000_u64..5_000,
        1_000_u64..10_000_000
    ];
    let count = prop_oneof![1_u64..8, 1_u64..60, Just(2_039_u64), Just(99_991)];
    (period, count, 1_u64..60, 1_u64..=120, any::<bool>())
        .prop_map(move |(period, count, burst, slots, delays)| {
            let mut spec = LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_micros(period)));
            if algorithm.has_burst() {
                spec.burst = Some(burst);
            } else {
                spec.rate.count = count.min(60);
            }
            spec.delay = delays && algorithm == Algorithm::LeakyBucket;
            spec.slots = (algorithm == Algorithm::StrictWindow).then_some(slots);
            spec.build().expect("a limit in range")
        })
        .boxed()
}

/// Token buckets that are refilled at intervals: several units, one, or a fraction of one at a time.
pub(crate) fn stepped_limits() -> BoxedStrategy<Limit> {
    let interval =
        prop_oneof![Just(1_000_u64), Just(10_000), Just(1_000_000), 1_000_u64..5_000, 1_000_u64..20_000_000];
    (limits_of(Algorithm::TokenBucket), interval)
        .prop_map(|(limit, interval)| {
            let spec = limit.spec().refill_interval(TimeDelta::from_micros(interval));
            spec.build().expect("a limit in range")
        })
        .boxed()
}

/// Limits of every algorithm.
pub(crate) fn limits() -> BoxedStrategy<Limit> {
    let every = proptest::sample::select(Algorithm::ALL.to_vec()).prop_flat_map(limits_of);
    prop_oneof![8 => every, 1 => stepped_limits()].boxed()
}

/// Time between two requests: none, one microsecond, about an interval, about a period.
pub(crate) fn gaps(limit: &Limit) -> BoxedStrategy<u64> {
    let period = micros(limit);
    let interval = (period / limit.rate().count.max(1)).max(1);
    prop_oneof![3 => Just(0), 1 => Just(1), 4 => 0..=2 * interval, 1 => 0..=period, 1 => 0..=3 * period]
        .boxed()
}

/// Costs that fit easily, just, and not at all.
pub(crate) fn costs(limit: &Limit) -> BoxedStrategy<u64> {
    let capacity = limit.capacity().max(1);
    prop_oneof![6 => 1..=3_u64, 2 => 1..=capacity, 1 => capacity..=capacity + 2].boxed()
}

/// A limit and requests that fit its measures.
pub(crate) fn traffic(limits: BoxedStrategy<Limit>) -> impl Strategy<Value = (Limit, Vec<Arrival>)> {
    limits.prop_flat_map(|limit| {
        let arrival = (gaps(&limit), costs(&limit)).prop_map(|(gap, cost)| Arrival { gap, cost });
        (Just(limit), vec(arrival, 1..60))
    })
}

/// What an exact log keeps of an admitted request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admitted {
    pub(crate) at: Timestamp,
    pub(crate) units: u64,
}

/// The requests that `limit` admits, in order.
pub(crate) fn admitted(limit: &Limit, arrivals: &[Arrival]) -> Vec<Admitted> {
    let (mut state, mut now) = (tollgate_core::State::default(), START);
    let mut log = Vec::new();
    for arrival in arrivals {
        now = now + TimeDelta::from_micros(arrival.gap);
        let outcome = limit.step(&mut state, now, tollgate_core::Cost::new(arrival.cost));
        if outcome.verdict.is_allowed() {
            log.push(Admitted { at: now, units: arrival.cost });
        }
    }
    log
}
