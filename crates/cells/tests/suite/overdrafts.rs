//! What cells have consumed beyond a counter's state: it is neither lost nor taken for more, whatever comes between.

use crate::no_link::NoLink;
use crate::refunds::{CELLS, Three, limit};
use futures_util::future::join;
use std::sync::Arc;
use tollgate_cells::message::{Batch, BatchEntry, Message};
use tollgate_cells::{CellConfig, KeyValues, Members, PeerConfig, Pseudonyms, RegionalStore, SentCounter};
use tollgate_core::conformance::{Fault, FaultyStore, block_on};
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, ManualClock, Scope, TimeDelta,
    Timestamp,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Store = FaultyStore<MemoryStore<Arc<ManualClock>>>;
type Cell = RegionalStore<Store, NoLink, Arc<ManualClock>>;

fn cell(own: &str, clock: &Arc<ManualClock>) -> Cell {
    let peers = ["a", "b", "c"].into_iter().filter(|name| *name != own);
    let peers = peers.map(|name| PeerConfig::new(name, name)).collect();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), Arc::clone(clock)).expect("a store");
    let members = Arc::new(Members::new(CellConfig::new(own, own, peers), 1, Clock::now(&**clock)));
    let names = Pseudonyms::new(b"a secret of all cells");
    let store = Store::new(store);
    store.set_fault(|_, _| Fault::wait());
    Cell::new(store, members, NoLink, names, Arc::clone(clock), LeaseConfig::default())
}

/// Without it reports of two cells that arrive together are cut to what the counter had room for before both, and what the
/// cells refund later is taken off what this cell and others have consumed.
#[test]
fn reports_that_arrive_together_are_counted_in_full() {
    for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingLog] {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
        let [a, b, c] = ["a", "b", "c"].map(|name| cell(name, &clock));
        let counter = SentCounter { scope: Scope::new("api|caller"), limit: limit(algorithm, 1_000, 86_400) };
        let parts = [KeyPart::Text("a")];
        let key = CounterKey { scope: &counter.scope, parts: &parts };
        block_on(c.debit(&[Charge::new(key, &counter.limit, Cost::new(1_000))])).expect("debited");
        let batch = |sequence: u64, units: i64| {
            let entries = vec![BatchEntry { counter: 0, values: KeyValues::new(&parts), units }];
            let counters = vec![counter.clone()];
            Message::Batch(Arc::new(Batch { sequence, counters, entries, ..Batch::default() }))
        };
        let (from_a, from_b) = (a.hello(), b.hello());
        for (sequence, units) in [(1, 1_000), (2, -1_000)] {
            let both =
                join(c.handle(&from_a, batch(sequence, units)), c.handle(&from_b, batch(sequence, units)));
            let (one, other) = block_on(both);
            assert!(matches!((&one, &other), (Message::Done(_), Message::Done(_))), "{one:?} {other:?}");
        }
        // What this cell has consumed is left.
        let peek = [Charge::new(key, &counter.limit, Cost::PEEK)];
        let _ = block_on(c.charge(&peek)).expect("decided");
        let left = block_on(c.own().charge(&peek)).expect("decided").per_charge[0].remaining;
        assert_eq!(left, 0, "{algorithm:?}");
    }
}

/// Three cells whose bucket of this many a second all have used at once.
fn overdrawn(count: u64, secs: u64) -> Three {
    let three = Three::start(limit(Algorithm::Gcra, count, secs));
    assert!((0..CELLS).all(|cell| three.admits(cell, count)));
    three.exchange();
    assert!((0..CELLS).all(|cell| !three.admits(cell, 1)));
    three
}

/// Without it what a cell reports in the moment after an overdraft has ended is refunded with it.
#[test]
fn an_overdraft_that_has_ended_takes_nothing_with_it() {
    let three = overdrawn(1_000, 1);
    three.clock.advance(TimeDelta::from_millis(3_000));
    let report = three.batch(&[(0, 900)], vec![three.counter.clone()]);
    let answer = block_on(three.cells[0].handle(&three.cells[1].hello(), report));
    assert!(matches!(answer, Message::Done(_)), "{answer:?}");
    let parts = [KeyPart::Text("a")];
    let key = CounterKey { scope: &three.counter.scope, parts: &parts };
    let peek = [Charge::new(key, &three.counter.limit, Cost::PEEK)];
    let _ = three.left(0);
    let left = block_on(three.cells[0].own().charge(&peek)).expect("decided").per_charge[0].remaining;
    assert_eq!(left, 100);
}

