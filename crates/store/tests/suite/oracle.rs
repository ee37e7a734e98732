//! The store against a plain map of states: every outcome of random traces must be the same. If this fails, a user is
//! counted wrongly by the memory store alone.

use proptest::prelude::*;
use std::collections::HashMap;
use std::future::Future;
use std::task::{Context, Poll, Waker};
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, LimitSpec,
    ManualClock, Outcome, Outcomes, Permit, PermitId, Rate, Scope, State, TimeDelta, Timestamp,
};
use tollgate_store::{MemoryConfig, MemoryStore};

/// The limit that counts what it denies, by its place in [`limits`].
const COUNT_DENIED: usize = 6;
const START: Timestamp = Timestamp::from_secs(1_700_000_000);

fn limits() -> Vec<Limit> {
    let spec =
        |algorithm, count, secs| LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(secs)));
    let specs = [
        spec(Algorithm::Gcra, 5, 1),
        spec(Algorithm::Gcra, 7, 10).burst(3),
        spec(Algorithm::TokenBucket, 99_991, 86_400).burst(4), // too fine for a word
        spec(Algorithm::LeakyBucket, 4, 1).with_delay(),
        spec(Algorithm::FixedWindow, 6, 2),
        spec(Algorithm::FixedWindow, 3, 5).jitter(),
        spec(Algorithm::FixedWindow, 3, 2).count_denied(),
        spec(Algorithm::SlidingWindow, 6, 2),
        spec(Algorithm::StrictWindow, 6, 2),
        spec(Algorithm::SlidingLog, 6, 2),
        spec(Algorithm::Concurrency, 3, 4),
        spec(Algorithm::Gcra, 0, 1), // lets nothing through
        spec(Algorithm::TokenBucket, 6, 3).burst(4).refill_interval(TimeDelta::from_secs(1)).jitter(),
    ];
    specs.into_iter().map(|spec| spec.build().expect("a limit")).collect()
}

#[derive(Clone, Debug)]
struct OneCharge {
    limit: usize,
    key: usize,
    cost: i64,
    enforcement: Enforcement,
    permit: u128,
}

#[derive(Clone, Debug)]
enum Action {
    Charge(Vec<OneCharge>),
    Debit(OneCharge),
    Release(OneCharge),
    Advance(u64),
    Back(u64),
}

fn cost(units: i64) -> Cost {
    if units < 0 { Cost::refund(units.unsigned_abs()) } else { Cost::new(units.unsigned_abs()) }
}

fn one_charge(limits: &'static [usize]) -> impl Strategy<Value = OneCharge> {
    let enforcement = prop_oneof![
        6 => Just(Enforcement::Required),
        2 => Just(Enforcement::Alternative),
        2 => Just(Enforcement::Independent),
    ];
    let cost = prop_oneof![8 => Just(1), 3 => 2_i64..5, 1 => Just(0), 1 => -3_i64..0, 1 => Just(50)];
    (prop::sample::select(limits), 0..3_usize, cost, enforcement, 0..3_u128).prop_map(
        |(limit, key, cost, enforcement, permit)| OneCharge { limit, key, cost, enforcement, permit },
    )
}

fn act(limits: &'static [usize], backwards: u32) -> impl Strategy<Value = Action> {
    prop_oneof![
        20 => prop::collection::vec(one_charge(limits), 1..6).prop_map(Action::Charge),
        2 => one_charge(limits).prop_map(Action::Debit),
        2 => one_charge(limits).prop_map(Action::Release),
        6 => (0..1_500_000_u64).prop_map(Action::Advance),
        1 => (0..20_000_000_u64).prop_map(Action::Advance),
        backwards => (0..3_000_000_u64).prop_map(Action::Back),
    ]
}

/// A map of states, and the rules of a request in the fewest words.
#[derive(Default)]
struct Oracle(HashMap<(usize, usize), State>);

