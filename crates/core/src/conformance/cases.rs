//! The cases. Each is a promise that a user of any store relies on.

use super::fixtures::{attempts, build, every_form, per_minute, some_cost, some_time};
use super::rng::SplitMix64;
use super::{Bench, Broken, reset_and_grant};
use crate::algorithm::Algorithm;
use crate::algorithm::concurrency::PermitId;
use crate::charge::{Admission, Charge, Enforcement, GiveBack, Permit};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, Part, Scope};
use crate::limit::Limit;
use crate::limit_spec::LimitSpec;
use crate::rate::Quota;
use crate::store::CounterStore;
use crate::time::Span;

pub(super) const NAMES: [&str; 17] = [
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
];

pub(super) async fn run<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    match NAMES.iter().position(|name| *name == bench.case) {
        Some(0) => every_algorithm(bench).await,
        Some(1) => all_or_none(bench).await,
        Some(2) => alternatives(bench).await,
        Some(3) => independents(bench).await,
        Some(4) => twice(bench).await,
        Some(5) => looks(bench).await,
        Some(6) => refunds(bench).await,
        Some(7) => debits(bench).await,
        Some(8) => releases(bench).await,
        Some(9) => keys(bench).await,
        Some(10) => turns(bench).await,
        Some(11) => expiries(bench).await,
        Some(12) => steps_back(bench).await,
        Some(13) => gives_back(bench).await,
        Some(14) => reset_and_grant::resets(bench).await,
        Some(15) => reset_and_grant::grants(bench).await,
        _ => harmless(bench).await,
    }
}

async fn every_algorithm<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let forms: Vec<(Limit, Enforcement)> = every_form()
        .into_iter()
        .map(|limit| (limit, Enforcement::Required))
        .chain(attempts().into_iter().map(|limit| (limit, Enforcement::Independent)))
        .collect();
    for (number, (limit, enforcement)) in forms.iter().enumerate() {
        let mut dice = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("algorithm/{number}/{limit}"));
        for _ in 0..400 {
            let who = [Part::Text(dice.pick::<&str>(&["alice", "bob"]))];
            let key = CounterKey { scope: &scope, parts: &who };
            let cost = some_cost(&mut dice, limit);
            let permit = PermitId(u128::from(dice.below(4)));
            let charge = Charge { enforcement: *enforcement, permit, ..Charge::new(key, limit, cost) };
            if dice.below(20) == 0 {
                bench.debit(&[charge]).await?;
            } else {
                let _ = bench.charge(&[charge]).await?;
            }
            bench.advance(some_time(&mut dice, limit));
        }
    }
    Ok(())
}

async fn all_or_none<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let mut dice = SplitMix64::new(2);
    let limits: Vec<Limit> = every_form().into_iter().filter(|limit| limit.quota().count > 0).collect();
    let scopes: Vec<Scope> = limits
        .iter()
        .enumerate()
        .map(|(number, limit)| Scope::new(format!("all/{number}/{limit}")))
        .collect();
    for _ in 0..4_000 {
        let picks: Vec<(usize, [Part<'_>; 1])> = (0..1 + dice.below(6))
            .map(|_| {
                let limit = usize::try_from(dice.below(limits.len() as u64)).unwrap_or(0);
                (limit, [Part::Text(dice.pick::<&str>(&["alice", "bob"]))])
            })
            .collect();
        let charges: Vec<Charge<'_>> = picks
            .iter()
            .map(|(limit, who)| {
                let key = CounterKey { scope: &scopes[*limit], parts: who };
                let cost = Cost::take(dice.below(4));
                let enforcement = *dice.pick(&[
                    Enforcement::Required,
                    Enforcement::Required,
                    Enforcement::Required,
                    Enforcement::Alternative,
                    Enforcement::Independent,
                ]);
                let permit = PermitId(u128::from(dice.below(4)));
                Charge { enforcement, permit, ..Charge::new(key, &limits[*limit], cost) }
            })
            .collect();
        let _ = bench.charge(&charges).await?;
        if dice.below(4) == 0 {
            bench.advance(dice.below(400_000));
        }
    }
    // And in words: a charge that fits is not taken where another does not.
    let (wide, narrow) = (per_minute(Algorithm::Gcra, 5), per_minute(Algorithm::FixedWindow, 1));
    let (a, b) = (Scope::new("all/wide"), Scope::new("all/narrow"));
    let (a, b) = (CounterKey { scope: &a, parts: &[] }, CounterKey { scope: &b, parts: &[] });
    let both = [Charge::new(a, &wide, Cost::ONE), Charge::new(b, &narrow, Cost::ONE)];
    let _ = bench.expect(&both, Admission::Admitted).await?;
    for _ in 0..10 {
        let refused = bench.expect(&both, Admission::Refused).await?;
        bench.check(refused.each[0].remaining == 4, || {
            format!("the denied request was charged: {refused:?}")
        })?;
    }
    Ok(())
}

async fn alternatives<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let (small, large) = (per_minute(Algorithm::FixedWindow, 1), per_minute(Algorithm::FixedWindow, 2));
    let (a, b) = (Scope::new("alternative/small"), Scope::new("alternative/large"));
    let (a, b) = (CounterKey { scope: &a, parts: &[] }, CounterKey { scope: &b, parts: &[] });
    let either = [Charge::new(a, &small, Cost::ONE), Charge::new(b, &large, Cost::ONE)]
        .map(|charge| Charge { enforcement: Enforcement::Alternative, ..charge });
    let first = bench.expect(&either, Admission::Admitted).await?;
    bench.check(first.each[0].remaining == 0 && first.each[1].remaining == 1, || {
        format!("both fit: {first:?}")
    })?;
    let second = bench.expect(&either, Admission::Admitted).await?;
    bench.check(second.each[0].verdict.is_denied() && second.each[1].remaining == 0, || {
        format!("{second:?}")
    })?;
    let _ = bench.expect(&either, Admission::Refused).await?;
    Ok(())
}