/// Without it callers that have used up a small limit stay locked out for days after it is raised.
#[test]
fn an_overdraft_is_a_number_of_units_to_a_larger_limit() {
    let mut three = overdrawn(10, 86_400);
    three.counter.limit = limit(Algorithm::Gcra, 1_000, 86_400);
    for cell in 0..CELLS {
        let left = three.left(cell);
        assert!((968..=970).contains(&left), "{left}");
        assert!(three.admits(cell, 900));
    }
}

/// Without it an overdraft of a limit that recovers within seconds erases what is used of a day's.
#[test]
fn an_overdraft_is_a_number_of_units_to_a_slower_limit() {
    let mut three = overdrawn(100, 1);
    three.counter.limit = limit(Algorithm::Gcra, 100, 86_400);
    // Two hundred are owed, which is what a state can represent.
    three.clock.advance(TimeDelta::from_millis(1_000));
    assert!(!three.admits(0, 1));
    three.clock.advance(TimeDelta::from_secs(60));
    assert_eq!(three.left(0), 0);
    assert!(!three.admits(0, 1));
}

/// Without it a refund by a limit of another scale moves an overdraft by that limit's time.
#[test]
fn a_refund_takes_the_same_units_off_an_overdraft_of_another_scale() {
    let mut three = overdrawn(10, 86_400);
    let taken = three.cells[1].now();
    three.counter.limit = limit(Algorithm::Gcra, 11, 3_600);
    // Thirty are owed; ten of them are refunded by a limit that restores them in an hour.
    three.cancel(1, 10, taken);
    three.exchange();
    three.counter.limit = limit(Algorithm::Gcra, 10, 86_400);
    let reset = three.charged(0, Cost::PEEK).reset_after.as_micros() / 1_000_000;
    assert!((2 * 86_400 - 60..=2 * 86_400 + 60).contains(&reset), "{reset}");
}

/// Without it a settlement far beyond a limit denies callers for days at the other cells, and for one at its own.
#[test]
fn a_settlement_far_beyond_the_limit_is_reported_as_far_as_it_counts_here() {
    for algorithm in [Algorithm::Gcra, Algorithm::FixedWindow] {
        let three = Three::start(limit(algorithm, 1_000, 86_400));
        assert!(three.admits(0, 600));
        three.exchange();
        let parts = [KeyPart::Text("a")];
        let key = CounterKey { scope: &three.counter.scope, parts: &parts };
        let settled = Charge::new(key, &three.counter.limit, Cost::new(1_000_000_000_000_000));
        block_on(three.cells[0].debit(&[settled])).expect("debited");
        three.exchange();
        let reset = |cell: usize| three.charged(cell, Cost::PEEK).reset_after;
        assert!(three.left(1) == 0 && reset(1) <= reset(0) && reset(2) <= reset(0), "{algorithm:?}");
    }
}

/// Without it a reservation that another node of the cell has canceled, in the store that they share, is debited again.
#[test]
fn what_another_node_has_refunded_in_the_store_stays_refunded() {
    let three = overdrawn(1_000, 3_600);
    let taken = three.cells[0].now();
    let parts = [KeyPart::Text("a")];
    let key = CounterKey { scope: &three.counter.scope, parts: &parts };
    let refund = [Charge::new(key, &three.counter.limit, Cost::refund(1_000))];
    block_on(three.cells[0].own().debit(&refund)).expect("refunded");
    three.cancel(1, 1_000, taken);
    three.exchange();
    assert_eq!(three.left(0), 0, "the third cell's are used");
    three.cancel(2, 1_000, taken);
    three.exchange();
    assert_eq!(three.left(0), 1_000);
}