struct Known<'a> {
    limits: &'a [Limit],
    phases: &'a HashMap<(usize, usize), TimeDelta>,
    now: Timestamp,
}

impl Known<'_> {
    /// A peek changes nothing, nor does a denial, unless the limit counts attempts or a clock that moved backward left the
    /// state in the future. An unused state has nothing to refund.
    fn step(&self, charge: &OneCharge, state: &mut State, cost: Cost, id: PermitId) -> Outcome {
        let at = self.now + self.phases[&(charge.limit, charge.key)];
        let mut after = state.clone();
        let outcome = self.limits[charge.limit].step_with_permit(id, &mut after, at, cost);
        let corrects = match (&*state, &after) {
            (State::Bucket(_), _) => true,
            (State::Sliding(before), State::Sliding(after)) => after.start < before.start,
            (State::Window(before), State::Window(after)) => after.start < before.start,
            _ => false,
        };
        let is_denied = outcome.verdict.is_denied() && charge.limit != COUNT_DENIED && !corrects;
        if !(cost.is_peek() || is_denied || *state == State::Unused && cost.is_refund()) {
            *state = after;
        }
        outcome
    }
}

impl Oracle {
    fn charge(&mut self, known: &Known<'_>, charges: &[OneCharge]) -> Outcomes {
        let mut outcomes: Vec<Option<Outcome>> = vec![None; charges.len()];
        let independent = |charge: &OneCharge| charge.enforcement == Enforcement::Independent;
        for (i, charge) in charges.iter().enumerate().filter(|(_, charge)| independent(charge)) {
            let state = self.0.entry((charge.limit, charge.key)).or_default();
            outcomes[i] = Some(known.step(charge, state, cost(charge.cost), PermitId(charge.permit)));
        }
        let mut draft = self.0.clone();
        for (i, charge) in charges.iter().enumerate().filter(|(_, charge)| !independent(charge)) {
            let state = draft.entry((charge.limit, charge.key)).or_default();
            outcomes[i] = Some(known.step(charge, state, cost(charge.cost), PermitId(charge.permit)));
        }
        let mut each: Vec<Outcome> = outcomes.into_iter().map(|outcome| outcome.expect("charged")).collect();
        let admission = Outcomes::admission(charges.iter().map(|charge| charge.enforcement).zip(each.iter()));
        if admission == Admission::Admitted {
            self.0 = draft;
            return Outcomes { admission, at: known.now, per_charge: each.into() };
        }
        for (charge, outcome) in charges.iter().zip(&mut each).filter(|(charge, _)| !independent(charge)) {
            if outcome.verdict.is_allowed() {
                let state = self.0.entry((charge.limit, charge.key)).or_default();
                let look = known.step(charge, &mut state.clone(), Cost::PEEK, PermitId::ANONYMOUS);
                *outcome = Outcome { verdict: outcome.verdict, ..look };
            }
        }
        // A denial on its own changes nothing, but for an attempt that is counted.
        let is_attempt =
            |(charge, outcome): &(&OneCharge, &Outcome)| !independent(charge) && outcome.verdict.is_denied();
        for (charge, _) in charges.iter().zip(&each).filter(is_attempt) {
            let state = self.0.entry((charge.limit, charge.key)).or_default();
            let mut after = state.clone();
            let attempt = known.step(charge, &mut after, cost(charge.cost), PermitId(charge.permit));
            if attempt.verdict.is_denied() {
                *state = after;
            }
        }
        Outcomes { admission, at: known.now, per_charge: each.into() }
    }
}

fn ready<F: Future>(future: F) -> F::Output {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("memory never waits"),
    }
}

