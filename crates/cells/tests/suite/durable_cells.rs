//! Durable counters between cells: what was used of a whole limit is restored while a part of it decides, and what
//! another cell has counted when its counters move.

use std::sync::Arc;
use tollgate_cells::durable::{Durable, DurableRow, DurableStore, Peers, ReadBack, SavedSlot};
use tollgate_cells::message::{self, Hello, Message, Sighting, Sign};
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms, RegionalStore, SentCharge, Transport};
use tollgate_core::{
    Admission, Algorithm, Calendar, CalendarUnit, Charge, Cost, CounterId, CounterKey, CounterOwner,
    CounterStore, KeyPart, Limit, LimitSpec, ManualClock, Outcomes, Period, Rate, RegionMode, Scope,
    StoreError, TimeDelta, Timestamp, region_prefix,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

type Clock = Arc<ManualClock>;
type Kept = DurableStore<Arc<MemoryStore<Clock>>, Clock>;
type Cell = RegionalStore<Kept, Down, Clock>;

/// A link that carries nothing.
#[derive(Clone)]
struct Down;

impl Transport for Down {
    async fn charge(&self, _: usize, _: Vec<SentCharge>, _: Vec<CounterId>) -> Result<Outcomes, StoreError> {
        Err(StoreError::Timeout)
    }
    async fn send(&self, _: usize, _: Message, _: Vec<CounterId>) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }
    fn post(&self, _: usize, _: Message) {}
}

struct Started {
    cell: Cell,
    clock: Clock,
}

fn kept(clock: &Clock) -> Kept {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store");
    let durable = Durable::new(b"key", "process", &[], 4, Peers::Cells, Arc::clone(clock));
    DurableStore::new(Arc::new(store), Some(Arc::new(durable.expect("valid"))))
}

impl Started {
    fn new(name: &str, others: &[&str], clock: &Clock) -> Self {
        let peers = others.iter().map(|name| PeerConfig::new(*name, *name)).collect();
        let now = tollgate_core::Clock::now(&**clock);
        let members = Arc::new(Members::new(CellConfig::new(name, name, peers), 7, now));
        for (at, other) in others.iter().enumerate() {
            members.on_hello(at, hello(other));
        }
        let own = kept(clock);
        own.durable().expect("a record").follow(&members);
        let (names, leases) = (Pseudonyms::new(b"secret"), LeaseConfig::default());
        Self {
            cell: Cell::new(own, members, Down, names, Arc::clone(clock), leases),
            clock: Arc::clone(clock),
        }
    }

    fn durable(&self) -> &Durable<Clock> {
        self.cell.own().durable().expect("a record")
    }

    /// Lets these peers answer in each tick for this long.
    fn answered_for(&self, peers: &[usize], millis: u64) {
        for _ in 0..millis / 200 {
            self.clock.advance(TimeDelta::from_millis(200));
            // Each of them has had an answer of this cell.
            let seen =
                [Sighting { cell: self.cell.members().config().cell.clone(), age: 0, sign: Sign::Answered }];
            peers.iter().for_each(|peer| {
                self.cell.members().on_answer(*peer, self.cell.now(), &seen, self.cell.now());
            });
            self.cell.tick();
        }
    }

    fn charge(&self, scope: &Scope, units: Cost) -> Result<Outcomes, StoreError> {
        let (limit, parts) = (month(), [KeyPart::Text("caller")]);
        let charge = Charge::new(CounterKey { scope, parts: &parts }, &limit, units);
        let mut outcomes = Outcomes::default();
        match self.cell.try_charge(&[charge], &mut outcomes) {
            true => Ok(outcomes),
            false => pollster::block_on(self.cell.charge(&[charge])),
        }
    }

    fn left(&self, scope: &Scope) -> u64 {
        self.charge(scope, Cost::PEEK).expect("decided").per_charge[0].remaining
    }

    /// Returns what this process has written, as others read it.
    fn written(&self) -> Vec<DurableRow> {
        self.durable().collect();
        self.durable().pending(1_000)
    }
}

fn hello(name: &str) -> Hello {
    let (cell, region) = (name.to_owned(), name.to_owned());
    Hello { version: 1, cell, region, incarnation: 1, key_check: 0, cells_check: 0, rank: 0, silence: None }
}

fn saved(rows: &[DurableRow], is_own: bool) -> Vec<SavedSlot> {
    let slot = |row: &DurableRow| {
        let DurableRow { counter, slot, last_at, units, .. } = *row;
        SavedSlot { counter, slot, last_at, own: if is_own { units } else { 0 }, reported: 0, all: units }
    };
    rows.iter().map(slot).collect()
}

fn month() -> Limit {
    let calendar = Calendar::new(CalendarUnit::Month, "UTC").expect("a zone");
    let rate = Rate { count: 900, period: Period::Calendar(calendar) };
    LimitSpec::new(Algorithm::FixedWindow, rate).build().expect("a limit")
}

