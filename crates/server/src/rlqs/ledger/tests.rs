//! Joined tranches never have more valid units than those they were joined from, and a ledger stays small.

use super::*;
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Rate, State, nonzero};

const START: Timestamp = Timestamp::from_secs(1_000_000);

fn bucket(rate: Rate, burst: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, rate).burst(burst).build().expect("a limit")
}

fn limits() -> [Limit; 2] {
    [bucket(Rate::per_second(nonzero!(10)), 100), bucket(Rate::per_minute(nonzero!(240)), 240)]
}

/// Charges that several accounts take in turn from the same limits.
struct Store {
    limits: Vec<(Limit, State)>,
}

impl Store {
    fn new(limits: &[Limit]) -> Self {
        Self { limits: limits.iter().map(|limit| (limit.clone(), State::default())).collect() }
    }

    /// Charges `units`, and returns the counters if all limits allow it.
    fn charge(&mut self, units: u64, now: Timestamp) -> Option<Vec<CounterAhead>> {
        let mut counters = Vec::new();
        let mut next = self.limits.clone();
        for (counter, (limit, state)) in (0..).zip(&mut next) {
            let outcome = limit.step(state, now, Cost::new(units));
            let escrow = limit.escrow(units, now, &outcome).filter(|_| outcome.verdict.is_allowed())?;
            counters.push(CounterAhead {
                counter,
                cost: units,
                remaining: outcome.remaining,
                capacity: limit.capacity(),
                count: limit.rate().count,
                period: limit.rate().period.length(),
                escrow: Some(escrow),
                kind: AheadKind::Slots,
                window: None,
                resets: false,
            });
        }
        self.limits = next;
        Some(counters)
    }
}

/// A ledger without a bound, as the reference.
#[derive(Default)]
struct Unbounded(Ledger);

impl Unbounded {
    fn add(&mut self, units: u64, counters: &[CounterAhead], taken: Timestamp) {
        let mut one = Ledger::default();
        one.add(units, &counters[0], taken, None);
        self.0.0.append(&mut one.0);
    }
}

fn happens() -> impl Strategy<Value = (bool, u64, u64, u64)> {
    (any::<bool>(), 0_u64..12, 0_u64..2_000, 0_u64..6)
}

proptest! {
    /// A unit too many is a request over the limit.
    #[test]
    fn a_bounded_ledger_never_has_more_valid_units(
        slower in any::<bool>(),
        history in prop::collection::vec(happens(), 1..60),
    ) {
        let all = limits();
        let mut store = Store::new(if slower { &all[1..] } else { &all[..1] });
        let (mut bounded, mut unbounded) = (Ledger::default(), Unbounded::default());
        let (mut now, mut settled) = (START, START);
        for (is_other, units, millis, spent) in history {
            now = now + TimeDelta::from_millis(millis);
            if let Some(counters) = store.charge(units, now) && !is_other {
                bounded.add(units, &counters[0], now, None);
                unbounded.add(units, &counters, now);
            }
            if spent == 5 {
                bounded.forget(now);
                unbounded.0.forget(now);
                settled = now;
            }
            prop_assert!(bounded.len() <= MAX_TRANCHES);
            for at in (0..40).map(|at| settled + TimeDelta::from_millis(at * 531)) {
                prop_assert!(bounded.valid(at) <= unbounded.0.valid(at), "{at:?}: {bounded:?} {:?}", unbounded.0);
            }
        }
    }
}

/// A stream that has a limit to itself takes one slot after the other: nothing is lost by keeping them as one tranche.
#[test]
fn tranches_that_follow_each_other_become_one() {
    let (mut store, mut ledger) = (Store::new(&limits()[..1]), Ledger::default());
    let now = START;
    for units in [5, 20, 1, 30] {
        ledger.add(units, &store.charge(units, now).expect("charged")[0], now, None);
    }
    assert_eq!((ledger.len(), ledger.valid(now)), (1, 56));
    assert_eq!(ledger.valid(now + TimeDelta::from_secs(4)), 56 - 40);
}

/// What a silent stream may have admitted stays covered: of tranches that have lapsed, the sum is what matters.
#[test]
fn lapsed_tranches_keep_their_sum() {
    let (mut store, mut ledger, mut now) = (Store::new(&limits()[..1]), Ledger::default(), START);
    for _ in 0..200 {
        ledger.add(1, &store.charge(1, now).expect("charged")[0], now, None);
        now = now + TimeDelta::from_secs(1);
    }
    assert!(ledger.len() <= MAX_TRANCHES);
    assert_eq!((ledger.valid(START), ledger.valid(now)), (200, 0));
}
