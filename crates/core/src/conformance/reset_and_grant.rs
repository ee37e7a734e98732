//! Conformance cases for usage resets, late refunds and grants.

use super::fixtures::{attempts, build, every_limit, some_time};
use super::rng::SplitMix64;
use super::{Harness, Violation};
use crate::algorithm::Algorithm;
use crate::charge::{Admission, Charge};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, KeyPart, Scope};
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::nonzero;
use crate::rate::Rate;
use crate::store::CounterStore;

pub(super) const LATE_REFUNDS: &str = "a refund that comes late gives back what is still counted";

/// Requests that settle later, for less than they took, in any order: each store gives back the same, alone and with
/// other charges.
pub(super) async fn late_refunds<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let spent = |limit: &&Limit| {
        limit.algorithm() != Algorithm::Concurrency && limit.rate().count > 0 && !limit.is_jittered()
    };
    let minutely = |count| build(LimitSpec::new(Algorithm::SlidingLog, Rate::per_minute(count)));
    let logs = [minutely(nonzero!(30)), minutely(nonzero!(300))];
    for (number, limit) in logs.iter().chain(every_limit().iter()).filter(spent).enumerate() {
        let mut rng = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("late/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        let mut open = Vec::new();
        for _ in 0..200 {
            let cost = Cost::new(1 + rng.below(limit.capacity().min(6)));
            if harness.charge(&[Charge::new(key, limit, cost)]).await?.admission == Admission::Admitted {
                open.push((harness.now(), cost.units()));
            }
            harness.advance(some_time(&mut rng, limit));
            if !open.is_empty() && rng.below(3) > 0 {
                let (taken, units) = open.swap_remove(rng.index(open.len()));
                let unused = 1 + rng.below(units);
                if let Some((dated, cost)) = limit.refund(units, unused, taken, harness.now()) {
                    harness.debit(&[Charge::new(key, &dated, cost)]).await?;
                }
                let _ = harness.charge(&[Charge::new(key, limit, Cost::PEEK)]).await?;
            }
        }
    }
    Ok(())
}

/// Checks usage resets: a reset also clears debt and usage counted under a larger limit.
pub(super) async fn resets<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let spent = |limit: &Limit| limit.algorithm() != Algorithm::Concurrency && limit.rate().count > 0;
    for (number, limit) in
        every_limit().iter().chain(&attempts()).enumerate().filter(|(_, limit)| spent(limit))
    {
        let scope = Scope::new(format!("reset/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        let larger = limit
            .with_rate(Rate { count: limit.rate().count.min(1 << 38) * 4, ..limit.rate().clone() }, None);
        for owed in [limit, &larger.unwrap_or_else(|_| limit.clone())] {
            harness.debit(&[Charge::new(key, owed, Cost::new(u64::MAX))]).await?;
            harness.advance(1_001);
            harness.debit(&[Charge::new(key, limit, Cost::refund(u64::MAX))]).await?;
            let outcome = harness.charge(&[Charge::new(key, limit, Cost::PEEK)]).await?.per_charge[0];
            harness.check(outcome.remaining == limit.capacity(), || {
                format!("{limit} is not unused: {outcome:?}")
            })?;
        }
        let all = [Charge::new(key, limit, Cost::new(limit.capacity()))];
        let _ = harness.expect(&all, Admission::Admitted).await?;
        let _ = harness.expect(&[Charge::new(key, limit, Cost::ONE)], Admission::Denied).await?;
    }
    Ok(())
}

/// Checks the behavior that grants rely on.
pub(super) async fn grants<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let (mut rng, day) = (SplitMix64::new(7), 86_400_000_000);
    let limit = build(LimitSpec {
        slots: Some(1),
        ..LimitSpec::new(Algorithm::StrictWindow, Rate::per_day(nonzero!(40)))
    });
    let scope = Scope::new("grant");
    for number in 0..20_u64 {
        let name = number.to_string();
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text(&name)] };
        harness.advance(rng.below(day));
        let (mut taken, mut left) = (0, day - 1);
        while taken < 40 {
            let units = 1 + rng.below(7).min(39 - taken);
            let outcomes =
                harness.expect(&[Charge::new(key, &limit, Cost::new(units))], Admission::Admitted).await?;
            taken += units;
            harness.check(outcomes.per_charge[0].remaining == 40 - taken, || {
                format!("{taken} of 40: {outcomes:?}")
            })?;
            let wait = rng.below(left / 8);
            left -= wait;
            harness.advance(wait);
        }
        let _ = harness.expect(&[Charge::new(key, &limit, Cost::ONE)], Admission::Denied).await?;
        harness.advance(left);
        let _ = harness.expect(&[Charge::new(key, &limit, Cost::ONE)], Admission::Denied).await?;
    }
    Ok(())
}
