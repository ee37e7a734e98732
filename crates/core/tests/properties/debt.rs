//! What was spent elsewhere is taken here after the fact: into debt, but not without bound.

use crate::traces::{START, limits, micros};
use proptest::prelude::*;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, PermitId, Rate, State, TimeDelta, Verdict, nonzero};

fn debit(limit: &Limit, state: &mut State, units: u64) {
    limit.debit(PermitId::ANONYMOUS, state, START, units);
}

proptest! {
    /// Without it one region's report locks a tenant out of another for ever; or the report is ignored.
    #[test]
    fn debt_denies_until_it_is_repaid(limit in limits(), units in prop_oneof![1_u64..200, Just(u64::MAX)]) {
        prop_assume!(limit.algorithm() != Algorithm::Concurrency);
        let mut state = State::default();
        debit(&limit, &mut state, units);
        let look = limit.step(&mut state, START, Cost::PEEK);
        prop_assert_eq!(look.remaining, limit.capacity().saturating_sub(units));
        debit(&limit, &mut state, u64::MAX);
        let denied = limit.step(&mut state, START, Cost::ONE);
        let Verdict::Denied { retry_after: Some(wait) } = denied.verdict else { panic!("in debt: {denied:?}") };
        prop_assert!(wait <= limit.retention());
        let healed = limit.step(&mut state, START + limit.retention(), Cost::new(limit.capacity()));
        prop_assert!(healed.verdict.is_allowed());
    }

    /// Without it a debt takes more refunds to clear than the one capacity that the documents say it can be.
    #[test]
    fn debt_is_at_most_the_capacity_once_more(limit in limits()) {
        prop_assume!(limit.algorithm() != Algorithm::Concurrency);
        let mut state = State::default();
        debit(&limit, &mut state, u64::MAX);
        debit(&limit, &mut state, u64::MAX);
        let cleared = limit.step(&mut state, START, Cost::refund(limit.capacity()));
        prop_assert_eq!(cleared.remaining, 0);
        let one = limit.step(&mut state, START, Cost::refund(1));
        prop_assert_eq!(one.remaining, 1);
    }
}

/// Without it the time that a bucket in debt stays closed is not what an operator would work out by hand.
#[test]
fn a_bucket_recovers_from_debt_at_its_rate() {
    let limit =
        LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10))).burst(5).build().expect("in range");
    let mut state = State::default();
    debit(&limit, &mut state, 8);
    let denied = limit.step(&mut state, START, Cost::ONE);
    assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_millis(400)) });
    assert_eq!(denied.reset_after, TimeDelta::from_millis(800));
    assert_eq!(micros(&limit), 1_000_000);
}

/// Without it a report from elsewhere opens permits that no request holds.
#[test]
fn permits_are_not_debited_beyond_the_limit() {
    let limit =
        LimitSpec::new(Algorithm::Concurrency, Rate::per_minute(nonzero!(3))).build().expect("in range");
    let mut state = State::default();
    limit.debit(PermitId(7), &mut state, START, 2);
    assert_eq!(limit.step(&mut state, START, Cost::PEEK).remaining, 1);
    limit.debit(PermitId(8), &mut state, START, 2);
    assert_eq!(limit.step(&mut state, START, Cost::PEEK).remaining, 1);
}
