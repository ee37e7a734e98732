//! Conformance cases. Each is a guarantee that a user of any store relies on.

use super::fixtures::{attempts, build, every_limit, per_minute, some_cost, some_time};
use super::rng::SplitMix64;
use super::{Harness, Violation, changed_limits, many_permits, reset_and_grant};
use crate::algorithm::Algorithm;
use crate::algorithm::concurrency::PermitId;
use crate::charge::{Admission, Charge, Enforcement, Permit, UnitReturn};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, KeyPart, Scope};
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::rate::Rate;
use crate::store::CounterStore;
use crate::time::TimeDelta;

pub(super) const NAMES: [&str; 21] = [
    "every algorithm answers as its step does",
    "a request's charges are all taken or none",
    "at least one alternative must fit, and those that fit are taken",
    "an independent charge is taken or not on its own",
    "one counter twice in a request counts twice",
    "a look changes nothing",
    "a refund gives back down to an unused counter",
    "a debit goes into debt, and the debt is bounded",
    "a permit is released once, and only by its holder",
    "keys that differ do not share a counter",
    "a window turns at its instant and not before",
    "a counter is as good as new when its memory is over",
    "a clock that goes back mints nothing and locks nothing",
    "what was taken ahead is given back once, and only what time has not given back",
    "giving everything back leaves an unused counter, whatever it held",
    "a window with one slot gives its units once in its length, however they are spread",
    "requests that ask for nothing or for too much do no harm",
    super::changed_limits::DENIED,
    super::changed_limits::CHANGED,
    reset_and_grant::LATE_REFUNDS,
    many_permits::NAME,
];

pub(super) async fn run<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    match NAMES.iter().position(|name| *name == harness.case) {
        Some(0) => every_algorithm(harness).await,
        Some(1) => all_or_none(harness).await,
        Some(2) => alternatives(harness).await,
        Some(3) => independents(harness).await,
        Some(4) => same_counter_twice(harness).await,
        Some(5) => peeks(harness).await,
        Some(6) => refunds(harness).await,
        Some(7) => debits(harness).await,
        Some(8) => releases(harness).await,
        Some(9) => keys(harness).await,
        Some(10) => window_turns(harness).await,
        Some(11) => expiries(harness).await,
        Some(12) => clock_steps_back(harness).await,
        Some(13) => returns(harness).await,
        Some(14) => reset_and_grant::resets(harness).await,
        Some(15) => reset_and_grant::grants(harness).await,
        Some(16) => zero_and_excessive_costs(harness).await,
        Some(17) => changed_limits::denied_by_another(harness).await,
        Some(18) => changed_limits::changed(harness).await,
        Some(19) => reset_and_grant::late_refunds(harness).await,
        _ => many_permits::run(harness).await,
    }
}

async fn every_algorithm<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let forms: Vec<(Limit, Enforcement)> = every_limit()
        .into_iter()
        .map(|limit| (limit, Enforcement::Required))
        .chain(attempts().into_iter().map(|limit| (limit, Enforcement::Independent)))
        .chain(attempts().into_iter().map(|limit| (limit, Enforcement::Required)))
        .collect();
    for (number, (limit, enforcement)) in forms.iter().enumerate() {
        let mut rng = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("algorithm/{number}/{limit}"));
        for _ in 0..400 {
            let parts = [KeyPart::Text(rng.pick::<&str>(&["alice", "bob"]))];
            let key = CounterKey { scope: &scope, parts: &parts };
            let cost = some_cost(&mut rng, limit);
            let permit = PermitId(u128::from(rng.below(4)));
            let charge = Charge { enforcement: *enforcement, permit, ..Charge::new(key, limit, cost) };
            if rng.below(20) == 0 {
                harness.debit(&[charge]).await?;
            } else {
                let _ = harness.charge(&[charge]).await?;
            }
            harness.advance(some_time(&mut rng, limit));
        }
    }
    Ok(())
}

