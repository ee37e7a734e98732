//! A reservation is settled late, for less than it took: what comes back must not have come back already.

use crate::ceiling::{holds_every_window, holds_rate};
use crate::traces::{Admitted, START, limits, micros, traffic};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, State, TimeDelta};

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
                let back = limit.refundable(settled.units.min(most), settled.at, now);
                prop_assert!(back <= settled.units);
                let _ = limit.step(&mut state, now, Cost::refund(back));
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
