//! A reservation is settled late, for less than it took: what comes back must not have come back already.

use crate::ceiling::{holds_every_window, holds_rate};
use crate::traces::{Admitted, START, limits, limits_of, micros, traffic};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, State, TimeDelta};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Without it every reservation that is settled late mints: others have spent what time gave back, and the refund
    /// gives it again. Counted net of refunds, each algorithm still holds its ceiling.
    #[test]
    fn what_is_refundable_never_mints(
        (limit, arrivals) in traffic(limits()),
        settles in proptest::collection::vec((0_usize..4, 1_u64..60), 60),
    ) {
        prop_assume!(limit.algorithm() != Algorithm::Concurrency);
        let (mut state, mut now) = (State::default(), START);
        let mut log: Vec<Admitted> = Vec::new();
        for (arrival, (ago, most)) in arrivals.iter().zip(settles) {
            now = now + TimeDelta::from_micros(arrival.gap);
            // One of the last few requests turns out to have cost less.
            if let Some(settled) = log.len().checked_sub(ago + 1).map(|index| &mut log[index]) {
                let unused = settled.units.min(most);
                let back = limit.refundable(unused, settled.at, now);
                prop_assert!(back <= settled.units);
                if limit.algorithm() == Algorithm::SlidingLog {
                    let refund = limit.refund(settled.units, unused, settled.at, now);
                    prop_assert_eq!(refund.is_some(), unused > 0 && now < settled.at + period(&limit));
                    if let Some((dated, cost)) = refund {
                        let _ = dated.step(&mut state, now, cost);
                    }
                } else {
                    let _ = limit.step(&mut state, now, Cost::refund(back));
                }
                settled.units -= back;
            }
            if limit.step(&mut state, now, Cost::new(arrival.cost)).verdict.is_allowed() {
                log.push(Admitted { at: now, units: arrival.cost });
            }
        }
        match limit.algorithm() {
            Algorithm::FixedWindow | Algorithm::SlidingWindow => {
                for from in &log {
                    let window = |a: &Admitted| a.at.as_micros() / micros(&limit);
                    let inside = log.iter().filter(|a| window(a) == window(from)).map(|a| a.units).sum::<u64>();
                    prop_assert!(inside <= limit.capacity());
                }
            }
            Algorithm::StrictWindow | Algorithm::SlidingLog => holds_every_window(&limit, &log)?,
            _ => holds_rate(&limit, &log)?,
        }
    }

    /// Without it a reservation that is cancelled at once costs something.
    #[test]
    fn what_was_just_taken_comes_back_whole(limit in limits(), units in 0_u64..1_000) {
        prop_assert_eq!(limit.refundable(units, START, START), units);
    }
}

fn period(limit: &Limit) -> TimeDelta {
    TimeDelta::from_micros(micros(limit))
}

proptest! {
    /// Without it a token budget on a log loses what a settled request did not use, or counts it until a later request's
    /// time is over: the log must be as if the request had asked for the smaller cost.
    #[test]
    fn a_log_forgets_exactly_what_was_not_used(
        (limit, arrivals) in traffic(limits_of(Algorithm::SlidingLog)),
        which in any::<prop::sample::Index>(),
        keeps in 0_u64..4,
        later in 0_u64..1_000,
    ) {
        let which = which.index(arrivals.len());
        let (mut state, mut ideal, mut now, mut taken) = (State::default(), State::default(), START, None);
        for (number, arrival) in arrivals.iter().enumerate() {
            now = now + TimeDelta::from_micros(arrival.gap);
            if limit.step(&mut state, now, Cost::new(arrival.cost)).verdict.is_allowed() {
                let settled = number == which;
                let units = if settled { keeps.min(arrival.cost) } else { arrival.cost };
                prop_assert!(limit.step(&mut ideal, now, Cost::new(units)).verdict.is_allowed());
                taken = if settled { Some((now, arrival.cost)) } else { taken };
            }
        }
        now = now + TimeDelta::from_micros(micros(&limit) * later / 1_000);
        if let Some((at, units)) = taken
            && let Some((dated, cost)) = limit.refund(units, units - keeps.min(units), at, now)
        {
            let _ = dated.step(&mut state, now, cost);
        }
        for step in 0..=20 {
            let then = now + TimeDelta::from_micros(micros(&limit) * step / 19);
            let look = |state: &State| limit.step(&mut state.clone(), then, Cost::PEEK);
            prop_assert_eq!(look(&state), look(&ideal));
        }
    }
}