async fn all_or_none<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let mut rng = SplitMix64::new(2);
    let limits: Vec<Limit> = every_limit().into_iter().filter(|limit| limit.rate().count > 0).collect();
    let scopes: Vec<Scope> = limits
        .iter()
        .enumerate()
        .map(|(number, limit)| Scope::new(format!("all/{number}/{limit}")))
        .collect();
    for _ in 0..4_000 {
        let picks: Vec<(usize, [KeyPart<'_>; 1])> = (0..1 + rng.below(6))
            .map(|_| {
                let limit = usize::try_from(rng.below(limits.len() as u64)).unwrap_or(0);
                (limit, [KeyPart::Text(rng.pick::<&str>(&["alice", "bob"]))])
            })
            .collect();
        let charges: Vec<Charge<'_>> = picks
            .iter()
            .map(|(limit, who)| {
                let key = CounterKey { scope: &scopes[*limit], parts: who };
                let cost = Cost::new(rng.below(4));
                let enforcement = *rng.pick(&[
                    Enforcement::Required,
                    Enforcement::Required,
                    Enforcement::Required,
                    Enforcement::Alternative,
                    Enforcement::Independent,
                ]);
                let permit = PermitId(u128::from(rng.below(4)));
                Charge { enforcement, permit, ..Charge::new(key, &limits[*limit], cost) }
            })
            .collect();
        let _ = harness.charge(&charges).await?;
        if rng.below(4) == 0 {
            harness.advance(rng.below(400_000));
        }
    }
    // Stated explicitly: a charge that fits is not applied if another does not fit.
    let (wide, narrow) = (per_minute(Algorithm::Gcra, 5), per_minute(Algorithm::FixedWindow, 1));
    let (a, b) = (Scope::new("all/wide"), Scope::new("all/narrow"));
    let (a, b) = (CounterKey { scope: &a, parts: &[] }, CounterKey { scope: &b, parts: &[] });
    let both = [Charge::new(a, &wide, Cost::ONE), Charge::new(b, &narrow, Cost::ONE)];
    let _ = harness.expect(&both, Admission::Admitted).await?;
    for _ in 0..10 {
        let refused = harness.expect(&both, Admission::Denied).await?;
        harness.check(refused.per_charge[0].remaining == 4, || {
            format!("the denied request was charged: {refused:?}")
        })?;
    }
    Ok(())
}

async fn alternatives<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let (small, large) = (per_minute(Algorithm::FixedWindow, 1), per_minute(Algorithm::FixedWindow, 2));
    let (a, b) = (Scope::new("alternative/small"), Scope::new("alternative/large"));
    let (a, b) = (CounterKey { scope: &a, parts: &[] }, CounterKey { scope: &b, parts: &[] });
    let either = [Charge::new(a, &small, Cost::ONE), Charge::new(b, &large, Cost::ONE)]
        .map(|charge| Charge { enforcement: Enforcement::Alternative, ..charge });
    let first = harness.expect(&either, Admission::Admitted).await?;
    harness.check(first.per_charge[0].remaining == 0 && first.per_charge[1].remaining == 1, || {
        format!("both fit: {first:?}")
    })?;
    let second = harness.expect(&either, Admission::Admitted).await?;
    harness.check(second.per_charge[0].verdict.is_denied() && second.per_charge[1].remaining == 0, || {
        format!("{second:?}")
    })?;
    let _ = harness.expect(&either, Admission::Denied).await?;
    Ok(())
}

async fn independents<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let (live, shadow) = (per_minute(Algorithm::Gcra, 2), per_minute(Algorithm::Gcra, 3));
    let (a, b) = (Scope::new("independent/live"), Scope::new("independent/shadow"));
    let (a, b) = (CounterKey { scope: &a, parts: &[] }, CounterKey { scope: &b, parts: &[] });
    let watched = Charge { enforcement: Enforcement::Independent, ..Charge::new(b, &shadow, Cost::ONE) };
    let both = [Charge::new(a, &live, Cost::ONE), watched];
    let _ = harness.expect(&both, Admission::Admitted).await?;
    let _ = harness.expect(&both, Admission::Admitted).await?;
    let refused = harness.expect(&both, Admission::Denied).await?;
    harness.check(refused.per_charge[1].remaining == 0, || {
        format!("a shadow counts what is refused: {refused:?}")
    })?;
    let alone = harness.expect(&[watched], Admission::Admitted).await?;
    harness.check(alone.per_charge[0].verdict.is_denied(), || {
        format!("a rule in shadow denies, and the request passes: {alone:?}")
    })
}