async fn independents<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let (live, shadow) = (per_minute(Algorithm::Gcra, 2), per_minute(Algorithm::Gcra, 3));
    let (a, b) = (Scope::new("independent/live"), Scope::new("independent/shadow"));
    let (a, b) = (CounterKey { scope: &a, parts: &[] }, CounterKey { scope: &b, parts: &[] });
    let watched = Charge { enforcement: Enforcement::Independent, ..Charge::new(b, &shadow, Cost::ONE) };
    let both = [Charge::new(a, &live, Cost::ONE), watched];
    let _ = bench.expect(&both, Admission::Admitted).await?;
    let _ = bench.expect(&both, Admission::Admitted).await?;
    let refused = bench.expect(&both, Admission::Refused).await?;
    bench
        .check(refused.each[1].remaining == 0, || format!("a shadow counts what is refused: {refused:?}"))?;
    let alone = bench.expect(&[watched], Admission::Admitted).await?;
    bench
        .check(alone.each[0].verdict.is_denied(), || format!("a shadow says no, and stops nobody: {alone:?}"))
}

async fn twice<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in
        every_form().iter().enumerate().filter(|(_, limit)| (5..1_000).contains(&limit.capacity()))
    {
        let scope = Scope::new(format!("twice/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        let pair = [Charge::new(key, limit, Cost::take(2)), Charge::new(key, limit, Cost::take(2))];
        let outcomes = bench.expect(&pair, Admission::Admitted).await?;
        let seen = outcomes.each[0].remaining == limit.capacity() - 2
            && outcomes.each[1].remaining == limit.capacity() - 4;
        bench.check(seen, || format!("the second sees the first: {outcomes:?}"))?;
        let rest = limit.capacity() - 4;
        let over = [Charge::new(key, limit, Cost::take(rest)), Charge::new(key, limit, Cost::ONE)];
        let refused = bench.expect(&over, Admission::Refused).await?;
        bench.check(refused.each[0].remaining == rest, || format!("the first was not taken: {refused:?}"))?;
    }
    Ok(())
}

async fn looks<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in every_form().iter().enumerate() {
        let scope = Scope::new(format!("look/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[Part::Text("alice")] };
        for cost in [Cost::LOOK, Cost::ONE, Cost::LOOK, Cost::LOOK, Cost::ONE, Cost::LOOK] {
            let _ = bench.charge(&[Charge { permit: PermitId(9), ..Charge::new(key, limit, cost) }]).await?;
            bench.advance(1_000);
        }
    }
    Ok(())
}

async fn refunds<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in every_form().iter().enumerate() {
        let scope = Scope::new(format!("refund/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[Part::Text("alice")] };
        // Given back before anything was taken; then three taken, one and many given back.
        for cost in
            [Cost::refund(5), Cost::take(3), Cost::refund(1), Cost::LOOK, Cost::refund(1_000), Cost::LOOK]
        {
            let outcome = bench.charge(&[Charge::new(key, limit, cost)]).await?.each[0];
            let full = !cost.is_refund() || cost.units() < 1_000 || outcome.remaining == limit.capacity();
            bench
                .check(full || limit.quota().count == 0, || format!("{limit} is not unused: {outcome:?}"))?;
        }
    }
    Ok(())
}

async fn debits<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in every_form().iter().enumerate() {
        let scope = Scope::new(format!("debit/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        let charge = |cost| [Charge::new(key, limit, cost)];
        for cost in [Cost::take(2), Cost::take(u64::MAX), Cost::refund(3), Cost::LOOK, Cost::take(1)] {
            bench.debit(&charge(cost)).await?;
            let _ = bench.charge(&charge(Cost::LOOK)).await?;
            let _ = bench.charge(&charge(Cost::ONE)).await?;
            bench.advance(1_234);
        }
        bench.advance(limit.memory().as_micros());
        let healed = bench.charge(&charge(Cost::LOOK)).await?.each[0];
        bench.check(healed.remaining == limit.capacity() || limit.quota().count == 0, || {
            format!("{limit}: {healed:?}")
        })?;
    }
    Ok(())
}

async fn releases<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let limit = build(LimitSpec::new(Algorithm::Concurrency, Quota::per(3, Span::from_secs(30))));
    let scope = Scope::new("release");
    let key = CounterKey { scope: &scope, parts: &[Part::Text("alice")] };
    let hold = |id, units| [Charge { permit: PermitId(id), ..Charge::new(key, &limit, Cost::take(units)) }];
    let permit = |id| [Permit { key, limit: &limit, id: PermitId(id) }];
    bench.release(&permit(1)).await?;
    let _ = bench.expect(&hold(1, 1), Admission::Admitted).await?;
    let _ = bench.expect(&hold(2, 2), Admission::Admitted).await?;
    let _ = bench.expect(&hold(3, 1), Admission::Refused).await?;
    bench.release(&permit(9)).await?;
    let _ = bench.expect(&hold(3, 1), Admission::Refused).await?;
    // A second release of the same permit must not free somebody else's.
    bench.release(&permit(1)).await?;
    bench.release(&permit(1)).await?;
    let _ = bench.expect(&hold(3, 1), Admission::Admitted).await?;
    let _ = bench.expect(&hold(4, 1), Admission::Refused).await?;
    // A holder that asks again renews; one that is silent loses its permit at the deadline.
    bench.advance(29_000_000);
    let _ = bench.expect(&hold(2, 2), Admission::Admitted).await?;
    bench.advance(1_000_000);
    let late = bench.expect(&hold(4, 1), Admission::Admitted).await?;
    bench.check(late.each[0].remaining == 0, || format!("{late:?}"))
}

async fn gives_back<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let forms = every_form().into_iter().filter(Limit::is_leasable);
    for (number, limit) in forms.enumerate() {
        let mut dice = SplitMix64::new(number as u64);
        let scope = Scope::new(format!("back/{number}"));
        let key = CounterKey { scope: &scope, parts: &[Part::Text("alice")] };
        for turn in 0..60 {
            let units = 1 + dice.below(limit.capacity().clamp(1, 10));
            let taken = bench.now();
            let told = bench.charge(&[Charge::new(key, &limit, Cost::take(units))]).await?;
            let full_at = taken + told.each[0].reset_after;
            if dice.below(3) == 0 {
                // Somebody takes after it.
                let _ = bench.charge(&[Charge::new(key, &limit, Cost::ONE)]).await?;
            }
            bench.advance(some_time(&mut dice, &limit));
            if told.admission == Admission::Admitted && dice.below(4) > 0 {
                let back = 1 + dice.below(units);
                // A busy bucket's units lie ahead: they count as taken when their slots begin.
                let ahead = told.each[0].reset_after.as_micros() * dice.below(2) / 2;
                let id = PermitId(1 + turn + 1_000 * number as u128);
                let taken = taken + Span::from_micros(ahead);
                bench.give_back(&GiveBack { key, limit: &limit, units: back, taken, full_at, id }).await?;
            }
            let _ = bench.charge(&[Charge::new(key, &limit, Cost::LOOK)]).await?;
        }
    }
    Ok(())
}

async fn keys<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    const BYTES: u128 = u128::from_be_bytes(*b"sixteen bytes ..");
    let network = |address, prefix| Part::Network { address, prefix };
    let text = Part::Text;
    let parts: Vec<Vec<Part<'_>>> = vec![
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
        vec![Part::Secret("key one")],
        vec![Part::Secret("key two")],
        vec![Part::Secret("key one"), text("")],
        vec![Part::Secret("key one"), Part::Secret("key two")],
        vec![Part::Secret("key two"), Part::Secret("key one")],
    ];
    for limit in [per_minute(Algorithm::Gcra, 1), per_minute(Algorithm::SlidingLog, 1)] {
        for scope in [format!("keys/{}", limit.algorithm()), format!("keys/{}/", limit.algorithm())] {
            let scope = Scope::new(scope);
            for (number, who) in parts.iter().enumerate() {
                let charge = [Charge::new(CounterKey { scope: &scope, parts: who }, &limit, Cost::ONE)];
                let first = bench.charge(&charge).await?;
                bench.check(first.admission == Admission::Admitted, || {
                    format!("{who:?} (number {number}) shares a counter with a key before it")
                })?;
                let _ = bench.expect(&charge, Admission::Refused).await?;
            }
        }
    }
    Ok(())
}

