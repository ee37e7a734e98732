//! Refunds between cells: what is reserved and canceled in one cell is, in the others, as if it had not been.

use crate::no_link::NoLink;
use std::sync::Arc;
use tollgate_cells::message::{Batch, BatchEntry, Message, decode, encode};
use tollgate_cells::{CellConfig, KeyValues, Members, PeerConfig, Pseudonyms, RegionalStore, SentCounter};
use tollgate_core::conformance::block_on;
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec,
    ManualClock, Outcome, Outcomes, Rate, Scope, TimeDelta, Timestamp, Verdict,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

pub(crate) type Cell = RegionalStore<MemoryStore<Arc<ManualClock>>, NoLink, Arc<ManualClock>>;

/// Three cells that share one counter.
pub(crate) struct Three {
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) cells: Vec<Cell>,
    pub(crate) counter: SentCounter,
}

pub(crate) const CELLS: usize = 3;

/// Returns the cell that is this peer of another.
fn cell_of(own: usize, peer: usize) -> usize {
    if peer < own { peer } else { peer + 1 }
}

impl Three {
    pub(crate) fn start(limit: Limit) -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_700_000_000)));
        let cell = |own: usize| {
            let store = MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), Arc::clone(&clock));
            let peers = (0..CELLS - 1).map(|peer| format!("c{}", cell_of(own, peer)));
            let peers = peers.map(|name| PeerConfig::new(name.clone(), name)).collect();
            let config = CellConfig::new(format!("c{own}"), format!("c{own}"), peers);
            let members = Arc::new(Members::new(config, 7, Clock::now(&*clock)));
            let (names, clock) = (Pseudonyms::new(b"a secret of all cells"), Arc::clone(&clock));
            Cell::new(store.expect("a store"), members, NoLink, names, clock, LeaseConfig::default())
        };
        let cells: Vec<Cell> = (0..CELLS).map(cell).collect();
        for own in 0..CELLS {
            for peer in 0..CELLS - 1 {
                cells[own].members().on_hello(peer, cells[cell_of(own, peer)].hello());
            }
        }
        let three = Self { clock, cells, counter: SentCounter { scope: Scope::new("api|caller"), limit } };
        (0..2).for_each(|_| three.exchange());
        three
    }

    /// Ends a tick: sends each cell's consumption to the others, as bytes.
    pub(crate) fn exchange(&self) {
        self.cells.iter().for_each(Cell::tick);
        for (own, cell) in self.cells.iter().enumerate() {
            for peer in 0..CELLS - 1 {
                let (batch, sent) = (cell.next_batch(peer), cell.now());
                let sequence = batch.sequence;
                let bytes = encode(1, &Message::Batch(batch));
                let (_, message) = decode(&bytes[4..]).expect("a message");
                let answer = block_on(self.cells[cell_of(own, peer)].handle(&cell.hello(), message));
                assert!(matches!(answer, Message::Done(_)), "{answer:?}");
                cell.on_batch_answer(peer, sequence, sent, &answer);
            }
        }
        self.cells.iter().for_each(Cell::tick);
    }

    pub(crate) fn charged(&self, cell: usize, cost: Cost) -> Outcome {
        let parts = [KeyPart::Text("a")];
        let key = CounterKey { scope: &self.counter.scope, parts: &parts };
        let charges = [Charge::new(key, &self.counter.limit, cost)];
        let (cell, mut outcomes) = (&self.cells[cell], Outcomes::default());
        if !cell.try_charge(&charges, &mut outcomes) {
            outcomes = block_on(cell.charge(&charges)).expect("decided");
        }
        let outcome = outcomes.per_charge[0];
        assert_eq!(outcomes.admission == Admission::Admitted, outcome.verdict.is_allowed());
        outcome
    }

    pub(crate) fn admits(&self, cell: usize, units: u64) -> bool {
        self.charged(cell, Cost::new(units)).verdict.is_allowed()
    }

    pub(crate) fn left(&self, cell: usize) -> u64 {
        self.charged(cell, Cost::PEEK).remaining
    }

    /// Cancels a reservation of units that were taken at `taken`.
    pub(crate) fn cancel(&self, cell: usize, units: u64, taken: Timestamp) {
        let parts = [KeyPart::Text("a")];
        let key = CounterKey { scope: &self.counter.scope, parts: &parts };
        let refund = self.counter.limit.refund(units, units, taken, self.cells[cell].now());
        let Some((limit, cost)) = refund else { return };
        block_on(self.cells[cell].debit(&[Charge::new(key, &limit, cost)])).expect("refunded");
    }

    pub(crate) fn batch(&self, entries: &[(u32, i64)], counters: Vec<SentCounter>) -> Message {
        let values = KeyValues::new(&[KeyPart::Text("a")]);
        let entry = |(counter, units): &(u32, i64)| BatchEntry {
            counter: *counter,
            values: values.clone(),
            units: *units,
        };
        let entries = entries.iter().map(entry).collect();
        let sequence = self.cells[0].now().as_micros() + (1 << 40);
        Message::Batch(Arc::new(Batch { sequence, counters, entries, ..Batch::default() }))
    }
}

