//! `retry_after` and `reset_after` are exact: clients rely on them.

use crate::traces::{START, limits, limits_of, micros, traffic};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, TimeDelta, Timestamp, Verdict};

/// The outcome of `limit`, `wait` after `now`, without other charges.
fn probe(limit: &Limit, state: &State, now: Timestamp, wait: u64, cost: u64) -> tollgate_core::Outcome {
    limit.step(&mut state.clone(), now + TimeDelta::from_micros(wait), Cost::new(cost))
}

fn promise_holds(
    limit: &Limit,
    state: &State,
    now: Timestamp,
    cost: u64,
    promised: Option<TimeDelta>,
    at: u64,
) -> Result<(), TestCaseError> {
    let Some(wait) = promised.map(TimeDelta::as_micros) else {
        prop_assert!(cost > limit.capacity(), "it fits an unused limit");
        return Ok(());
    };
    prop_assert!(cost <= limit.capacity());
    prop_assert!(wait > 0);
    for early in [0, 1, at % wait, wait / 2, wait - 1] {
        let outcome = probe(limit, state, now, early.min(wait - 1), cost);
        // Asked again on the way, it promises the same instant.
        let rest = TimeDelta::from_micros(wait - early.min(wait - 1));
        prop_assert_eq!(outcome.verdict, Verdict::Denied { retry_after: Some(rest) });
        let is_next = outcome.next_after == rest || limit.algorithm() == Algorithm::Concurrency;
        prop_assert!(cost > 1 || is_next, "{:?}", outcome);
    }
    prop_assert!(probe(limit, state, now, wait, cost).verdict.is_allowed());
    Ok(())
}

fn with_attempts() -> BoxedStrategy<Limit> {
    let attempts = (1_000_u64..5_000_000, 1_u64..20).prop_map(|(period, count)| {
        let rate = Rate::per(count, TimeDelta::from_micros(period));
        LimitSpec::new(Algorithm::FixedWindow, rate).count_denied().build().expect("in range")
    });
    prop_oneof![8 => limits(), 1 => attempts].boxed()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Without it a client that obeys Retry-After is denied again, or waits for nothing.
    #[test]
    fn denied_until_exactly_the_promised_instant((limit, arrivals) in traffic(with_attempts()), at in any::<u64>()) {
        let (mut state, mut now) = (State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            if let Verdict::Denied { retry_after } = outcome.verdict {
                promise_holds(&limit, &state, now, arrival.cost, retry_after, at)?;
            }
        }
    }

    /// Without it a key in debt gets a wrong instant, by every algorithm that can be in debt.
    #[test]
    fn the_promise_is_exact_in_debt_too((limit, arrivals) in traffic(limits()), owed in 0_u64..200, at in any::<u64>()) {
        let (mut state, mut now) = (State::default(), START);
        for (index, arrival) in arrivals.iter().enumerate() {
            now = now + TimeDelta::from_micros(arrival.gap);
            if index % 5 == 4 {
                limit.debit(tollgate_core::PermitId::ANONYMOUS, &mut state, now, owed);
            }
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            if let Verdict::Denied { retry_after } = outcome.verdict {
                promise_holds(&limit, &state, now, arrival.cost, retry_after, at)?;
            }
        }
    }

    /// Without it a client that has taken the last unit waits for the whole limit, or is denied at the time that the response stated.
    #[test]
    fn the_next_unit_is_there_at_exactly_its_instant((limit, arrivals) in traffic(with_attempts()), owed in 0_u64..200, at in any::<u64>()) {
        let (mut state, mut now) = (State::default(), START);
        for (index, arrival) in arrivals.iter().enumerate() {
            now = now + TimeDelta::from_micros(arrival.gap);
            if index % 5 == 4 {
                limit.debit(tollgate_core::PermitId::ANONYMOUS, &mut state, now, owed);
            }
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            if outcome.remaining > 0 {
                prop_assert_eq!(outcome.next_after, TimeDelta::ZERO);
            } else if limit.algorithm() == Algorithm::Concurrency {
                // Permits come back when holders release them: their last deadline is only the latest time.
                prop_assert_eq!(outcome.next_after, outcome.reset_after);
            } else {
                promise_holds(&limit, &state, now, 1, Some(outcome.next_after), at)?;
            }
        }
    }

    /// Without it a client gets a wrong instant after a clock was set back.
    #[test]
    fn the_promise_is_exact_after_a_step_back((limit, arrivals) in traffic(limits()), back in 0_u64..40_000, at in any::<u64>()) {
        let (mut state, mut now) = (State::default(), START);
        for (index, arrival) in arrivals.iter().enumerate() {
            now = now + TimeDelta::from_micros(arrival.gap);
            if index % 7 == 6 {
                now = now - TimeDelta::from_micros(micros(&limit) * back / 10_000);
            }
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            if let Verdict::Denied { retry_after } = outcome.verdict {
                promise_holds(&limit, &state, now, arrival.cost, retry_after, at)?;
            }
        }
    }

    /// Without it the headers lie: `remaining` units pass and not one more, and the limit is unused after `reset`.
    #[test]
    fn remaining_and_reset_are_exact((limit, arrivals) in traffic(limits())) {
        let (mut state, mut now) = (State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            prop_assert!(probe(&limit, &state, now, 0, outcome.remaining).verdict.is_allowed());
            prop_assert!(probe(&limit, &state, now, 0, outcome.remaining + 1).verdict.is_denied());
            let reset = outcome.reset_after.as_micros();
            prop_assert_eq!(probe(&limit, &state, now, reset, 0).remaining, limit.capacity());
            if outcome.remaining < limit.capacity() {
                prop_assert!(reset > 0);
                prop_assert!(probe(&limit, &state, now, reset - 1, 0).remaining < limit.capacity());
            }
        }
    }

    /// Without it the last retry of a bucket that is nearly empty at an odd rate comes a microsecond early.
    #[test]
    fn odd_rates_round_the_wait_up((limit, arrivals) in traffic(limits_of(Algorithm::Gcra)), at in any::<u64>()) {
        let (mut state, mut now) = (State::default(), START);
        let _ = limit.step(&mut state, now, Cost::new(limit.capacity()));
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap % 3);
            let outcome = limit.step(&mut state, now, Cost::ONE);
            if let Verdict::Denied { retry_after } = outcome.verdict {
                promise_holds(&limit, &state, now, 1, retry_after, at)?;
            }
        }
    }
}