async fn same_counter_twice<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in
        every_limit().iter().enumerate().filter(|(_, limit)| (5..1_000).contains(&limit.capacity()))
    {
        let scope = Scope::new(format!("twice/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        let pair = [Charge::new(key, limit, Cost::new(2)), Charge::new(key, limit, Cost::new(2))];
        let outcomes = harness.expect(&pair, Admission::Admitted).await?;
        let seen = outcomes.per_charge[0].remaining == limit.capacity() - 2
            && outcomes.per_charge[1].remaining == limit.capacity() - 4;
        harness.check(seen, || format!("the second sees the first: {outcomes:?}"))?;
        let rest = limit.capacity() - 4;
        let over = [Charge::new(key, limit, Cost::new(rest)), Charge::new(key, limit, Cost::ONE)];
        let refused = harness.expect(&over, Admission::Denied).await?;
        harness.check(refused.per_charge[0].remaining == rest, || {
            format!("the first was not taken: {refused:?}")
        })?;
    }
    Ok(())
}

async fn peeks<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in every_limit().iter().enumerate() {
        let scope = Scope::new(format!("look/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        for cost in [Cost::PEEK, Cost::ONE, Cost::PEEK, Cost::PEEK, Cost::ONE, Cost::PEEK] {
            let _ =
                harness.charge(&[Charge { permit: PermitId(9), ..Charge::new(key, limit, cost) }]).await?;
            harness.advance(1_000);
        }
    }
    Ok(())
}

async fn refunds<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in every_limit().iter().enumerate() {
        let scope = Scope::new(format!("refund/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        // Refunded before anything was taken; then three units taken, one and then many refunded.
        for cost in
            [Cost::refund(5), Cost::new(3), Cost::refund(1), Cost::PEEK, Cost::refund(1_000), Cost::PEEK]
        {
            let outcome = harness.charge(&[Charge::new(key, limit, cost)]).await?.per_charge[0];
            let full = !cost.is_refund() || cost.units() < 1_000 || outcome.remaining == limit.capacity();
            harness
                .check(full || limit.rate().count == 0, || format!("{limit} is not unused: {outcome:?}"))?;
        }
    }
    Ok(())
}

async fn debits<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in every_limit().iter().enumerate() {
        let scope = Scope::new(format!("debit/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        let charge = |cost| [Charge::new(key, limit, cost)];
        for cost in [Cost::new(2), Cost::new(u64::MAX), Cost::refund(3), Cost::PEEK, Cost::new(1)] {
            harness.debit(&charge(cost)).await?;
            let _ = harness.charge(&charge(Cost::PEEK)).await?;
            let _ = harness.charge(&charge(Cost::ONE)).await?;
            harness.advance(1_234);
        }
        harness.advance(limit.retention().as_micros());
        let healed = harness.charge(&charge(Cost::PEEK)).await?.per_charge[0];
        harness.check(healed.remaining == limit.capacity() || limit.rate().count == 0, || {
            format!("{limit}: {healed:?}")
        })?;
    }
    Ok(())
}

async fn releases<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let limit = build(LimitSpec::new(Algorithm::Concurrency, Rate::per(3, TimeDelta::from_secs(30))));
    let scope = Scope::new("release");
    let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
    let hold = |id, units| [Charge { permit: PermitId(id), ..Charge::new(key, &limit, Cost::new(units)) }];
    let permit = |id| [Permit { key, limit: &limit, id: PermitId(id) }];
    harness.release(&permit(1)).await?;
    let _ = harness.expect(&hold(1, 1), Admission::Admitted).await?;
    let _ = harness.expect(&hold(2, 2), Admission::Admitted).await?;
    let _ = harness.expect(&hold(3, 1), Admission::Denied).await?;
    harness.release(&permit(9)).await?;
    let _ = harness.expect(&hold(3, 1), Admission::Denied).await?;
    // A second release of the same permit must not free another holder's.
    harness.release(&permit(1)).await?;
    harness.release(&permit(1)).await?;
    let _ = harness.expect(&hold(3, 1), Admission::Admitted).await?;
    let _ = harness.expect(&hold(4, 1), Admission::Denied).await?;
    // A holder that charges again renews its permit; one that does not loses it at the deadline.
    harness.advance(29_000_000);
    let _ = harness.expect(&hold(2, 2), Admission::Admitted).await?;
    harness.advance(1_000_000);
    let late = harness.expect(&hold(4, 1), Admission::Admitted).await?;
    harness.check(late.per_charge[0].remaining == 0, || format!("{late:?}"))
}

async fn returns<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let forms = every_limit().into_iter().filter(Limit::is_leasable);
    for (number, limit) in forms.enumerate() {
        let mut rng = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("back/{number}"));
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        for turn in 0..60 {
            let units = 1 + rng.below(limit.capacity().clamp(1, 10));
            let taken = harness.now();
            let actual = harness.charge(&[Charge::new(key, &limit, Cost::new(units))]).await?;
            let full_at = taken + actual.per_charge[0].reset_after;
            if rng.below(3) == 0 {
                // Another charge is applied after it.
                let _ = harness.charge(&[Charge::new(key, &limit, Cost::ONE)]).await?;
            }
            harness.advance(some_time(&mut rng, &limit));
            if actual.admission == Admission::Admitted && rng.below(4) > 0 {
                let back = 1 + rng.below(units);
                // A busy bucket's units lie in the future: they count as taken when their slots begin.
                let ahead = actual.per_charge[0].reset_after.as_micros() * rng.below(2) / 2;
                let id = PermitId(1 + turn + 1_000 * number as u128);
                let taken = taken + TimeDelta::from_micros(ahead);
                harness
                    .return_units(&UnitReturn {
                        key,
                        limit: &limit,
                        units: back,
                        taken_at: taken,
                        full_at,
                        id,
                    })
                    .await?;
            }
            let _ = harness.charge(&[Charge::new(key, &limit, Cost::PEEK)]).await?;
        }
    }
    Ok(())
}

