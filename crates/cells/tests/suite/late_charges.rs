//! Charges that a cell's own store applies after its deadline: the other cells learn of those that count.

use crate::no_link::NoLink;
use std::sync::{Arc, Mutex};
use tollgate_cells::durable::{Durable, DurableStore, Peers};
use tollgate_cells::message::{Batch, BatchEntry, Message};
use tollgate_cells::{
    CellConfig, KeyValues, Members, PeerConfig, Pseudonyms, RegionalStore, SentCharge, SentCounter,
};
use tollgate_core::conformance::block_on;
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterId, CounterKey, CounterStore, KeyPart, LateAnswer, LateCharge,
    LateResponder, LimitSpec, ManualClock, Outcomes, Permit, Rate, Scope, StoreError, TimeDelta, Timestamp,
};
use tollgate_store::LeaseConfig;

/// A store whose every answer to a charge is late.
#[derive(Default)]
struct Late {
    /// The charges, by the names of their counters.
    asked: Mutex<Vec<(LateResponder, Vec<CounterId>)>>,
    /// Units of the debits, which are in time unless they fail.
    debited: Mutex<Vec<u64>>,
    /// How debits fail, if they do.
    failure: Mutex<Option<StoreError>>,
}

impl CounterStore for Late {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let (late, responder) = LateCharge::new();
        let ids = charges.iter().map(|charge| charge.key.id()).collect();
        self.asked.lock().expect("answers").push((responder, ids));
        Err(StoreError::Late(late))
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.debited.lock().expect("units").extend(charges.iter().map(|charge| charge.cost.units()));
        self.failure.lock().expect("an error").clone().map_or(Ok(()), Err)
    }

    async fn release(&self, _: &[Permit<'_>]) -> Result<(), StoreError> {
        Ok(())
    }
}

type Cell = RegionalStore<Late, NoLink, Arc<ManualClock>>;

fn cell(name: &str, peer: &str, clock: &Arc<ManualClock>) -> Cell {
    let config = CellConfig::new(name, name, vec![PeerConfig::new(peer, peer)]);
    let members = Arc::new(Members::new(config, 1, Clock::now(&**clock)));
    let names = Pseudonyms::new(b"a secret of all cells");
    Cell::new(Late::default(), members, NoLink, names, Arc::clone(clock), LeaseConfig::default())
}

/// What the caller of a late charge does, and what the store answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Kept,
    Dropped,
    NotCharged,
}

/// Without it, all that a cell admits while its Redis is slower than the deadline is missing in the other cells.
#[test]
fn a_late_charge_that_is_kept_is_reported_once() {
    let spec = LimitSpec::new(Algorithm::Gcra, Rate::per(10, TimeDelta::from_secs(3_600)));
    let (limit, scope) = (spec.build().expect("valid"), Scope::new("api|caller"));
    for part in [KeyPart::Text("a"), KeyPart::Secret("sk_live_4242424242424242")] {
        for ends in [Ends::Kept, Ends::Dropped, Ends::NotCharged] {
            let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
            let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
            near.members().on_hello(0, far.hello());
            let parts = [part];
            let key = CounterKey { scope: &scope, parts: &parts };
            let charge = Charge::new(key, &limit, Cost::new(3));
            let error = block_on(near.charge(&[charge])).expect_err("late");
            let answers = Arc::new(Mutex::new(Vec::new()));
            if ends == Ends::Dropped {
                drop(error);
            } else {
                let answers = Arc::clone(&answers);
                error.late()[0].keep(move |answer| answers.lock().expect("answers").push(answer));
            }
            for (responder, ids) in near.own().asked.lock().expect("answers").drain(..) {
                let charged = LateAnswer::Charged(ids);
                let answer = if ends == Ends::NotCharged { LateAnswer::NotCharged } else { charged };
                responder.answer(answer, || {});
            }
            near.tick();
            let units: Vec<i64> = near.next_batch(0).entries.iter().map(|entry| entry.units).collect();
            let expected = match ends {
                Ends::Kept => (vec![3], vec![LateAnswer::Charged(vec![key.id()])]),
                Ends::Dropped => (Vec::new(), Vec::new()),
                Ends::NotCharged => (Vec::new(), vec![LateAnswer::NotCharged]),
            };
            let answers = answers.lock().expect("answers").clone();
            assert_eq!((units, answers), expected, "{part:?}, {ends:?}");
        }
    }
}

