//! Units taken ahead and spent later: over every span no more than the limit allows, whoever took them and when.

use crate::traces::START;
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Escrow, Limit, LimitSpec, Quota, Span, State, Timestamp};

/// What one of several holders does next, after some time.
#[derive(Clone, Copy, Debug)]
struct Turn {
    gap: u64,
    holder: usize,
    /// Takes so many ahead.
    takes: u64,
    /// Spends so many of what it holds, or charges at once where it holds too few.
    spends: u64,
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let gap = prop_oneof![0..50_u64, 0..200_000_u64, 0..3_000_000_u64];
    let turn = (gap, 0..3_usize, prop_oneof![Just(0_u64), 1..12_u64], 0..6_u64);
    let turn = turn.prop_map(|(gap, holder, takes, spends)| Turn { gap, holder, takes, spends });
    prop::collection::vec(turn, 1..120)
}

fn leasable() -> impl Strategy<Value = Limit> {
    let spec =
        |algorithm, count, millis| LimitSpec::new(algorithm, Quota::per(count, Span::from_millis(millis)));
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

/// What a holder has: when it was taken, how it keeps, how much is gone.
type Held = (Timestamp, Escrow, u64);

fn spend(held: &mut Vec<Held>, now: Timestamp, units: u64) -> bool {
    for (taken, escrow, gone) in held {
        let void = escrow.units() - escrow.good_after(now.since(*taken));
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
        // A bucket, or a window, that is told of what is spent when it is spent: it must never deny.
        let mut meter = State::default();
        let mut spent: Vec<(Timestamp, u64)> = Vec::new();
        for Turn { gap, holder, takes, spends } in turns {
            now = now + Span::from_micros(gap);
            if takes > 0 {
                let told = limit.step(&mut shared, now, Cost::take(takes));
                if told.verdict.is_allowed() {
                    let escrow = limit.escrow(takes, now, &told).expect("it can be leased");
                    prop_assert_eq!(escrow.good_after(Span::ZERO).min(takes), escrow.good_after(Span::ZERO));
                    holders[holder].push((now, escrow, 0));
                }
            }
            if spends > 0 {
                let passes = spend(&mut holders[holder], now, spends)
                    || limit.step(&mut shared, now, Cost::take(spends)).verdict.is_allowed();
                if passes {
                    spent.push((now, spends));
                    let period = limit.quota().period.length();
                    match limit.algorithm() {
                        Algorithm::StrictWindow => {
                            let in_span: u64 = spent.iter().filter(|(at, _)| *at + period > now).map(|(_, n)| n).sum();
                            prop_assert!(in_span <= limit.capacity(), "{in_span} in a span");
                        }
                        _ => prop_assert!(limit.step(&mut meter, now, Cost::take(spends)).verdict.is_allowed()),
                    }
                }
            }
        }
    }
}