async fn keys<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    const BYTES: u128 = u128::from_be_bytes(*b"sixteen bytes ..");
    let network = |address, prefix| KeyPart::Network { address, prefix };
    let text = KeyPart::Text;
    let parts: Vec<Vec<KeyPart<'_>>> = vec![
        vec![],
        vec![text("")],
        vec![text(""), text("")],
        vec![text("abc")],
        vec![text("a"), text("bc")],
        vec![text("ab"), text("c")],
        vec![text("a"), text("b"), text("c")],
        vec![text(""), text("abc")],
        vec![text("abc"), text("")],
        vec![text("a_b"), text("c")],
        vec![text("a"), text("b_c")],
        vec![text("a:b"), text("c")],
        vec![text("a"), text("b:c")],
        vec![text("a/b"), text("c")],
        vec![text("a"), text("b/c")],
        vec![text("a\0b"), text("c")],
        vec![text("a"), text("b\0c")],
        vec![text("{a}"), text("b")],
        vec![text("a"), text("{b}")],
        vec![text("A"), text("bc")],
        vec![text("a%62"), text("c")],
        vec![text("\u{e9}")],
        vec![text("e\u{301}")],
        vec![text("sixteen bytes ..")],
        vec![text("sixteen bytes .."), text("")],
        vec![network(BYTES, 0)],
        vec![network(BYTES, 128)],
        vec![network(BYTES, 64)],
        vec![network(0xffff_0a00_0000, 104)],
        vec![text("10.0.0.0/8")],
        vec![network(0, 0)],
        vec![network(0, 0), text("")],
        vec![KeyPart::Secret("key one")],
        vec![KeyPart::Secret("key two")],
        vec![KeyPart::Secret("key one"), text("")],
        vec![KeyPart::Secret("key one"), KeyPart::Secret("key two")],
        vec![KeyPart::Secret("key two"), KeyPart::Secret("key one")],
    ];
    for limit in [per_minute(Algorithm::Gcra, 1), per_minute(Algorithm::SlidingLog, 1)] {
        for scope in [format!("keys/{}", limit.algorithm()), format!("keys/{}/", limit.algorithm())] {
            let scope = Scope::new(scope);
            for (number, caller) in parts.iter().enumerate() {
                let charge = [Charge::new(CounterKey { scope: &scope, parts: caller }, &limit, Cost::ONE)];
                let first = harness.charge(&charge).await?;
                harness.check(first.admission == Admission::Admitted, || {
                    format!("{caller:?} (number {number}) shares a counter with a key before it")
                })?;
                let _ = harness.expect(&charge, Admission::Denied).await?;
            }
        }
    }
    Ok(())
}

