//! Debits that a cell's store refuses after its deadline: they are made again, once.

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
    LateResponder, Limit, LimitSpec, ManualClock, Outcomes, Permit, Rate, Scope, StoreError, TimeDelta,
    Timestamp,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

/// How a store takes a debit.
#[derive(Clone, Debug, PartialEq)]
enum Takes {
    InTime,
    Late,
    /// The first counter is late, and the others fail.
    LateAndFailed,
    Fails,
    /// It makes the debits, and the connection is lost before its answer to all of them, or to the first one.
    Unanswered,
    PartlyUnanswered,
}

/// A store that does not make debits in time.
struct Refusing {
    own: MemoryStore<Arc<ManualClock>>,
    takes: Mutex<Takes>,
    asked: Mutex<Vec<(LateResponder, Vec<CounterId>)>>,
    /// Units of debits that it was sent, in time or not.
    sent: Mutex<Vec<Vec<u64>>>,
}

impl CounterStore for Refusing {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.own.charge(charges).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.sent.lock().expect("units").push(charges.iter().map(|charge| charge.cost.units()).collect());
        let late = |count: usize| {
            let (late, responder) = LateCharge::new();
            let ids = charges[..count].iter().map(|charge| charge.key.id()).collect();
            self.asked.lock().expect("answers").push((responder, ids));
            StoreError::Late(late)
        };
        let down = || StoreError::Unavailable("a server".to_owned());
        let takes = self.takes.lock().expect("a way").clone();
        match takes {
            Takes::InTime => self.own.debit(charges).await,
            Takes::Late => Err(late(charges.len())),
            Takes::LateAndFailed => {
                let parts = vec![(vec![0], late(1)), ((1..charges.len()).collect(), down())];
                StoreError::of_debits(parts, charges.len())
            }
            Takes::Fails => Err(down()),
            Takes::Unanswered | Takes::PartlyUnanswered => {
                self.own.debit(charges).await?;
                let count = if takes == Takes::Unanswered { charges.len() } else { 1 };
                let lost = StoreError::Lost("a connection".to_owned());
                StoreError::of_debits(vec![((0..count).collect(), lost)], charges.len())
            }
        }
    }

    async fn release(&self, _: &[Permit<'_>]) -> Result<(), StoreError> {
        Ok(())
    }
}

type Own = DurableStore<Refusing, Arc<ManualClock>>;
type Cell = RegionalStore<Own, NoLink, Arc<ManualClock>>;

fn cell(name: &str, peer: &str, clock: &Arc<ManualClock>) -> Cell {
    let own = Refusing {
        own: MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store"),
        takes: Mutex::new(Takes::InTime),
        asked: Mutex::default(),
        sent: Mutex::default(),
    };
    let durable = Durable::new(b"key", name, &[], 1, Peers::Cells, Arc::clone(clock));
    let own = DurableStore::new(own, Some(Arc::new(durable.expect("a record"))));
    let config = CellConfig::new(name, name, vec![PeerConfig::new(peer, peer)]);
    let members = Arc::new(Members::new(config, 1, Clock::now(&**clock)));
    let names = Pseudonyms::new(b"a secret of all cells");
    Cell::new(own, members, NoLink, names, Arc::clone(clock), LeaseConfig::default())
}

fn counter(algorithm: Algorithm) -> SentCounter {
    let spec = LimitSpec::new(algorithm, Rate::per(100, TimeDelta::from_secs(86_400)));
    SentCounter { scope: Scope::new("api|caller").with_durable(true), limit: spec.build().expect("valid") }
}

fn report(counter: &SentCounter, sequence: u64, units: &[(&str, i64)]) -> Message {
    let entry = |(name, units): &(&str, i64)| BatchEntry {
        counter: 0,
        values: KeyValues::new(&[KeyPart::Text(name)]),
        units: *units,
    };
    let entries = units.iter().map(entry).collect();
    let batch = Batch { sequence, counters: vec![counter.clone()], entries, ..Batch::default() };
    Message::Batch(Arc::new(batch))
}

fn used(cell: &Cell, SentCounter { scope, limit }: &SentCounter, name: &str) -> u64 {
    let parts = [KeyPart::Text(name)];
    let peek = Charge::new(CounterKey { scope, parts: &parts }, limit, Cost::PEEK);
    100 - block_on(cell.own().inner().charge(&[peek])).expect("an answer").per_charge[0].remaining
}

