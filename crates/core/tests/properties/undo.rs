//! What must leave no trace leaves none: denials, looks, and charges that are given back.

use crate::traces::{Arrival, START, limits, traffic};
use proptest::prelude::*;
use tollgate_core::{Cost, Limit, Outcome, State, TimeDelta, Timestamp};

/// The outcomes of `arrivals` from a state on.
fn run(limit: &Limit, mut state: State, mut now: Timestamp, arrivals: &[Arrival]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for arrival in arrivals {
        now = now + TimeDelta::from_micros(arrival.gap);
        outcomes.push(limit.step(&mut state, now, Cost::new(arrival.cost)));
    }
    outcomes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Without it a client that keeps asking is punished for it, and a denied request eats another limit's quota.
    #[test]
    fn a_denial_changes_nothing((limit, arrivals) in traffic(limits())) {
        let (mut state, mut now) = (State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            // A look brings the state to this instant, so that the two can be compared as they stand.
            let _ = limit.step(&mut state, now, Cost::PEEK);
            let before = state.clone();
            if limit.step(&mut state, now, Cost::new(arrival.cost)).verdict.is_denied() {
                prop_assert_eq!(&state, &before);
            }
        }
    }

    /// Without it a dashboard that watches a key changes its owner's outcomes.
    #[test]
    fn a_look_changes_nothing_that_can_be_seen((limit, arrivals) in traffic(limits()), looks in any::<u64>()) {
        let seen = run(&limit, State::default(), START, &arrivals);
        let (mut state, mut now) = (State::default(), START);
        for (index, arrival) in arrivals.iter().enumerate() {
            let half = arrival.gap / 2;
            if looks >> (index % 64) & 1 == 1 {
                prop_assert!(limit.step(&mut state, now + TimeDelta::from_micros(half), Cost::PEEK).verdict.is_allowed());
            }
            now = now + TimeDelta::from_micros(arrival.gap);
            prop_assert_eq!(limit.step(&mut state, now, Cost::new(arrival.cost)), seen[index]);
        }
    }

    /// Without it a request for ten takes three and fails, or takes eleven.
    #[test]
    fn cost_n_takes_n_or_nothing((limit, arrivals) in traffic(limits())) {
        let (mut state, mut now) = (State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let before = limit.step(&mut state, now, Cost::PEEK).remaining;
            let allowed = limit.step(&mut state, now, Cost::new(arrival.cost)).verdict.is_allowed();
            let after = limit.step(&mut state, now, Cost::PEEK).remaining;
            prop_assert_eq!(after, if allowed { before - arrival.cost } else { before });
        }
    }

    /// Without it a request that another limit denies costs its tenant something all the same.
    #[test]
    fn a_charge_given_back_at_once_never_was((limit, arrivals) in traffic(limits()), cut in 0_usize..60) {
        let cut = cut % arrivals.len();
        let (mut state, mut now) = (State::default(), START);
        for arrival in &arrivals[..cut] {
            now = now + TimeDelta::from_micros(arrival.gap);
            let _ = limit.step(&mut state, now, Cost::new(arrival.cost));
        }
        let never = state.clone();
        now = now + TimeDelta::from_micros(arrivals[cut].gap);
        let cost = Cost::new(arrivals[cut].cost);
        if limit.step(&mut state, now, cost).verdict.is_allowed() {
            let back = limit.step(&mut state, now, cost.negated());
            prop_assert_eq!(back, limit.step(&mut never.clone(), now, Cost::PEEK));
            prop_assert_eq!(run(&limit, state, now, &arrivals[cut..]), run(&limit, never, now, &arrivals[cut..]));
        }
    }

    /// Without it a refund of more than was taken is a gift.
    #[test]
    fn a_refund_stops_at_an_unused_limit((limit, arrivals) in traffic(limits()), more in prop_oneof![0_u64..100, Just(u64::MAX)]) {
        let (mut state, mut now) = (State::default(), START);
        for arrival in &arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let _ = limit.step(&mut state, now, Cost::new(arrival.cost));
        }
        let used = limit.capacity() - limit.step(&mut state, now, Cost::PEEK).remaining;
        // A sliding window's last period weighs less than it counts: it takes more to give it all back.
        let all = 2 * limit.capacity().max(used);
        let outcome = limit.step(&mut state, now, Cost::refund(more.saturating_add(all)));
        prop_assert!(outcome.verdict.is_allowed());
        prop_assert_eq!(outcome.remaining, limit.capacity());
        prop_assert_eq!(run(&limit, state, now, &arrivals), run(&limit, State::default(), now, &arrivals));
    }
}