fn clock() -> Clock {
    Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)))
}

/// Otherwise a cell that is restarted gives most of a month's quota again: it restores its part, and forgets the rest.
#[test]
fn a_cell_that_restarts_alone_restores_what_was_used_of_the_whole() {
    let (clock, scope) = (clock(), Scope::new("d|api_key|fixed_window|1mo").with_durable(true));
    let before = Started::new("a", &["b", "c"], &clock);
    before.answered_for(&[0, 1], 400);
    assert_eq!(before.charge(&scope, Cost::new(880)).expect("decided").admission, Admission::Admitted);
    let rows = saved(&before.written(), true);

    let restarted = Started::new("a", &["b", "c"], &clock);
    restarted.durable().install(rows, ReadBack::Loss);
    assert!(restarted.cell.is_regional_only(), "no other cell has answered");
    assert_eq!(restarted.charge(&scope, Cost::ONE).expect("decided").admission, Admission::Denied);
    restarted.answered_for(&[0, 1], 400);
    assert!(!restarted.cell.is_regional_only());
    assert_eq!(restarted.left(&scope), 20);
}

/// Otherwise a month's quota begins anew when the cell dies that a hash gave it to.
#[test]
fn a_counter_that_moves_is_read_back_before_it_is_decided() {
    let prefix = region_prefix(RegionMode::Owner, CounterOwner::Hash);
    let started = |name: &str, others: &[&str]| {
        let cell = Started::new(name, others, &clock());
        cell.answered_for(&[0, 1], 3_000);
        let moves = cell.durable().unread_moves().expect("it has joined the others");
        cell.durable().record_moves(moves);
        cell
    };
    let (before, others) = (started("a", &["b", "c"]), started("b", &["a", "c"]));
    let scopes = (0..200).map(|at| Scope::new(format!("{prefix}d|{at}|1mo")).with_durable(true));
    let of_first: Vec<Scope> = scopes.filter(|scope| before.charge(scope, Cost::new(880)).is_ok()).collect();
    assert!(of_first.iter().all(|scope| others.charge(scope, Cost::PEEK).is_err()), "it asks the owner");
    let rows = saved(&before.written(), false);

    // The first cell dies.
    others.answered_for(&[1], 5_000);
    let moves = others.durable().unread_moves().expect("owners have changed");
    let parts = [KeyPart::Text("caller")];
    let is_own = |scope: &&Scope| {
        let key = CounterKey { scope, parts: &parts };
        others.cell.members().decider(&key, others.cell.now()) == tollgate_cells::Decider::Own
    };
    let moved: Vec<&Scope> = of_first.iter().filter(is_own).collect();
    assert!(moved.len() > 1);
    let (first, second) = (moved[0], moved[1]);
    assert!(others.charge(first, Cost::ONE).is_err(), "until it is read back, nobody knows");
    others.durable().install(rows, ReadBack::Move);
    others.durable().record_moves(moves);
    assert_eq!(others.left(first), 20);
    assert_eq!(others.charge(second, Cost::new(21)).expect("decided").admission, Admission::Denied);
    assert_eq!(others.charge(second, Cost::new(20)).expect("decided").admission, Admission::Admitted);

    // A database that does not answer stops no caller for long.
    others.answered_for(&[0, 1], 3_000);
    others.answered_for(&[1], 5_000);
    assert!(others.charge(first, Cost::ONE).is_err());
    others.answered_for(&[1], 5_000);
    assert_eq!(others.left(first), 20, "and what it had is not lost");
}

/// Otherwise the owner of a grant, or of a quota whose period its rules do not have, forgets with its restart what other cells
/// have used of it.
#[test]
fn what_other_cells_use_is_kept_if_they_say_that_it_is_durable() {
    let prefix = region_prefix(RegionMode::Owner, CounterOwner::Region("a"));
    let (limit, parts) = (month(), [KeyPart::Text("g1")]);
    for (label, is_durable, expected) in
        [("grant", true, 60), ("d|user|fixed_window|1mo", true, 60), ("d|user|fixed_window|1mo", false, 0)]
    {
        let owner = Started::new("a", &["b", "c"], &clock());
        let scope = Scope::new(format!("{prefix}{label}")).with_durable(is_durable);
        let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::new(60));
        let sent = message::encode(1, &Message::Charge(vec![SentCharge::new(&charge)]));
        let (_, received) = message::decode(&sent[message::PREFIX..]).expect("a message");
        assert!(matches!(pollster::block_on(owner.cell.handle(&hello("b"), received)), Message::Outcomes(_)));
        assert_eq!(owner.written().iter().map(|row| row.units).sum::<i64>(), expected, "{label}");
    }
}
