//! Cases in which limits with other numbers charge one counter: a tier or an override, a new revision of the rules,
//! `CL.THROTTLE` with other arguments.
//!
//! A counter's key contains its algorithm and, except for `CL.THROTTLE`, its period. So windows, logs and permits meet
//! other counts here, and buckets meet other counts, bursts and periods.

use super::fixtures::{build, every_limit, per_minute, some_cost, some_time};
use super::rng::SplitMix64;
use super::{Harness, Violation};
use crate::algorithm::Algorithm;
use crate::algorithm::concurrency::PermitId;
use crate::charge::{Admission, Charge, Enforcement};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, KeyPart, Scope};
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::rate::Rate;
use crate::store::CounterStore;
use crate::time::TimeDelta;

pub(super) const DENIED: &str = "a denied request writes nothing, whatever limit it is made with";
pub(super) const CHANGED: &str = "limits that change read the same counter in the same way";

/// Returns sets of limits that may charge one counter; the first of each is the strictest per unit of time.
fn families() -> Vec<Vec<Limit>> {
    let (second, minute) = (TimeDelta::from_secs(1), TimeDelta::from_secs(60));
    let (hour, day) = (TimeDelta::from_secs(3_600), TimeDelta::from_secs(86_400));
    let mut families: Vec<Vec<Limit>> = Vec::new();
    for algorithm in [Algorithm::Gcra, Algorithm::TokenBucket, Algorithm::LeakyBucket] {
        let spec = |count, burst| LimitSpec::new(algorithm, Rate::per(count, minute)).burst(burst);
        families.push(
            [(2, 1), (5, 5), (7, 3), (60, 60), (6, 90), (600, 60_000), (1, 5_000)]
                .map(|(count, burst)| build(spec(count, burst)))
                .to_vec(),
        );
        let free = |count, period, burst| {
            build(LimitSpec::new(algorithm, Rate::per(count, period)).burst(burst).any_period())
        };
        families.push(vec![
            free(1, second, 1),
            free(5, hour, 5),
            free(1_000, second, 1),
            free(7, minute, 100),
            free(3, day, 2),
            free(3, TimeDelta::from_millis(7), 2),
            free(99_991, day, 4),
        ]);
        // Narrow, wide and back: 4,999 an hour is too fine for a word.
        let hourly = |count| build(LimitSpec::new(algorithm, Rate::per(count, hour)));
        families.push([5, 3_000, 4_999, 7_777, 60_000, 99_991].map(hourly).to_vec());
    }
    let stepped = |(count, burst)| {
        let spec = LimitSpec::new(Algorithm::TokenBucket, Rate::per(count, minute)).burst(burst);
        build(spec.refill_interval(TimeDelta::from_millis(250)))
    };
    families.push([(2, 1), (5, 5), (60, 60), (6, 90), (600, 60_000), (4_999, 20)].map(stepped).to_vec());
    // Counts for which a word has room, and counts for which it has not.
    for (algorithm, period, counts) in [
        (Algorithm::SlidingWindow, second, [1, 100, 20_000, 16_383, 16_384, 1_000_000]),
        (Algorithm::SlidingWindow, minute, [1, 100, 200_000, 131_071, 131_072, 70_000]),
        (Algorithm::FixedWindow, second, [1, 100, 1 << 30, (1 << 29) - 1, 1 << 29, 20_000]),
    ] {
        families
            .push(counts.map(|count| build(LimitSpec::new(algorithm, Rate::per(count, period)))).to_vec());
    }
    for (algorithm, period) in [
        (Algorithm::FixedWindow, minute),
        (Algorithm::FixedWindow, second),
        (Algorithm::SlidingWindow, minute),
        (Algorithm::SlidingWindow, second),
        (Algorithm::StrictWindow, minute),
        (Algorithm::SlidingLog, minute),
        (Algorithm::Concurrency, minute),
    ] {
        let limit = |count| build(LimitSpec::new(algorithm, Rate::per(count, period)));
        families.push([1, 2, 6, 40, 0, 200].map(limit).to_vec());
    }
    let jittered = |count| build(LimitSpec::new(Algorithm::FixedWindow, Rate::per(count, hour)).jitter());
    families.push([1, 9, 30].map(jittered).to_vec());
    families
}

