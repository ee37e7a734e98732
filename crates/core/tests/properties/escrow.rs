//! Units taken ahead and spent later: over every span no more than the limit allows, whichever node took them and when.

use crate::traces::START;
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Escrow, Limit, LimitSpec, Rate, State, TimeDelta, Timestamp};

/// What one of several holders does next, after some time.
#[derive(Clone, Copy, Debug)]
struct Turn {
    gap: u64,
    holder: usize,
    /// Takes so many ahead.
    takes: u64,
    /// Spends so many of what it holds, or charges at once where it holds too few.
    spends: u64,
    /// Hands back what it still holds of its last taking.
    returns: bool,
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let gap = prop_oneof![4 => 0..50_u64, 4 => 0..200_000_u64, 1 => 0..3_000_000_u64];
    let spends = prop_oneof![3 => Just(0_u64), 1 => 1..6_u64];
    let turn = (gap, 0..3_usize, prop_oneof![Just(0_u64), 1..12_u64], spends, prop::bool::weighted(0.2));
    let turn =
        turn.prop_map(|(gap, holder, takes, spends, returns)| Turn { gap, holder, takes, spends, returns });
    prop::collection::vec(turn, 1..40)
}

fn leasable() -> impl Strategy<Value = Limit> {
    let spec = |algorithm, count, millis| {
        LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_millis(millis)))
    };
    prop::sample::select(vec![
        spec(Algorithm::Gcra, 10, 1_000),
        spec(Algorithm::Gcra, 7, 1_000).burst(20),
        spec(Algorithm::Gcra, 99_991, 60_000).burst(25),
        spec(Algorithm::TokenBucket, 3, 700).burst(9),
        spec(Algorithm::FixedWindow, 12, 1_000),
        spec(Algorithm::StrictWindow, 15, 1_000).slots(5),
        spec(Algorithm::SlidingWindow, 15, 1_000),
    ])
    .prop_map(|spec| spec.build().expect("in range"))
}

/// What a holder has: when it was taken, how it keeps, how much is gone, when the bucket was to be full.
type Held = (Timestamp, Escrow, u64, Timestamp);

/// Gives back what is left of a taking, as stores do.
fn return_units(limit: &Limit, shared: &mut State, (taken, escrow, gone, full_at): Held, now: Timestamp) {
    let good = escrow.valid_after(now.since(taken)).min(escrow.units() - gone);
    let units = limit.refundable(good, escrow.taken_at(good, taken), now);
    let look = limit.step(shared, now, Cost::PEEK);
    if units > 0 && limit.can_return(full_at, now, look.reset_after) {
        let _ = limit.step(shared, now, Cost::refund(units));
    }
}

fn spend(held: &mut Vec<Held>, now: Timestamp, units: u64) -> bool {
    for (taken, escrow, gone, _) in held {
        let void = escrow.units() - escrow.valid_after(now.since(*taken));
        let next = (*gone).max(void) + units;
        if next <= escrow.units() {
            *gone = next;
            return true;
        }
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    /// Without it the ceiling of leases is a hope.
    #[test]
    fn no_span_sees_more_than_the_limit(limit in leasable(), turns in turns()) {
        let (mut shared, mut now) = (State::default(), START);
        let mut holders: [Vec<Held>; 3] = Default::default();
        let mut spent: Vec<Timestamp> = Vec::new();
        for Turn { gap, holder, takes, spends, returns } in turns {
            now = now + TimeDelta::from_micros(gap);
            if takes > 0 {
                let outcome = limit.step(&mut shared, now, Cost::new(takes));
                if outcome.verdict.is_allowed() {
                    let escrow = limit.escrow(takes, now, &outcome).expect("it can be leased");
                    prop_assert_eq!(escrow.valid_after(TimeDelta::ZERO).min(takes), escrow.valid_after(TimeDelta::ZERO));
                    holders[holder].push((now, escrow, 0, now + outcome.reset_after));
                }
            }
            if returns && let Some(held) = holders[holder].pop() {
                return_units(&limit, &mut shared, held, now);
            }
            for _ in 0..spends {
                let passes = spend(&mut holders[holder], now, 1)
                    || limit.step(&mut shared, now, Cost::ONE).verdict.is_allowed();
                if passes {
                    spent.push(now);
                }
            }
        }
        // In the end everybody spends at once whatever there is.
        for held in &mut holders {
            while spend(held, now, 1) {
                spent.push(now);
            }
        }
        while limit.step(&mut shared, now, Cost::ONE).verdict.is_allowed() {
            spent.push(now);
        }
        // A bucket or window charged with what is spent, when it is spent, never denies.
        let (mut meter, period) = (State::default(), limit.rate().period.length());
        for (n, at) in spent.iter().enumerate() {
            if limit.algorithm() == Algorithm::StrictWindow {
                let in_span = spent[..=n].iter().filter(|other| **other + period > *at).count() as u64;
                prop_assert!(in_span <= limit.capacity(), "{in_span} in a span");
            } else {
                prop_assert!(limit.step(&mut meter, *at, Cost::ONE).verdict.is_allowed(), "unit {n} of {}", spent.len());
            }
        }
    }
}