async fn window_turns<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in every_limit().iter().enumerate().filter(|(_, limit)| limit.rate().count > 0) {
        let scope = Scope::new(format!("turn/{number}/{limit}"));
        // Jittered keys start their windows at different instants; each must enforce its limit.
        for caller in ["alice", "bob", "carol"] {
            let key = CounterKey { scope: &scope, parts: &[KeyPart::Text(caller)] };
            let all = [Charge::new(key, limit, Cost::new(limit.capacity()))];
            let _ = harness.expect(&all, Admission::Admitted).await?;
            let refused = harness.expect(&all, Admission::Denied).await?;
            let crate::Verdict::Denied { retry_after: Some(wait) } = refused.per_charge[0].verdict else {
                return harness.check(false, || format!("{limit} names no instant: {refused:?}"));
            };
            harness.advance(wait.as_micros() - 1);
            let _ = harness.expect(&all, Admission::Denied).await?;
            harness.advance(1);
            let _ = harness.expect(&all, Admission::Admitted).await?;
        }
    }
    Ok(())
}

async fn expiries<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in every_limit().iter().enumerate() {
        let scope = Scope::new(format!("expiry/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        for _ in 0..3 {
            let _ = harness.charge(&[Charge::new(key, limit, Cost::new(limit.capacity()))]).await?;
            harness.advance(limit.retention().as_micros());
            let rested = harness.charge(&[Charge::new(key, limit, Cost::PEEK)]).await?.per_charge[0];
            harness.check(rested.remaining == limit.capacity() || limit.rate().count == 0, || {
                format!("{limit}: {rested:?}")
            })?;
        }
    }
    Ok(())
}

async fn clock_steps_back<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    for (number, limit) in every_limit().iter().enumerate().filter(|(_, limit)| limit.rate().count > 0) {
        let period = limit.rate().period.length().as_micros();
        for back in [1, period / 2, period, 3 * period] {
            let scope = Scope::new(format!("back/{number}/{back}/{limit}"));
            let key = CounterKey { scope: &scope, parts: &[] };
            let charge = |cost| [Charge::new(key, limit, cost)];
            let _ = harness.expect(&charge(Cost::new(limit.capacity())), Admission::Admitted).await?;
            harness.clock.set(harness.now() - TimeDelta::from_micros(back));
            for _ in 0..3 {
                let _ = harness.expect(&charge(Cost::ONE), Admission::Denied).await?;
            }
            harness.advance(limit.retention().as_micros());
            let _ = harness.expect(&charge(Cost::new(limit.capacity())), Admission::Admitted).await?;
            harness.advance(limit.retention().as_micros() + back);
        }
    }
    Ok(())
}

async fn zero_and_excessive_costs<S: CounterStore>(harness: &mut Harness<S>) -> Result<(), Violation> {
    let none = harness.expect(&[], Admission::Admitted).await?;
    harness.check(none.per_charge.is_empty(), || format!("{none:?}"))?;
    harness.debit(&[]).await?;
    harness.release(&[]).await?;
    for (number, limit) in every_limit().iter().enumerate() {
        let scope = Scope::new(format!("harmless/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        for cost in [Cost::new(u64::MAX), Cost::refund(u64::MAX), Cost::new(limit.capacity() + 1), Cost::PEEK]
        {
            let outcome = harness.charge(&[Charge::new(key, limit, cost)]).await?.per_charge[0];
            let whole = outcome.remaining == limit.capacity() || limit.rate().count == 0;
            harness.check(whole, || format!("{limit} was charged: {outcome:?}"))?;
        }
        harness.release(&[Permit { key, limit, id: PermitId(1) }]).await?;
    }
    Ok(())
}