async fn turns<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in every_form().iter().enumerate().filter(|(_, limit)| limit.quota().count > 0) {
        let scope = Scope::new(format!("turn/{number}/{limit}"));
        // Jittered keys turn at instants of their own; each must keep its own promise.
        for who in ["alice", "bob", "carol"] {
            let key = CounterKey { scope: &scope, parts: &[Part::Text(who)] };
            let all = [Charge::new(key, limit, Cost::take(limit.capacity()))];
            let _ = bench.expect(&all, Admission::Admitted).await?;
            let refused = bench.expect(&all, Admission::Refused).await?;
            let crate::Verdict::Denied { retry_after: Some(wait) } = refused.each[0].verdict else {
                return bench.check(false, || format!("{limit} names no instant: {refused:?}"));
            };
            bench.advance(wait.as_micros() - 1);
            let _ = bench.expect(&all, Admission::Refused).await?;
            bench.advance(1);
            let _ = bench.expect(&all, Admission::Admitted).await?;
        }
    }
    Ok(())
}

async fn expiries<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in every_form().iter().enumerate() {
        let scope = Scope::new(format!("expiry/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        for _ in 0..3 {
            let _ = bench.charge(&[Charge::new(key, limit, Cost::take(limit.capacity()))]).await?;
            bench.advance(limit.memory().as_micros());
            let rested = bench.charge(&[Charge::new(key, limit, Cost::LOOK)]).await?.each[0];
            bench.check(rested.remaining == limit.capacity() || limit.quota().count == 0, || {
                format!("{limit}: {rested:?}")
            })?;
        }
    }
    Ok(())
}