pub(crate) fn limit(algorithm: Algorithm, count: u64, secs: u64) -> Limit {
    LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(secs))).build().expect("valid")
}

const WINDOWS: [Algorithm; 4] =
    [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::StrictWindow, Algorithm::SlidingLog];

/// Without it, a caller that reserves and cancels in one cell gets a limit anew in all others, in every tick.
#[test]
fn a_batch_that_takes_and_refunds_counts_the_difference() {
    for algorithm in WINDOWS {
        for entries in [
            &[(0, 4_000), (0, -3_000)][..],
            &[(0, -3_000), (0, 4_000)],
            &[(0, 1_000), (1, -1_000), (0, 1_000)],
        ] {
            let three = Three::start(limit(algorithm, 1_000, 86_400));
            assert!(three.admits(0, 500));
            let counters = vec![
                three.counter.clone(),
                SentCounter { limit: limit(algorithm, 900, 86_400), ..three.counter.clone() },
            ];
            let answer =
                block_on(three.cells[0].handle(&three.cells[1].hello(), three.batch(entries, counters)));
            assert!(matches!(answer, Message::Done(_)), "{answer:?}");
            assert_eq!(three.left(0), 0, "{algorithm:?} {entries:?}");
            // 1,500 are used: 600 more would be needed for one to be left.
            three.cancel(0, 500, three.cells[0].now());
            assert_eq!(three.left(0), 0, "{algorithm:?} {entries:?}");
        }
    }
}

/// Without it a reservation that is canceled late takes the newest units off the logs of other cells, which then forget what was
/// consumed since, and admit it once more.
#[test]
fn a_late_refund_takes_off_a_log_what_was_taken_then() {
    let three = Three::start(limit(Algorithm::SlidingLog, 100, 60));
    let later = |seconds: u64| {
        three.clock.advance(TimeDelta::from_secs(seconds));
        (0..2).for_each(|_| three.exchange());
    };
    let taken = three.cells[0].now();
    assert!(three.admits(0, 50));
    three.exchange();
    later(30);
    assert!(three.admits(1, 50));
    three.exchange();
    later(10);
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [0, 0, 0]);
    three.cancel(0, 50, taken);
    three.exchange();
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [50, 50, 50]);
    // The first ones would not count any more; the second ones do.
    later(22);
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [50, 50, 50]);
    later(30);
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [100, 100, 100]);
    // A refund that follows at once, before and after others have heard of what it refunds.
    let taken = three.cells[0].now();
    assert!(three.admits(0, 70));
    three.exchange();
    three.cancel(0, 30, taken);
    assert!(three.admits(0, 10));
    three.cancel(0, 10, three.cells[0].now());
    three.exchange();
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [60, 60, 60]);
}

/// Without it other cells keep the units of then for those of now, and forget them when a minute has passed since then.
#[test]
fn what_is_taken_as_others_are_canceled_is_logged_then() {
    let three = Three::start(limit(Algorithm::SlidingLog, 100, 60));
    let taken = three.cells[0].now();
    assert!(three.admits(0, 50));
    three.exchange();
    three.clock.advance(TimeDelta::from_secs(50));
    (0..2).for_each(|_| three.exchange());
    three.cancel(0, 50, taken);
    assert!(three.admits(0, 40));
    three.exchange();
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [60, 60, 60]);
    three.clock.advance(TimeDelta::from_secs(30));
    (0..2).for_each(|_| three.exchange());
    assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [60, 60, 60]);
}

