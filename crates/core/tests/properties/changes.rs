//! Limits that change between requests, up and down and back again: a tier, an override, a new revision of the rules.
//! What one of them has counted the others count too, and no change makes room that neither of two limits has.

use crate::traces::{START, micros};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, TimeDelta, Timestamp, Verdict};

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
}

/// Buckets that may charge the same counter: counts and bursts of one period, or whole limits stated with each call.
fn tiers() -> impl Strategy<Value = Vec<Limit>> {
    let count = prop_oneof![1_u64..10, 1_u64..200, Just(1_000_u64), Just(4_999), Just(5_000), Just(99_991)];
    let period = prop_oneof![Just(1_000_000_u64), Just(60_000_000), 1_000_u64..5_000_000];
    let stated = (count.clone(), period.clone(), 1_u64..300);
    let same = (period, proptest::collection::vec((count, prop_oneof![Just(0_u64), 1_u64..300]), 2..4));
    let limit = |count, period, burst: u64| {
        let spec = LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_micros(period)));
        LimitSpec { burst: (burst > 0).then_some(burst), ..spec }
    };
    prop_oneof![
        same.prop_map(move |(period, tiers)| {
            let build =
                |(count, burst): &(u64, u64)| limit(*count, period, *burst).build().expect("in range");
            tiers.iter().map(build).collect::<Vec<Limit>>()
        }),
        proptest::collection::vec(stated, 2..4).prop_map(move |calls| {
            let build = |(count, period, burst): &(u64, u64, u64)| {
                limit(*count, *period, *burst).any_period().build().expect("in range")
            };
            calls.iter().map(build).collect()
        }),
    ]
}

/// Units that were used, as a limit counts them; `None` if it has nothing left.
fn used(limit: &Limit, state: &State, now: Timestamp) -> Option<u64> {
    let left = remaining(limit, state, now);
    (left > 0).then(|| limit.capacity() - left)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Without it an upgraded caller finds its new limit used up, or a downgraded one a fresh one: right after a charge
    /// every limit counts the same units as used, but for a rounding.
    #[test]
    fn buckets_count_the_same_units_under_every_limit(family in tiers(), requests in requests()) {
        play(&family, &requests, |_, _, (_, state), _, now| {
            let each: Vec<u64> = family.iter().filter_map(|limit| used(limit, state, now)).collect();
            let (least, most) = (each.iter().min().copied().unwrap_or(0), each.iter().max().copied().unwrap_or(0));
            prop_assert!(most - least <= 1, "{each:?}");
            for limit in family.iter().filter(|limit| used(limit, state, now).is_none()) {
                prop_assert!(limit.capacity() >= 1 && each.iter().all(|used| used + 1 >= limit.capacity()), "{each:?} of {limit}");
            }
            Ok(())
        })?;
    }

    /// Without it going down and up again admits more than the largest of the limits ever did: over any span no more
    /// than the largest burst and what the fastest rate restores.
    #[test]
    fn changing_buckets_admit_no_more_than_the_largest(family in tiers(), requests in requests()) {
        let mut log: Vec<(Timestamp, u64)> = Vec::new();
        play(&family, &requests, |_, units, _, admitted, now| {
            log.extend((admitted && units > 0).then_some((now, units)));
            Ok(())
        })?;
        let burst = family.iter().map(Limit::capacity).max().unwrap_or(0);
        let per_micro = |limit: &Limit| limit.rate().count as f64 / micros(limit) as f64;
        let rate = family.iter().map(per_micro).fold(0.0, f64::max);
        for (first, (from, _)) in log.iter().enumerate() {
            let mut admitted = 0;
            for (to, units) in &log[first..] {
                admitted += units;
                let most = burst as f64 + rate * to.since(*from).as_micros() as f64;
                prop_assert!(admitted as f64 <= most * (1.0 + 1e-12), "{admitted} of {most}");
            }
        }
    }

    /// Without it a denied caller retries too early, or later than it must: also while the debt is of
    /// another limit.
    #[test]
    fn a_denial_under_another_limit_ends_at_its_reset(family in tiers(), requests in requests()) {
        play(&family, &requests, |limit, _, (_, state), _, now| {
            for other in &family {
                let ask = |at: Timestamp| other.step(&mut state.clone(), at, Cost::new(other.capacity())).verdict;
                if let Verdict::Denied { retry_after: Some(wait) } = ask(now) {
                    let then = now + wait;
                    prop_assert!(ask(then).is_allowed(), "{other} after {limit}");
                    prop_assert!(ask(then - TimeDelta::from_micros(1)).is_denied(), "{other} after {limit}");
                }
            }
            Ok(())
        })?;
    }

    /// Without it a settlement under a smaller limit cuts off what a larger one has counted.
    #[test]
    fn a_refund_under_another_limit_gives_back_no_more_than_its_units(
        family in tiers(), requests in requests(), units in 1_u64..40, whose in any::<prop::sample::Index>(),
    ) {
        play(&family, &requests, |_, _, (_, state), _, now| {
            let refunds = whose.get(&family);
            prop_assume!(units < refunds.refill_cost());
            let mut after = state.clone();
            let _ = refunds.step(&mut after, now, Cost::refund(units));
            for limit in &family {
                prop_assert!(remaining(limit, &after, now) <= remaining(limit, state, now) + units + 1);
                prop_assert!(remaining(limit, &after, now) >= remaining(limit, state, now));
            }
            let mut cleared = state.clone();
            let _ = refunds.step(&mut cleared, now, Cost::refund(u64::MAX));
            prop_assert!(family.iter().all(|limit| remaining(limit, &cleared, now) == limit.capacity()));
            Ok(())
        })?;
    }
}

/// The issue as it was found: 100 a minute, used up, becomes 5,000 a minute, and back.
#[test]
fn an_upgrade_gives_its_new_room_at_once_and_a_downgrade_mints_nothing() {
    let per_minute = |count| {
        LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(60))).build().expect("in range")
    };
    let (free, pro) = (per_minute(100), per_minute(5_000));
    let mut state = State::default();
    assert!(free.step(&mut state, START, Cost::new(100)).verdict.is_allowed());
    let seen = pro.step(&mut state, START, Cost::PEEK);
    assert_eq!((seen.remaining, seen.reset_after), (4_900, TimeDelta::from_secs(60)));
    assert!(free.step(&mut state, START, Cost::ONE).verdict.is_denied(), "a look changed nothing");
    assert_eq!(pro.step(&mut state, START, Cost::new(2_900)).remaining, 2_000);
    for _ in 0..5 {
        let denied = free.step(&mut state, START, Cost::ONE);
        // 2,901 units at 5,000 a minute: a downgrade keeps the rate at which its debt is paid.
        assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_millis(34_812)) });
        assert_eq!(pro.step(&mut state, START, Cost::PEEK).remaining, 2_000);
    }
    assert!(pro.step(&mut state, START, Cost::new(2_001)).verdict.is_denied());
    assert_eq!(pro.step(&mut state, START, Cost::new(2_000)).remaining, 0);
}
