//! Conformance case: many permits of one counter, which stores may keep in another form than a few.

use super::fixtures::build;
use super::rng::SplitMix64;
use super::{Harness, Violation};
use crate::algorithm::Algorithm;
use crate::algorithm::concurrency::PermitId;
use crate::charge::{Charge, Permit};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, KeyPart, Scope};
use crate::limit_spec::LimitSpec;
use crate::rate::Rate;
use crate::store::CounterStore;
use crate::time::TimeDelta;

pub(super) const NAME: &str = "hundreds of permits are counted, renewed, released and freed one by one";

pub(super) async fn run<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    const SECONDS: u64 = 30;
    // The second one is an operator's lower number for the same counter, or that of a lower priority.
    let limits = [200, 120].map(|count| {
        build(LimitSpec::new(Algorithm::Concurrency, Rate::per(count, TimeDelta::from_secs(SECONDS))))
    });
    // Of four permits so many have a holder, and each has up to so many units.
    for (number, (named, units)) in [(4, 1), (0, 1), (2, 1), (3, 9)].into_iter().enumerate() {
        let mut rng = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("many permits/{number}"));
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        for turn in 0..600 {
            let id = if rng.below(4) < named { u128::from(1 + rng.below(300)) << 64 } else { 0 };
            let limit = &limits[usize::from(turn > 250 && rng.below(3) == 0)];
            let cost = match rng.below(24) {
                0 => Cost::PEEK,
                1 => Cost::refund(1 + rng.below(units)),
                _ => Cost::new(1 + rng.below(units)),
            };
            let charge = Charge { permit: PermitId(id), ..Charge::new(key, limit, cost) };
            match rng.below(12) {
                0 => harness.debit(&[charge]).await?,
                1 | 2 if turn > 250 => harness.release(&[Permit { key, limit, id: PermitId(id) }]).await?,
                _ => {
                    let _ = harness.charge(&[charge]).await?;
                }
            }
            harness.advance(match (turn, rng.below(8)) {
                (450, _) => SECONDS * 500_000,
                (_, 0..2) => 0,
                _ => rng.below(30_000),
            });
        }
        harness.advance(SECONDS * 1_000_000);
        let free = harness.charge(&[Charge::new(key, &limits[0], Cost::PEEK)]).await?;
        harness.check(free.per_charge[0].remaining == 200, || format!("{free:?}"))?;
    }
    Ok(())
}