/// Without it the same is possible across ticks: what a window could not count is refunded from what it did.
#[test]
fn a_refund_of_units_that_a_window_could_not_count_erases_nothing() {
    for algorithm in WINDOWS {
        let three = Three::start(limit(algorithm, 1_000, 86_400));
        let mut admitted = 0;
        for round in 0..10 {
            // All three before they know of each other; two of them cancel.
            let taken = three.cells[0].now();
            let each: Vec<bool> = (0..CELLS).map(|cell| three.admits(cell, 1_000)).collect();
            three.exchange();
            admitted += u64::from(each[0]);
            (1..CELLS).filter(|cell| each[*cell]).for_each(|cell| three.cancel(cell, 1_000, taken));
            three.exchange();
            assert_eq!((admitted, three.left(0)), (1, 0), "{algorithm:?}, round {round}");
        }
        assert!((1..CELLS).all(|cell| three.left(cell) == 0), "the others know of it");
    }
}

/// Without it a refund of units that were not used here gives back what is consumed elsewhere in the same tick.
#[test]
fn a_refund_of_more_than_is_used_gives_back_nothing_elsewhere() {
    for algorithm in WINDOWS.into_iter().chain([Algorithm::Gcra, Algorithm::TokenBucket]) {
        for (used, refunds) in [(0, [1_000; 2]), (0, [5_000; 2]), (10, [600; 2])] {
            let three = Three::start(limit(algorithm, 1_000, 86_400));
            let taken = three.cells[0].now();
            assert!(three.admits(0, used) && three.admits(1, 1_000 - used));
            // A negative cost, and a reservation that is canceled after a reset.
            three.charged(0, Cost::refund(refunds[0]));
            three.cancel(0, refunds[1].min(1_000), taken);
            assert_eq!(three.left(0), 1_000, "{algorithm:?}");
            three.exchange();
            let left: Vec<u64> = (0..CELLS).map(|cell| three.left(cell)).collect();
            assert_eq!(left, [used; CELLS], "{algorithm:?}, {used} used, {refunds:?} refunded");
        }
    }
}

/// Without it a counter that is used up counts as overdrawn by as much again, and the other cells give that back too.
#[test]
fn a_refund_of_more_than_the_limit_gives_back_elsewhere_what_it_gives_back_here() {
    for algorithm in WINDOWS.into_iter().chain([Algorithm::Gcra, Algorithm::TokenBucket]) {
        let three = Three::start(limit(algorithm, 1_000, 86_400));
        assert!(three.admits(0, 1_000));
        three.exchange();
        assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [0; CELLS], "{algorithm:?}");
        three.charged(0, Cost::refund(2_000));
        assert!(three.admits(0, 1_000), "{algorithm:?}");
        three.exchange();
        assert_eq!([0, 1, 2].map(|cell| three.left(cell)), [0; CELLS], "{algorithm:?}");
    }
}