fn takes(cell: &Cell, way: Takes) {
    *cell.own().inner().takes.lock().expect("a way") = way;
}

/// Answers what is late; `Charged` makes the debits as well.
fn answer(cell: &Cell, limit: &Limit, scope: &Scope, answer: &LateAnswer, made: &[(&str, u64)]) {
    let own = cell.own().inner();
    let asked = std::mem::take(&mut *own.asked.lock().expect("answers"));
    assert!(!asked.is_empty(), "something is late");
    for (responder, ids) in asked {
        if matches!(answer, LateAnswer::Charged(_)) {
            for (name, units) in made {
                let parts = [KeyPart::Text(name)];
                let key = CounterKey { scope, parts: &parts };
                block_on(own.own.debit(&[Charge::new(key, limit, Cost::new(*units))])).expect("debited");
            }
            responder.answer(LateAnswer::Charged(ids), || {});
        } else {
            responder.answer(answer.clone(), || {});
        }
    }
}

/// Returns the units that are recorded for the database: own, and reported.
fn recorded(cell: &Cell) -> (i64, i64) {
    let durable = cell.own().durable().expect("a record");
    durable.collect();
    let rows = durable.pending(1_000);
    (rows.iter().map(|row| row.units).sum(), rows.iter().map(|row| row.reported).sum())
}

/// Without it a full Redis, or one that is a replica by now, loses what other cells have consumed, and no metric shows it.
#[test]
fn a_report_that_is_refused_late_is_made_again_once() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::Gcra] {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
        let (near, far, counter) =
            (cell("near", "far", &clock), cell("far", "near", &clock), counter(algorithm));
        let SentCounter { scope, limit } = &counter;
        takes(&near, Takes::Late);
        let reported = block_on(near.handle(&far.hello(), report(&counter, 1, &[("a", 5), ("b", 7)])));
        assert!(matches!(reported, Message::Done(_)), "{reported:?}");
        answer(&near, limit, scope, &LateAnswer::NotCharged, &[]);
        assert_eq!((used(&near, &counter, "a"), recorded(&near)), (0, (0, 0)), "{algorithm:?}");
        // Refused again, in time and late.
        takes(&near, Takes::Fails);
        block_on(near.make_late_debits());
        takes(&near, Takes::Late);
        block_on(near.make_late_debits());
        let sent = near.own().inner().sent.lock().expect("units").len();
        block_on(near.make_late_debits());
        assert_eq!(near.own().inner().sent.lock().expect("units").len(), sent, "it may still be made");
        answer(&near, limit, scope, &LateAnswer::NotCharged, &[]);
        takes(&near, Takes::InTime);
        for _ in 0..3 {
            block_on(near.make_late_debits());
        }
        assert_eq!((used(&near, &counter, "a"), used(&near, &counter, "b")), (5, 7), "{algorithm:?}");
        assert_eq!(recorded(&near), (0, 12), "{algorithm:?}");
        assert_eq!(near.stats().dropped_debits, 0);
    }
}

/// What was made, or may have been, must not be made again.
#[test]
fn a_report_that_is_made_late_is_not_made_again() {
    for (late, expected) in [(LateAnswer::Charged(Vec::new()), 5), (LateAnswer::Unknown, 0)] {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
        let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
        let counter = counter(Algorithm::FixedWindow);
        takes(&near, Takes::Late);
        let reported = block_on(near.handle(&far.hello(), report(&counter, 1, &[("a", 5)])));
        assert!(matches!(reported, Message::Done(_)), "{reported:?}");
        answer(&near, &counter.limit, &counter.scope, &late, &[("a", 5)]);
        takes(&near, Takes::InTime);
        block_on(near.make_late_debits());
        assert_eq!(used(&near, &counter, "a"), expected, "{late:?}");
        // What will never be known counts on the safe side.
        assert_eq!(recorded(&near), (0, 5), "{late:?}");
    }
}

