//! The cases that operators' acts on counters rest on: giving all used quota back, and granting some once.

use super::fixtures::{attempts, build, every_form};
use super::rng::SplitMix64;
use super::{Bench, Broken};
use crate::algorithm::Algorithm;
use crate::charge::{Admission, Charge};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, Part, Scope};
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::rate::Quota;
use crate::store::CounterStore;

/// What an operator's reset rests on: debts, and what a larger limit has left behind, go too.
pub(super) async fn resets<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let spent = |limit: &Limit| limit.algorithm() != Algorithm::Concurrency && limit.quota().count > 0;
    for (number, limit) in
        every_form().iter().chain(&attempts()).enumerate().filter(|(_, limit)| spent(limit))
    {
        let scope = Scope::new(format!("reset/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[Part::Text("alice")] };
        let larger = limit
            .with_quota(Quota { count: limit.quota().count.min(1 << 38) * 4, ..limit.quota().clone() }, None);
        for owed in [limit, &larger.unwrap_or_else(|_| limit.clone())] {
            bench.debit(&[Charge::new(key, owed, Cost::take(u64::MAX))]).await?;
            bench.advance(1_001);
            bench.debit(&[Charge::new(key, limit, Cost::refund(u64::MAX))]).await?;
            let outcome = bench.charge(&[Charge::new(key, limit, Cost::LOOK)]).await?.each[0];
            bench.check(outcome.remaining == limit.capacity(), || {
                format!("{limit} is not unused: {outcome:?}")
            })?;
        }
        let all = [Charge::new(key, limit, Cost::take(limit.capacity()))];
        let _ = bench.expect(&all, Admission::Admitted).await?;
        let _ = bench.expect(&[Charge::new(key, limit, Cost::ONE)], Admission::Refused).await?;
    }
    Ok(())
}

/// What extra quota rests on.
pub(super) async fn grants<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let (mut dice, day) = (SplitMix64::new(7), 86_400_000_000);
    let limit =
        build(LimitSpec { slots: Some(1), ..LimitSpec::new(Algorithm::StrictWindow, Quota::per_day(40)) });
    let scope = Scope::new("grant");
    for number in 0..20_u64 {
        let name = number.to_string();
        let key = CounterKey { scope: &scope, parts: &[Part::Text(&name)] };
        bench.advance(dice.below(day));
        let (mut taken, mut left) = (0, day - 1);
        while taken < 40 {
            let units = 1 + dice.below(7).min(39 - taken);
            let outcomes =
                bench.expect(&[Charge::new(key, &limit, Cost::take(units))], Admission::Admitted).await?;
            taken += units;
            bench
                .check(outcomes.each[0].remaining == 40 - taken, || format!("{taken} of 40: {outcomes:?}"))?;
            let wait = dice.below(left / 8);
            left -= wait;
            bench.advance(wait);
        }
        let _ = bench.expect(&[Charge::new(key, &limit, Cost::ONE)], Admission::Refused).await?;
        bench.advance(left);
        let _ = bench.expect(&[Charge::new(key, &limit, Cost::ONE)], Admission::Refused).await?;
    }
    Ok(())
}