fn compare(acts: &[Action]) -> Result<(), TestCaseError> {
    let limits = limits();
    let scopes: Vec<Scope> = (0..limits.len()).map(|n| Scope::new(format!("scope {n}"))).collect();
    let parts: Vec<[KeyPart<'_>; 1]> = ["a", "b", "c"].map(|text| [KeyPart::Text(text)]).to_vec();
    let key = |limit: usize, key: usize| CounterKey { scope: &scopes[limit], parts: &parts[key] };
    let phases: HashMap<(usize, usize), TimeDelta> = (0..limits.len())
        .flat_map(|limit| (0..3).map(move |key| (limit, key)))
        .map(|(l, k)| ((l, k), limits[l].phase(key(l, k).stable_hash())))
        .collect();
    let clock = ManualClock::at(START);
    // So large that no two keys share a window: a slot that has expired and been given to another key forgets its
    // state, which a clock that then goes back would show.
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 30), &clock).expect("a store");
    let mut oracle = Oracle::default();
    let mut now = START;
    for act in acts {
        let known = Known { limits: &limits, phases: &phases, now };
        match act {
            Action::Charge(charges) => {
                let asked: Vec<Charge<'_>> = charges
                    .iter()
                    .map(|charge| Charge {
                        enforcement: charge.enforcement,
                        permit: PermitId(charge.permit),
                        ..Charge::new(key(charge.limit, charge.key), &limits[charge.limit], cost(charge.cost))
                    })
                    .collect();
                prop_assert_eq!(store.apply(&asked), oracle.charge(&known, charges), "{:?}", charges);
            }
            Action::Debit(charge) => {
                let asked = Charge {
                    permit: PermitId(charge.permit),
                    ..Charge::new(key(charge.limit, charge.key), &limits[charge.limit], cost(charge.cost))
                };
                ready(store.debit(&[asked])).expect("memory does not fail");
                let state = oracle.0.entry((charge.limit, charge.key)).or_default();
                let at = now + phases[&(charge.limit, charge.key)];
                if charge.cost < 0 {
                    known.step(charge, state, cost(charge.cost), PermitId(charge.permit));
                } else if charge.cost > 0 {
                    limits[charge.limit].debit(
                        PermitId(charge.permit),
                        state,
                        at,
                        charge.cost.unsigned_abs(),
                    );
                }
            }
            Action::Release(charge) => {
                let limit = &limits[charge.limit];
                let permit =
                    Permit { key: key(charge.limit, charge.key), limit, id: PermitId(charge.permit) };
                ready(store.release(&[permit])).expect("memory does not fail");
                let state = oracle.0.entry((charge.limit, charge.key)).or_default();
                limit.release(PermitId(charge.permit), state);
            }
            Action::Advance(micros) => now = now + TimeDelta::from_micros(*micros),
            Action::Back(micros) => now = now - TimeDelta::from_micros(*micros),
        }
        clock.set(now);
    }
    Ok(())
}

const ALL: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
/// Those that fit a slot. What lives aside forgets what has expired when it is next touched, also by a request that
/// is refused: the same thing, unless the clock then goes back.
const PACKED: &[usize] = &[0, 1, 3, 4, 5, 6, 7, 11];

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_store_answers_as_a_map_of_states_does(acts in prop::collection::vec(act(ALL, 0), 1..120)) {
        compare(&acts)?;
    }

    #[test]
    fn so_it_does_when_the_clock_goes_back(acts in prop::collection::vec(act(PACKED, 3), 1..120)) {
        compare(&acts)?;
    }
}

/// An alternative that does not fit writes nothing, and a refund of the same counter after it does: the window has turned.
/// Seen when the clock then goes back.
#[test]
fn a_refund_after_a_denied_alternative_turns_the_window() {
    let fixed = 4;
    let alternative =
        |cost| OneCharge { limit: fixed, key: 0, cost, enforcement: Enforcement::Alternative, permit: 0 };
    let alone =
        |cost| Action::Charge(vec![OneCharge { enforcement: Enforcement::Required, ..alternative(cost) }]);
    let acts = [
        alone(3),
        Action::Advance(2_000_000),
        Action::Charge(vec![alternative(50), alternative(-1)]),
        Action::Back(2_000_000),
        alone(0),
    ];
    compare(&acts).expect("the same outcomes");
}