/// Without it what is late is forgotten if something else of the same batch fails at once.
#[test]
fn a_report_of_which_a_part_fails_and_a_part_is_refused_late_counts_once() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
    let counter = counter(Algorithm::FixedWindow);
    let batch = || report(&counter, 1, &[("a", 5), ("b", 7)]);
    takes(&near, Takes::LateAndFailed);
    let refused = block_on(near.handle(&far.hello(), batch()));
    assert!(matches!(refused, Message::NotApplied(..)), "{refused:?}");
    answer(&near, &counter.limit, &counter.scope, &LateAnswer::NotCharged, &[]);
    takes(&near, Takes::InTime);
    block_on(near.make_late_debits());
    // It is sent again.
    let applied = block_on(near.handle(&far.hello(), batch()));
    assert!(matches!(applied, Message::Done(_)), "{applied:?}");
    block_on(near.make_late_debits());
    assert_eq!((used(&near, &counter, "a"), used(&near, &counter, "b")), (5, 7));
    assert_eq!(recorded(&near), (0, 12));
}

/// Without it each connection to Redis that breaks at the wrong moment debits what another cell has consumed once more.
#[test]
fn a_report_whose_connection_breaks_after_the_debit_counts_once() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::Gcra] {
        for way in [Takes::Unanswered, Takes::PartlyUnanswered] {
            let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
            let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
            let counter = counter(algorithm);
            takes(&near, way.clone());
            for _ in 0..5 {
                // A sender repeats what is not answered as done.
                let applied = block_on(near.handle(&far.hello(), report(&counter, 1, &[("a", 5), ("b", 7)])));
                assert!(matches!(applied, Message::Done(_)), "{way:?}: {applied:?}");
            }
            takes(&near, Takes::InTime);
            block_on(near.make_late_debits());
            assert_eq!((used(&near, &counter, "a"), used(&near, &counter, "b")), (5, 7), "{way:?}");
            assert_eq!(recorded(&near), (0, 12), "{way:?}");
        }
    }
}

/// Without it an owner whose Redis is late answers that it has debited what Redis then refuses.
#[test]
fn a_debit_of_another_cell_that_is_refused_late_is_made_again_once() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
    let counter = counter(Algorithm::FixedWindow);
    let SentCounter { scope, limit } = &counter;
    takes(&near, Takes::Late);
    let key = CounterKey { scope, parts: &[KeyPart::Text("a")] };
    let sent = SentCharge::new(&Charge::new(key, limit, Cost::new(9)));
    let done = block_on(near.handle(&far.hello(), Message::Debit(vec![sent])));
    assert!(matches!(done, Message::Done(_)), "{done:?}");
    answer(&near, limit, scope, &LateAnswer::NotCharged, &[]);
    takes(&near, Takes::InTime);
    for _ in 0..2 {
        block_on(near.make_late_debits());
    }
    assert_eq!((used(&near, &counter, "a"), recorded(&near)), (9, (9, 0)));
}

/// Without it one failed call of Redis forgets what other cells have consumed beyond a bucket's state, or debits it twice.
#[test]
fn an_overdraft_that_cannot_be_debited_is_kept() {
    for way in [Takes::InTime, Takes::Fails, Takes::Unanswered] {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
        let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
        let counter = counter(Algorithm::Gcra);
        let restored = |units: u64| clock.advance(TimeDelta::from_secs(864 * units));
        block_on(near.handle(&far.hello(), report(&counter, 1, &[("a", 250)])));
        // The state can have what is owed.
        restored(51);
        let peek = || {
            let parts = [KeyPart::Text("a")];
            let key = CounterKey { scope: &counter.scope, parts: &parts };
            let peeked = block_on(near.charge(&[Charge::new(key, &counter.limit, Cost::PEEK)]));
            peeked.map(|outcomes| outcomes.per_charge[0].remaining)
        };
        takes(&near, way.clone());
        assert_eq!(peek().is_err(), way == Takes::Fails, "{way:?}");
        takes(&near, Takes::InTime);
        assert_eq!(peek(), Ok(0), "{way:?}");
        restored(109);
        assert_eq!(peek(), Ok(10), "{way:?}");
    }
}

/// Without it units of a window that has ended are taken off the next one.
#[test]
fn what_no_longer_counts_is_not_made_again() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let (near, far) = (cell("near", "far", &clock), cell("far", "near", &clock));
    let counter = counter(Algorithm::FixedWindow);
    takes(&near, Takes::Late);
    block_on(near.handle(&far.hello(), report(&counter, 1, &[("a", 5)])));
    answer(&near, &counter.limit, &counter.scope, &LateAnswer::NotCharged, &[]);
    takes(&near, Takes::InTime);
    clock.advance(TimeDelta::from_secs(86_400));
    block_on(near.make_late_debits());
    assert_eq!(used(&near, &counter, "a"), 0);
}