async fn steps_back<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    for (number, limit) in every_form().iter().enumerate().filter(|(_, limit)| limit.quota().count > 0) {
        let period = limit.quota().period.length().as_micros();
        for back in [1, period / 2, period, 3 * period] {
            let scope = Scope::new(format!("back/{number}/{back}/{limit}"));
            let key = CounterKey { scope: &scope, parts: &[] };
            let charge = |cost| [Charge::new(key, limit, cost)];
            let _ = bench.expect(&charge(Cost::take(limit.capacity())), Admission::Admitted).await?;
            bench.clock.set(bench.now() - Span::from_micros(back));
            for _ in 0..3 {
                let _ = bench.expect(&charge(Cost::ONE), Admission::Refused).await?;
            }
            bench.advance(limit.memory().as_micros());
            let _ = bench.expect(&charge(Cost::take(limit.capacity())), Admission::Admitted).await?;
            bench.advance(limit.memory().as_micros() + back);
        }
    }
    Ok(())
}

async fn harmless<S: CounterStore>(bench: &mut Bench<S>) -> Result<(), Broken> {
    let none = bench.expect(&[], Admission::Admitted).await?;
    bench.check(none.each.is_empty(), || format!("{none:?}"))?;
    bench.debit(&[]).await?;
    bench.release(&[]).await?;
    for (number, limit) in every_form().iter().enumerate() {
        let scope = Scope::new(format!("harmless/{number}/{limit}"));
        let key = CounterKey { scope: &scope, parts: &[] };
        for cost in
            [Cost::take(u64::MAX), Cost::refund(u64::MAX), Cost::take(limit.capacity() + 1), Cost::LOOK]
        {
            let outcome = bench.charge(&[Charge::new(key, limit, cost)]).await?.each[0];
            let whole = outcome.remaining == limit.capacity() || limit.quota().count == 0;
            bench.check(whole, || format!("{limit} was charged: {outcome:?}"))?;
        }
        bench.release(&[Permit { key, limit, id: PermitId(1) }]).await?;
    }
    Ok(())
}
