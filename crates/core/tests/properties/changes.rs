//! Limits that change between requests, up and down and back again: a tier, an override, a new revision of the rules.
//! What one of them has counted the others count too, and no change makes room that neither of two limits has.

use crate::traces::{START, micros};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, TimeDelta, Timestamp};

const COUNTING: [Algorithm; 4] =
    [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::StrictWindow, Algorithm::SlidingLog];
const BUCKETS: [Algorithm; 2] = [Algorithm::Gcra, Algorithm::LeakyBucket];

/// Limits of one algorithm and one period: what may charge the same counter.
fn family(algorithms: &'static [Algorithm]) -> impl Strategy<Value = Vec<Limit>> {
    let count = prop_oneof![1_u64..10, 1_u64..200, Just(1_000_u64), Just(4_999)];
    let period = prop_oneof![Just(1_000_000_u64), Just(60_000_000), 1_000_u64..5_000_000];
    (proptest::sample::select(algorithms), period, proptest::collection::vec(count, 2..5)).prop_map(
        |(algorithm, period, counts)| {
            let rate = |count| Rate::per(count, TimeDelta::from_micros(period));
            let build = |count| LimitSpec::new(algorithm, rate(count)).build().expect("in range");
            counts.into_iter().map(build).collect()
        },
    )
}

/// One request: which limit, the share of its capacity in percent, and how long after the one before.
type Request = (prop::sample::Index, u64, u64);

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let gap = prop_oneof![3 => Just(0_u64), 3 => 0_u64..20, 1 => 0_u64..120];
    proptest::collection::vec((any::<prop::sample::Index>(), 0_u64..=110, gap), 1..60)
}

/// Plays a trace; `then` sees each request's limit and units, the states before and after, and whether it was admitted.
fn play(
    family: &[Limit],
    requests: &[Request],
    mut then: impl FnMut(&Limit, u64, (&State, &State), bool, Timestamp) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let (mut state, mut now) = (State::default(), START);
    for (which, share, gap) in requests {
        let limit = which.get(family);
        now = now + TimeDelta::from_micros(micros(limit) * gap / 100);
        let units = (limit.capacity() * share).div_ceil(100);
        let before = state.clone();
        let admitted = limit.step(&mut state, now, Cost::new(units)).verdict.is_allowed();
        then(limit, units, (&before, &state), admitted, now)?;
    }
    Ok(())
}

fn remaining(limit: &Limit, state: &State, now: Timestamp) -> u64 {
    limit.step(&mut state.clone(), now, Cost::PEEK).remaining
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Without it a caller whose window was raised from 100 to 5,000 is denied, or one whose limit was lowered for a
    /// moment starts again: all limits must see the same units as used.
    #[test]
    fn windows_and_logs_count_the_same_units_under_every_limit(family in family(&COUNTING), requests in requests()) {
        play(&family, &requests, |_, _, (_, state), _, now| {
            let used = family.iter().filter_map(|limit| {
                let left = remaining(limit, state, now);
                (left > 0).then(|| limit.capacity() - left)
            });
            let used: Vec<u64> = used.collect();
            prop_assert!(used.windows(2).all(|pair| pair[0] == pair[1]), "{used:?}");
            // What leaves nothing to a smaller limit is at least its capacity.
            for limit in family.iter().filter(|limit| remaining(limit, state, now) == 0) {
                prop_assert!(used.iter().all(|used| *used >= limit.capacity()));
            }
            Ok(())
        })?;
    }

    /// Without it going down and up again admits more than the largest of the limits ever did.
    #[test]
    fn no_window_admits_more_than_the_largest_limit(family in family(&COUNTING), requests in requests()) {
        let mut log: Vec<(Timestamp, u64)> = Vec::new();
        play(&family, &requests, |_, units, _, admitted, now| {
            log.extend(admitted.then_some((now, units)));
            Ok(())
        })?;
        let (period, algorithm) = (micros(&family[0]), family[0].algorithm());
        let largest = family.iter().map(Limit::capacity).max().unwrap_or(0);
        for (from, _) in &log {
            let in_window = |at: &Timestamp| match algorithm {
                // These two promise it for their own windows.
                Algorithm::FixedWindow | Algorithm::SlidingWindow => at.as_micros() / period == from.as_micros() / period,
                _ => at >= from && at.since(*from) < TimeDelta::from_micros(period),
            };
            let inside: u64 = log.iter().filter(|(at, _)| in_window(at)).map(|(_, units)| units).sum();
            prop_assert!(inside <= largest, "{inside} of {largest}");
        }
    }

    /// Without it a request under another limit, admitted or denied, gives a bucket room that it had not.
    #[test]
    fn no_request_under_another_limit_makes_room_in_a_bucket(family in family(&BUCKETS), requests in requests()) {
        play(&family, &requests, |_, _, (before, after), _, now| {
            for limit in &family {
                // A fraction of a microsecond is lost where two rates count in different ones: less than a unit of any.
                prop_assert!(remaining(limit, after, now) <= remaining(limit, before, now) + 1);
            }
            Ok(())
        })?;
    }

    /// Without it a bucket whose limit changes again and again admits more than one limit after another would: a unit
    /// takes the time in which its own limit restores one, and a period has only so much of it.
    #[test]
    fn units_of_changing_buckets_share_one_time(family in family(&BUCKETS), requests in requests()) {
        let mut log: Vec<(Timestamp, f64)> = Vec::new();
        play(&family, &requests, |limit, units, _, admitted, now| {
            log.extend(admitted.then(|| (now, units as f64 / limit.rate().count as f64)));
            Ok(())
        })?;
        let period = micros(&family[0]) as f64;
        for (first, (from, _)) in log.iter().enumerate() {
            for (last, (to, _)) in log.iter().enumerate().skip(first) {
                let periods: f64 = log[first..=last].iter().map(|(_, share)| share).sum();
                let most = 1.0 + to.since(*from).as_micros() as f64 / period;
                // Each change of the rate may lose a fraction of a microsecond.
                let rounding = (last - first + 1) as f64 / period;
                prop_assert!(periods <= most + rounding + 1e-9, "{periods} of {most} periods");
            }
        }
    }
}