/// Denied requests of every other limit leave a used counter as it was: alone, beside another limit, among alternatives
/// and in the shadow.
pub(super) async fn denied_by_another<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    // Limits of other kinds, that read the counter as an unused one.
    let unrelated: Vec<Limit> =
        every_limit().into_iter().filter(|limit| !limit.is_jittered() && limit.capacity() < 1_000).collect();
    for (number, family) in families().iter().enumerate() {
        for (which, owner) in family.iter().enumerate().filter(|(_, limit)| limit.rate().count > 0) {
            let scope = Scope::new(format!("denied/{number}/{which}/{owner}"));
            let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
            let charge = |limit, cost| Charge { permit: PermitId(7), ..Charge::new(key, limit, cost) };
            let _ =
                harness.expect(&[charge(owner, Cost::new(owner.capacity()))], Admission::Admitted).await?;
            let before = harness.charge(&[charge(owner, Cost::PEEK)]).await?;
            let beside = Scope::new(format!("beside/{number}/{which}/{owner}"));
            let beside = CounterKey { scope: &beside, parts: &[KeyPart::Text("alice")] };
            let other_kind = |other: &&Limit| {
                let buckets = owner.algorithm().has_burst() && other.algorithm().has_burst();
                !buckets && owner.algorithm() != other.algorithm()
            };
            for other in family.iter().chain(unrelated.iter().filter(other_kind)) {
                let cost = Cost::new(other.capacity() + 1);
                let holder = PermitId(8);
                let denied = Charge { permit: holder, ..charge(other, cost) };
                let _ = harness.expect(&[denied], Admission::Denied).await?;
                let one = Charge { permit: holder, ..charge(other, Cost::ONE) };
                let shadow = Charge { enforcement: Enforcement::Independent, ..denied };
                let either = Charge { enforcement: Enforcement::Alternative, ..denied };
                let fits = Charge { permit: holder, ..Charge::new(beside, owner, Cost::ONE) };
                let _ = harness.expect(&[either], Admission::Denied).await?;
                let _ = harness.expect(&[shadow], Admission::Admitted).await?;
                let _ = harness.expect(&[fits, denied], Admission::Denied).await?;
                let _ = harness.expect(&[denied, one], Admission::Denied).await?;
                let _ = harness.charge(&[charge(other, Cost::PEEK)]).await?;
                let after = harness.charge(&[charge(owner, Cost::PEEK)]).await?;
                harness.check(before.per_charge == after.per_charge, || {
                    format!("{owner}, after {other} denied a request: {before:?} became {after:?}")
                })?;
            }
        }
    }
    Ok(())
}

/// Random traces in which every request comes with one of the limits: smaller, larger, and back again.
pub(super) async fn changed<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    up_and_down(harness).await?;
    for (number, family) in families().iter().enumerate() {
        let mut rng = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("changed/{number}"));
        for _ in 0..400 {
            let limit = rng.pick(family).clone();
            let parts = [KeyPart::Text(rng.pick::<&str>(&["alice", "bob"]))];
            let key = CounterKey { scope: &scope, parts: &parts };
            let permit = PermitId(u128::from(rng.below(4)));
            let cost = some_cost(&mut rng, &limit);
            let charge = Charge { permit, ..Charge::new(key, &limit, cost) };
            match rng.below(12) {
                0 => harness.debit(&[charge]).await?,
                1 => {
                    let other = rng.pick(family).clone();
                    let again = Charge { permit, ..Charge::new(key, &other, Cost::ONE) };
                    let _ = harness.charge(&[charge, again]).await?;
                }
                _ => {
                    let _ = harness.charge(&[charge]).await?;
                }
            }
            // Within what the shortest period remembers: a state may be dropped when its own limit has forgotten it.
            harness.advance(some_time(&mut rng, &limit).min(400_000));
        }
        let longest = family.iter().map(|limit| limit.retention().as_micros()).max();
        harness.advance(2 * longest.unwrap_or(0));
    }
    Ok(())
}

/// Stated explicitly: an upgrade gives its new room at once, going down and up again gives nothing, and a charge that
/// leaves the same instant under another limit is counted, alone and beside another.
async fn up_and_down<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let [five, ten, free, pro] = [5, 10, 100, 5_000].map(|count| per_minute(Algorithm::Gcra, count));
    let (scope, beside) = (Scope::new("up and down"), Scope::new("up and down/beside"));
    for (name, crowd) in [("alone", 0), ("beside another", 1)] {
        let parts = [KeyPart::Text(name)];
        let other = Charge::new(CounterKey { scope: &beside, parts: &parts }, &pro, Cost::ONE);
        for (limit, units, left) in [
            // One of five a minute, and two of ten, take twelve seconds to come back.
            (&five, 1, 4),
            (&ten, 1, 8),
            (&five, 1, 2),
            (&free, 97, 0),
            (&pro, 0, 4_900),
            (&pro, 2_900, 2_000),
            (&pro, 2_000, 0),
        ] {
            let key = CounterKey { scope: &scope, parts: &parts };
            let mut charges = vec![Charge::new(key, limit, Cost::new(units))];
            charges.extend((0..crowd).map(|_| other));
            let outcomes = harness.expect(&charges, Admission::Admitted).await?;
            harness.check(outcomes.per_charge[0].remaining == left, || format!("{limit}: {outcomes:?}"))?;
            let small = [Charge::new(key, &five, Cost::new(5))];
            let _ = harness.expect(&small, Admission::Denied).await?;
        }
    }
    Ok(())
}