/// What a store may have debited is not sent again, so it is reported: once, and as its late answer says; if there will be none, a
/// refund is not.
#[test]
fn a_debit_in_doubt_is_reported_and_counts_as_made() {
    let spec = LimitSpec::new(Algorithm::FixedWindow, Rate::per(10, TimeDelta::from_secs(3_600)));
    let (limit, scope) = (spec.build().expect("valid"), Scope::new("api|caller"));
    let lost = || StoreError::Lost("a connection".to_owned());
    let down = || StoreError::Unavailable("a server".to_owned());
    let parts = [KeyPart::Text("a")];
    let key = CounterKey { scope: &scope, parts: &parts };
    let made = || Some(LateAnswer::Charged(vec![key.id()]));
    let (charge, refund) = (Cost::new(3), Cost::refund(3));
    let cases = [
        (None, made(), charge, 8),
        (None, made(), refund, 2),
        (None, Some(LateAnswer::NotCharged), charge, 5),
        (None, Some(LateAnswer::NotCharged), refund, 5),
        (None, Some(LateAnswer::Unknown), charge, 8),
        (None, Some(LateAnswer::Unknown), refund, 5),
        (Some(lost()), None, charge, 8),
        (Some(lost()), None, refund, 5),
        (Some(down()), None, charge, 5),
        (Some(down()), None, refund, 5),
    ];
    for (failure, answer, cost, reported) in cases {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
        let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
        near.members().on_hello(0, far.hello());
        let debit = Charge::new(key, &limit, cost);
        block_on(near.debit(&[Charge { cost: Cost::new(5), ..debit }])).expect("debited");
        let (late, responder) = LateCharge::new();
        *near.own().failure.lock().expect("an error") =
            Some(failure.clone().unwrap_or(StoreError::Late(late)));
        let error = block_on(near.debit(&[debit])).expect_err("a failure");
        assert_eq!(error.is_in_doubt(), failure != Some(down()));
        error.keep_late();
        if let Some(answer) = answer.clone() {
            responder.answer(answer, || unreachable!("it is kept"));
        }
        near.tick();
        let units: Vec<i64> = near.next_batch(0).entries.iter().map(|entry| entry.units).collect();
        assert_eq!(units, [reported], "{failure:?}, {answer:?}, {cost:?}");
        // Another cell would repeat what is answered as failed.
        let answer = block_on(near.handle(&far.hello(), Message::Debit(vec![SentCharge::new(&debit)])));
        assert_eq!(matches!(answer, Message::Done(_)), failure != Some(down()), "{answer:?}");
    }
}

/// Without it, all that a durable limit admits while Redis is slower than the deadline is missing after a loss.
#[test]
fn a_late_charge_that_is_kept_is_durable() {
    let spec = LimitSpec::new(Algorithm::FixedWindow, Rate::per(10, TimeDelta::from_secs(86_400)));
    let (limit, scope) = (spec.build().expect("valid"), Scope::new("api|caller").with_durable(true));
    for ends in [Ends::Kept, Ends::Dropped, Ends::NotCharged] {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
        let durable = Durable::new(b"key", "process", &[], 1, Peers::None, Arc::clone(&clock));
        let durable = Arc::new(durable.expect("a record"));
        let store = DurableStore::new(Late::default(), Some(Arc::clone(&durable)));
        let parts = [KeyPart::Text("a")];
        let key = CounterKey { scope: &scope, parts: &parts };
        let error = block_on(store.charge(&[Charge::new(key, &limit, Cost::new(3))])).expect_err("late");
        if ends == Ends::Dropped {
            drop(error);
        } else {
            error.late()[0].keep(|_| {});
        }
        for (responder, ids) in store.inner().asked.lock().expect("answers").drain(..) {
            let charged = LateAnswer::Charged(ids);
            let answer = if ends == Ends::NotCharged { LateAnswer::NotCharged } else { charged };
            responder.answer(answer, || {});
        }
        durable.collect();
        let units: Vec<i64> = durable.pending(8).iter().map(|row| row.units).collect();
        assert_eq!(units, if ends == Ends::Kept { vec![3] } else { Vec::new() }, "{ends:?}");
    }
}

/// Without it a cell whose Redis is slower than the deadline of a check applies no reports, and counts as silent.
#[test]
fn reports_are_applied_by_a_store_whose_reads_are_late() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
    let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
    for (algorithm, debited) in [(Algorithm::Gcra, [5, 20]), (Algorithm::FixedWindow, [5, 20])] {
        let spec = LimitSpec::new(algorithm, Rate::per(10, TimeDelta::from_secs(3_600)));
        let limit = spec.build().expect("valid");
        let counters = vec![SentCounter { scope: Scope::new(format!("api|{algorithm:?}")), limit }];
        for (units, debited) in [5, 25].into_iter().zip(debited) {
            clock.advance(TimeDelta::from_millis(200));
            let values = KeyValues::new(&[KeyPart::Text(&units.to_string())]);
            let entries = vec![BatchEntry { counter: 0, values, units }];
            let (counters, sequence) = (counters.clone(), near.now().as_micros());
            let batch = Batch { sequence, counters, entries, ..Batch::default() };
            let answer = block_on(near.handle(&far.hello(), Message::Batch(Arc::new(batch))));
            assert!(matches!(answer, Message::Done(_)), "{answer:?}");
            assert_eq!(near.own().debited.lock().expect("units").pop(), Some(debited), "{algorithm:?}");
        }
    }
}
