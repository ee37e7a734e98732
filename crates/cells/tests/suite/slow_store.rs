//! A cell whose store is slow applies what other cells have consumed in time for an answer.

use crate::no_link::NoLink;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_cells::message::{Batch, BatchEntry, Message};
use tollgate_cells::{CellConfig, KeyValues, Members, PeerConfig, Pseudonyms, RegionalStore, SentCounter};
use tollgate_core::conformance::{block_on, yield_once};
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, LimitSpec, ManualClock, Outcomes,
    Permit, Rate, Scope, StoreError, TimeDelta, Timestamp,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

/// A store that answers later: every request waits once, and a debit takes time.
struct Slow {
    own: MemoryStore<Arc<ManualClock>>,
    clock: Arc<ManualClock>,
    time_of_debit: TimeDelta,
    reading: AtomicUsize,
    max_reading: AtomicUsize,
    debited: AtomicUsize,
}

impl CounterStore for Slow {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let reading = self.reading.fetch_add(1, Ordering::Relaxed) + 1;
        self.max_reading.fetch_max(reading, Ordering::Relaxed);
        yield_once().await;
        self.reading.fetch_sub(1, Ordering::Relaxed);
        self.own.charge(charges).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.clock.advance(self.time_of_debit);
        self.debited.fetch_add(charges.len(), Ordering::Relaxed);
        self.own.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.own.release(permits).await
    }
}

type Cell = RegionalStore<Slow, NoLink, Arc<ManualClock>>;

fn cell(name: &str, peer: &str, time_of_debit: TimeDelta, clock: &Arc<ManualClock>) -> Cell {
    let own = Slow {
        own: MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), Arc::clone(clock)).expect("a store"),
        clock: Arc::clone(clock),
        time_of_debit,
        reading: AtomicUsize::new(0),
        max_reading: AtomicUsize::new(0),
        debited: AtomicUsize::new(0),
    };
    let config = CellConfig::new(name, name, vec![PeerConfig::new(peer, peer)]);
    let members = Arc::new(Members::new(config, 1, Clock::now(&**clock)));
    let names = Pseudonyms::new(b"a secret of all cells");
    Cell::new(own, members, NoLink, names, Arc::clone(clock), LeaseConfig::default())
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)))
}

fn small() -> SentCounter {
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(5, TimeDelta::from_secs(3_600)));
    SentCounter { scope: Scope::new("api|login"), limit: limit.build().expect("valid") }
}

/// A unit of each of these many counters of a small limit.
fn batch(counters: usize) -> Message {
    let entry = |at: usize| BatchEntry {
        counter: 0,
        values: KeyValues::new(&[KeyPart::Text(&format!("k{at}"))]),
        units: 1,
    };
    let entries = (0..counters).map(entry).collect();
    Message::Batch(Arc::new(Batch {
        sequence: 1,
        counters: vec![small()],
        entries,
        covers: Some(200_000),
        ..Batch::default()
    }))
}

fn left(cell: &Cell, at: usize) -> u64 {
    let (SentCounter { scope, limit }, name) = (small(), format!("k{at}"));
    let parts = [KeyPart::Text(&name)];
    let peek = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::PEEK);
    block_on(cell.charge(&[peek])).expect("decided").per_charge[0].remaining
}

/// Without it a batch takes a round trip to Redis for each counter of a small limit, and a modest number of new callers
/// silences the cell.
#[test]
fn the_counters_of_a_batch_are_read_together() {
    let clock = clock();
    let (near, far) =
        (cell("near", "far", TimeDelta::ZERO, &clock), cell("far", "near", TimeDelta::ZERO, &clock));
    let Message::Done(_) = block_on(near.handle(&far.hello(), batch(1_000))) else { panic!("not applied") };
    let (most, debited) =
        (near.own().max_reading.load(Ordering::Relaxed), near.own().debited.load(Ordering::Relaxed));
    assert!((100..=256).contains(&most), "{most}");
    assert_eq!((debited, left(&near, 0), left(&near, 999)), (1_000, 4, 4));
}

/// Without it the sender takes a slow cell for silent and sends the batch again and again, and lag grows for ever.
#[test]
fn a_large_batch_is_applied_in_several_attempts_and_each_entry_once() {
    let clock = clock();
    let slow = TimeDelta::from_millis(600);
    let (near, far) = (cell("near", "far", slow, &clock), cell("far", "near", slow, &clock));
    far.members().on_hello(0, near.hello());
    let mut attempts = 0;
    loop {
        let sent = far.now();
        let answer = block_on(near.handle(&far.hello(), batch(5_000)));
        attempts += 1;
        assert!(far.now().since(sent) < TimeDelta::from_secs(2), "the sender no longer waits");
        if matches!(answer, Message::Done(_)) {
            break;
        }
        assert!(matches!(answer, Message::Busy(_)), "{answer:?}");
        far.on_batch_answer(0, 1, sent, &answer);
        assert!(!far.members().is_silent(0, far.now()), "it has answered");
        assert_eq!(near.stats().batches_received, 0);
    }
    assert_eq!((attempts, near.own().debited.load(Ordering::Relaxed)), (3, 5_000));
    assert_eq!((near.stats().batches_received, near.stats().counters_received), (1, 5_000));
    assert!([0, 1_023, 1_024, 2_500, 4_999].into_iter().all(|at| left(&near, at) == 4));
    assert!(matches!(block_on(near.handle(&far.hello(), batch(5_000))), Message::Done(_)));
    assert_eq!(near.stats().batches_repeated, 1);
}