/// Without it callers are locked out for hours by reservations that were canceled.
#[test]
fn canceled_reservations_leave_no_overdraft() {
    for algorithm in [Algorithm::Gcra, Algorithm::TokenBucket, Algorithm::FixedWindow] {
        for rest in 0..CELLS {
            let three = Three::start(limit(algorithm, 1_000, 3_600));
            let taken = three.cells[0].now();
            assert!((0..CELLS).all(|cell| three.admits(cell, 1_000)));
            three.exchange();
            three.clock.advance(TimeDelta::from_millis(600));
            three.exchange();
            for cell in 0..CELLS {
                let Verdict::Denied { retry_after: Some(_) } = three.charged(cell, Cost::ONE).verdict else {
                    panic!("3,000 of 1,000 are used")
                };
                assert_eq!(three.left(cell), 0, "and a peek shows it");
            }
            // The first `rest` of them stay.
            (rest..CELLS).for_each(|cell| three.cancel(cell, 1_000, taken));
            three.exchange();
            let (expected, is_bucket) =
                (if rest == 0 { 1_000 } else { 0 }, algorithm != Algorithm::FixedWindow);
            for cell in 0..CELLS {
                let left = three.left(cell);
                assert!(
                    left + u64::from(rest == 0 && is_bucket) >= expected && left <= expected,
                    "{algorithm:?} {rest} {cell}: {left}"
                );
                assert_eq!(three.admits(cell, 900), rest == 0, "{algorithm:?} {rest} {cell}");
                if rest == 0 {
                    three.cancel(cell, 900, three.cells[0].now());
                }
            }
            if rest > 0 && is_bucket {
                // A unit is restored in 3.6 s; so much more must pass than is owed.
                three.clock.advance(TimeDelta::from_secs(3_600 * (rest as u64 - 1) + 10));
                three.exchange();
                assert!((0..CELLS).all(|cell| (1..=4).contains(&three.left(cell))), "{rest}");
            }
        }
    }
}

/// Without it, a reservation of one unit that is canceled a moment later gives the other cells their whole limit anew: its
/// refund is in parts of a unit, because time has restored some.
#[test]
fn a_refund_in_parts_of_a_unit_refunds_no_more_than_that() {
    let three = Three::start(limit(Algorithm::Gcra, 1_000, 3_600));
    let taken = three.cells[1].now();
    assert!(three.admits(1, 2) && three.admits(0, 600));
    three.exchange();
    assert_eq!(three.left(0), 398);
    three.clock.advance(TimeDelta::from_millis(360));
    three.cancel(1, 2, taken);
    three.exchange();
    // A tenth of a unit had been restored before the others were refunded.
    assert_eq!((0..CELLS).map(|cell| three.left(cell)).collect::<Vec<_>>(), [400, 400, 400]);
}

/// Without it every reservation that is canceled a moment later, in the same tick, costs the other cells a whole unit.
#[test]
fn a_charge_and_its_refund_in_one_tick_are_added_up_in_parts_of_a_unit() {
    let three = Three::start(limit(Algorithm::Gcra, 1_000, 3_600));
    for _ in 0..20 {
        let taken = three.cells[1].now();
        assert!(three.admits(1, 1));
        three.clock.advance(TimeDelta::from_millis(360));
        three.cancel(1, 1, taken);
        three.exchange();
    }
    // A tenth of a unit is owed each time, and restored before the next.
    assert!((0..CELLS).all(|cell| three.left(cell) >= 999), "{:?}", [0, 1, 2].map(|cell| three.left(cell)));
}

/// Without it a reservation that is canceled at the end of a window gives the other cells units of the next one.
#[test]
fn a_refund_that_arrives_after_its_window_leaves_the_next_one_as_it_is() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow] {
        // It begins in the middle of the window.
        let three = Three::start(limit(algorithm, 1_000, 400));
        let taken = three.cells[1].now();
        assert!(three.admits(1, 600));
        three.exchange();
        assert_eq!(three.left(0), 400);
        let key = CounterKey { scope: &three.counter.scope, parts: &[KeyPart::Text("a")] };
        let (_, end) = three.counter.limit.window(taken, key.stable_hash()).expect("a window");
        let before_end = end.since(taken).as_micros() - 100_000;
        for _ in 0..before_end / 200_000 {
            three.clock.advance(TimeDelta::from_millis(200));
            three.exchange();
        }
        three.cancel(1, 600, taken);
        three.clock.advance(TimeDelta::from_millis(200));
        assert!(three.admits(0, 300), "{algorithm:?}");
        let left = three.left(0);
        three.exchange();
        assert_eq!(three.left(0), left, "{algorithm:?}");
        // What was reserved in this window is refunded in it.
        let taken = three.cells[1].now();
        assert!(three.admits(1, 50), "{algorithm:?}");
        three.exchange();
        assert_eq!(three.left(0), left - 50, "{algorithm:?}");
        three.cancel(1, 50, taken);
        three.exchange();
        assert_eq!(three.left(0), left, "{algorithm:?}");
    }
}
