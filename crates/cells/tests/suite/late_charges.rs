//! Charges that a cell's own store applies after its deadline: the other cells learn of those that count.

use std::sync::{Arc, Mutex};
use tollgate_cells::message::Message;
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms, RegionalStore, SentCharge, Transport};
use tollgate_core::conformance::block_on;
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterId, CounterKey, CounterStore, KeyPart, LateAnswer, LateCharge,
    LateResponder, LimitSpec, ManualClock, Outcomes, Permit, Rate, Scope, StoreError, TimeDelta, Timestamp,
};
use tollgate_store::LeaseConfig;

/// No counter here has an owner.
#[derive(Clone)]
struct NoLink;

impl Transport for NoLink {
    async fn charge(&self, _: usize, _: Vec<SentCharge>, _: Vec<CounterId>) -> Result<Outcomes, StoreError> {
        Err(StoreError::Timeout)
    }
    async fn send(&self, _: usize, _: Message, _: Vec<CounterId>) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }
    fn post(&self, _: usize, _: Message) {}
}

/// A store whose every answer is late, and the names of the counters that it was sent.
#[derive(Default)]
struct Late(Mutex<Vec<(LateResponder, Vec<CounterId>)>>);

impl CounterStore for Late {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let (late, responder) = LateCharge::new();
        let ids = charges.iter().map(|charge| charge.key.id()).collect();
        self.0.lock().expect("answers").push((responder, ids));
        Err(StoreError::Late(late))
    }

    async fn debit(&self, _: &[Charge<'_>]) -> Result<(), StoreError> {
        Ok(())
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
            for (responder, ids) in near.own().0.lock().expect("answers").drain(..) {
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
