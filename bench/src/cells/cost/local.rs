//! A decision in a cell with peers beside one in a node without: the same rule and table in process, on one thread.
//!
//! What a cell adds is a line in the ledger. Its first line of a counter in a tick is new and takes memory, the others find
//! it; both are measured. Another thread exchanges in each tick, as the server does, with peers that answer at once.

use super::super::Length;
use crate::contest::{fill, measure};
use crate::contestants::Contestant;
use crate::limiter::ThroughRules;
use crate::process::median;
use crate::report::{at_most, heading, note, rows};
use crate::traffic::{BLOCK, Law, Traffic};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tollgate_cells::message::{Hello, Message, Sighting, Sign};
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms, RegionalStore, SentCharge, Transport};
use tollgate_core::{Clock, CounterId, CounterStore, Outcomes, StoreError, SystemClock};
use tollgate_store::{LeaseConfig, MemoryStore};
use tollgate_testing::wait::Stopwatch;

type Cell = RegionalStore<MemoryStore<SystemClock>, NoLink, SystemClock>;

const PEERS: usize = 2;
const TICK: Duration = Duration::from_millis(200);
/// Bar: a decision with peers beside one without.
const ADDED: f64 = 1.1;

/// No counter here has an owner, so nothing is sent.
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

pub(super) fn measure_all(length: Length) -> Result<(), String> {
    let (rounds, blocks) = if length == Length::Full { (9, 400) } else { (5, 100) };
    for keys in [1_000, 50_000] {
        let alone = ThroughRules::new(keys);
        let cell = Arc::new(cell(keys));
        let shared = ThroughRules::over(Arc::clone(&cell), "Limiter::check in a cell, `shared`");
        let all: [&dyn Contestant; 2] = [&alone, &shared];
        exchange(&cell);
        if cell.is_regional_only() {
            return Err("the cell has no peers".to_owned());
        }
        all.iter().for_each(|contestant| fill(*contestant, keys));
        let names: Vec<String> = all.iter().map(|contestant| contestant.name()).collect();
        let stop = AtomicBool::new(false);
        let nanos = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    exchange(&cell);
                    std::thread::sleep(TICK);
                }
            });
            let nanos = measure(&all, keys, Law::Uniform, 1, rounds, blocks);
            stop.store(true, Ordering::Relaxed);
            nanos
        });
        heading(&format!("A local decision, {keys} keys, one thread"));
        rows(&names, &nanos);
        at_most("`shared` ÷ a node without peers", nanos[1] / nanos[0], ADDED);
        let [first, before] =
            [&shared as &dyn Contestant, &alone].map(|one| first_charges(one, &cell, keys, blocks));
        let first = first / before;
        note(&format!("- the same for the first charge of a counter in a tick: {first:.2}"));
    }
    Ok(())
}

/// A cell whose peers have just answered.
fn cell(keys: u64) -> Cell {
    let clock = SystemClock::new();
    let peers = ["us", "ap"].map(|region| PeerConfig::new(region, region)).to_vec();
    let members = Arc::new(Members::new(CellConfig::new("eu", "eu", peers), 1, clock.now()));
    let names = Pseudonyms::new(b"bench");
    let cell = Cell::new(ThroughRules::store(keys), members, NoLink, names, clock, LeaseConfig::default());
    for (peer, region) in ["us", "ap"].into_iter().enumerate() {
        let hello =
            Hello { cell: region.to_owned(), region: region.to_owned(), incarnation: 2, ..cell.hello() };
        cell.members().on_hello(peer, hello);
    }
    cell
}

/// One tick, whose batches are acknowledged at once.
fn exchange(cell: &Cell) {
    // A peer that has had no answer of this cell would decide by its own part, and so would this one.
    let seen = Sighting { cell: cell.hello().cell, age: 0, sign: Sign::Answered };
    let answer = Message::Done(vec![seen]);
    cell.tick();
    for peer in 0..PEERS {
        loop {
            let (batch, sent) = (cell.next_batch(peer), cell.now());
            if !cell.on_batch_answer(peer, batch.sequence, sent, &answer) {
                break;
            }
        }
    }
    cell.tick();
}

/// Returns nanoseconds of a decision that charges its counter for the first time in a tick.
fn first_charges(contestant: &dyn Contestant, cell: &Cell, keys: u64, blocks: usize) -> f64 {
    let mut traffic = Traffic::new(keys.max(BLOCK as u64), Law::Uniform, 0);
    let block = |at: usize| {
        exchange(cell);
        traffic.block_from((at * BLOCK) as u64);
        let start = Stopwatch::start();
        contestant.answer(&traffic);
        start.elapsed().as_nanos() as f64 / BLOCK as f64
    };
    median((0..blocks).map(block).collect())
}
