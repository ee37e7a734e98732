//! Token buckets that are refilled at intervals, against a count of tokens and a count of refills.

use crate::traces::{START, micros, refill_interval, stepped_limits, traffic};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, State, TimeDelta, Timestamp, Verdict, nonzero};

proptest! {
    /// Without it a caller gets tokens between two refills, misses some at one, or gets a wrong time.
    #[test]
    fn it_counts_as_tokens_that_are_added_at_each_interval((limit, arrivals) in traffic(stepped_limits())) {
        // Tokens times the period, so that a refill of a fraction of a token is a whole number.
        let (period, interval) = (u128::from(micros(&limit)), refill_interval(&limit));
        let refill = u128::from(limit.rate().count) * u128::from(interval);
        let full = u128::from(limit.capacity()) * period;
        // The time to the refill after which the bucket holds this much.
        let until = |now: Timestamp, tokens: u128, wanted: u128| {
            let refills = u64::try_from(wanted.saturating_sub(tokens).div_ceil(refill)).expect("a few");
            (refills * interval).saturating_sub(now.as_micros() % interval)
        };
        let (mut tokens, mut state, mut now) = (full, State::default(), START);
        for arrival in arrivals {
            let before = now;
            now = now + TimeDelta::from_micros(arrival.gap);
            let refills = now.as_micros() / interval - before.as_micros() / interval;
            tokens = full.min(tokens + u128::from(refills) * refill);
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            let price = u128::from(arrival.cost) * period;
            prop_assert_eq!(outcome.verdict.is_allowed(), price <= tokens);
            match outcome.verdict {
                Verdict::Denied { retry_after: Some(wait) } => prop_assert_eq!(wait.as_micros(), until(now, tokens, price)),
                Verdict::Denied { retry_after: None } => prop_assert!(price > full),
                _ => tokens -= price,
            }
            prop_assert_eq!(u128::from(outcome.remaining), tokens / period);
            prop_assert_eq!(outcome.reset_after.as_micros(), until(now, tokens, full));
        }
    }

    /// Without it a store forgets what a caller has used before the bucket is full, or keeps it forever.
    #[test]
    fn a_state_expires_when_the_bucket_is_full((limit, arrivals) in traffic(stepped_limits())) {
        let (mut state, mut now) = (State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            if outcome.reset_after > TimeDelta::ZERO {
                prop_assert_eq!(limit.expires(&state), now + outcome.reset_after);
                prop_assert!(outcome.reset_after <= limit.retention());
            }
        }
    }
}

/// The bucket of the usual textbook script: `max_tokens`, `refill_rate` tokens every `refill_interval`.
#[test]
fn tokens_arrive_together_at_each_interval() {
    let limit = LimitSpec::new(Algorithm::TokenBucket, Rate::per_second(nonzero!(10)))
        .burst(100)
        .refill_interval(TimeDelta::from_secs(1))
        .build()
        .expect("a limit");
    let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    let at = |millis| now + TimeDelta::from_millis(millis);
    assert_eq!(limit.step(&mut state, at(0), Cost::new(95)).remaining, 5);
    assert_eq!(limit.step(&mut state, at(999), Cost::PEEK).remaining, 5, "nothing between two refills");
    assert_eq!(limit.step(&mut state, at(1_000), Cost::PEEK).remaining, 15);
    assert_eq!(limit.step(&mut state, at(3_500), Cost::PEEK).remaining, 35);
    let denied = limit.step(&mut state, at(3_500), Cost::new(46));
    assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_millis(1_500)) });
    assert_eq!(denied.reset_after, TimeDelta::from_millis(6_500));
    assert_eq!(limit.step(&mut state, at(60_000), Cost::PEEK).remaining, 100, "never more than it holds");
}

/// A reservation that is settled after a refill gets back only what the refill has not restored.
#[test]
fn a_late_refund_returns_what_no_refill_has() {
    let limit = LimitSpec::new(Algorithm::TokenBucket, Rate::per_minute(nonzero!(60)))
        .burst(30)
        .refill_interval(TimeDelta::from_secs(10))
        .build()
        .expect("a limit");
    let taken = Timestamp::from_secs(1_009);
    for (later, units) in [(taken, 25), (Timestamp::from_secs(1_010), 15), (Timestamp::from_secs(1_030), 0)] {
        assert_eq!(limit.refundable(25, taken, later), units);
        let (mut state, mut unused) = (State::default(), State::default());
        let _ = limit.step(&mut state, taken, Cost::new(25));
        if let Some((finer, cost)) = limit.refund(25, 25, taken, later) {
            let _ = finer.step(&mut state, later, cost);
        }
        let expected = limit.step(&mut unused, later, Cost::PEEK);
        assert_eq!(limit.step(&mut state, later, Cost::PEEK), expected);
    }
}

#[test]
fn only_token_buckets_have_an_interval() {
    let interval = TimeDelta::from_secs(10);
    for algorithm in Algorithm::ALL {
        let spec = LimitSpec::new(algorithm, Rate::per_minute(nonzero!(60))).refill_interval(interval);
        assert_eq!(spec.build().is_ok(), algorithm == Algorithm::TokenBucket, "{algorithm}");
    }
    let spec = LimitSpec::new(Algorithm::TokenBucket, Rate::per_minute(nonzero!(60)));
    assert!(spec.clone().refill_interval(TimeDelta::from_micros(10)).build().is_err());
    let limit = spec.refill_interval(interval).jitter().build().expect("a limit");
    assert_eq!(limit.to_string(), "token_bucket 60/1m refilled every 10s");
    assert_eq!(limit.spec().build(), Ok(limit.clone()));
    assert_eq!(limit.per_node_share(4).refill_interval(), Some(interval));
    assert!(limit.phase(u64::MAX) < interval && limit.packed().is_none() && !limit.is_leasable());
}
