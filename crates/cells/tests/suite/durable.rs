//! Durable counters: what processes count reaches the database once, whatever fails; and a store that lost its counters
//! is debited what is missing, once.

use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_cells::durable::{
    CounterDigest, Durable, DurableRow, DurableStore, Kept, Peers, ReadBack, SavedSlot, Slot,
};
use tollgate_core::conformance::{Fault, FaultyStore, StoreCall};
use tollgate_core::{
    Algorithm, Calendar, CalendarUnit, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec,
    ManualClock, Mode, Outcomes, Period, Permit, Rate, Scope, StoreError, TimeDelta, Timestamp,
};
use tollgate_store::{MemoryConfig, MemoryStore};

/// What a database does with rows: of two values of a row, the one with the greater number stays.
#[derive(Default)]
pub(crate) struct Table(HashMap<(u32, CounterDigest, Timestamp, i64), DurableRow>);

impl Table {
    fn write(&mut self, process: u32, rows: &[DurableRow]) {
        for row in rows {
            let key = (process, row.counter, row.slot, row.part);
            let stored = self.0.entry(key).or_insert_with(|| row.clone());
            if stored.seq < row.seq {
                stored.clone_from(row);
            }
        }
    }

    /// Returns the sums of each counter in the slot that starts then.
    fn sums(&self, slot: Timestamp) -> HashMap<CounterDigest, (i64, i64)> {
        let mut sums = HashMap::<CounterDigest, (i64, i64)>::new();
        for row in self.0.values().filter(|row| row.slot == slot) {
            let sum = sums.entry(row.counter).or_default();
            *sum = (sum.0 + row.units, sum.1 + row.reported);
        }
        sums.retain(|_, sum| *sum != (0, 0));
        sums
    }

    pub(crate) fn saved(&self) -> Vec<SavedSlot> {
        let mut slots = HashMap::<(CounterDigest, Timestamp), SavedSlot>::new();
        for row in self.0.values() {
            let DurableRow { counter, slot, last_at, .. } = *row;
            let fresh = SavedSlot { counter, slot, last_at, own: 0, reported: 0, all: 0 };
            let saved = slots.entry((counter, slot)).or_insert(fresh);
            saved.own += row.units;
            saved.all += row.units;
            saved.reported += row.reported;
            saved.last_at = saved.last_at.max(last_at);
        }
        slots.into_values().collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add {
        process: u32,
        counter: u8,
        units: i64,
        reported: i64,
    },
    /// A write that succeeds.
    Write {
        process: u32,
        rows: usize,
    },
    /// A write that reaches the database, and whose answer is lost.
    Unanswered {
        process: u32,
        rows: usize,
    },
    /// One that never arrives, or only later.
    Delayed {
        process: u32,
        rows: usize,
    },
    /// The delayed write arrives.
    Arrive,
    /// All that is written is forgotten, to make room.
    Crowd {
        process: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let process = 0_u32..3;
    prop_oneof![
        6 => (process.clone(), 0_u8..6, -3_i64..20, 0_i64..5)
            .prop_map(|(process, counter, units, reported)| Step::Add { process, counter, units, reported }),
        3 => (process.clone(), 1_usize..8).prop_map(|(process, rows)| Step::Write { process, rows }),
        2 => (process.clone(), 1_usize..8).prop_map(|(process, rows)| Step::Unanswered { process, rows }),
        2 => (process.clone(), 1_usize..8).prop_map(|(process, rows)| Step::Delayed { process, rows }),
        2 => Just(Step::Arrive),
        1 => process.prop_map(|process| Step::Crowd { process }),
    ]
}

const NOW: Timestamp = Timestamp::from_secs(1_000);
const SLOT: Slot = Slot { start: NOW, expires: Timestamp::from_secs(9_000) };
const OTHER: Slot = Slot { start: Timestamp::from_secs(2_000), expires: Timestamp::from_secs(9_000) };

proptest! {
    /// A unit that a failed write loses, or a repeated one counts twice, is a quota that is wrong after the next
    /// outage.
    #[test]
    fn whatever_happens_to_writes_the_database_has_the_sums(steps in prop::collection::vec(step(), 1..120)) {
        let mut processes = [Kept::new(16), Kept::new(16), Kept::new(16)];
        let (mut table, mut delayed) = (Table::default(), Vec::new());
        let mut oracle = HashMap::<CounterDigest, (i64, i64)>::new();
        for step in steps {
            match step {
                Step::Add { process, counter, units, reported } => {
                    processes[process as usize].add([counter; 16], SLOT, (units, reported), NOW);
                    let sum = oracle.entry([counter; 16]).or_default();
                    *sum = (sum.0 + units, sum.1 + reported);
                }
                Step::Write { process, rows } => {
                    let rows = processes[process as usize].pending(rows);
                    table.write(process, &rows);
                    processes[process as usize].record_written(&rows);
                }
                Step::Unanswered { process, rows } => {
                    table.write(process, &processes[process as usize].pending(rows));
                }
                Step::Delayed { process, rows } => {
                    delayed.push((process, processes[process as usize].pending(rows)));
                }
                Step::Arrive => {
                    if let Some((process, rows)) = delayed.pop() {
                        table.write(process, &rows);
                    }
                }
                Step::Crowd { process } => {
                    // Rows of another slot take the place of those that are written.
                    let kept = &mut processes[process as usize];
                    for other in 0..30 {
                        kept.add([100 + other; 16], OTHER, (1, 0), NOW);
                        let rows = kept.pending(100);
                        let others: Vec<DurableRow> =
                            rows.into_iter().filter(|row| row.slot == OTHER.start).collect();
                        table.write(process, &others);
                        kept.record_written(&others);
                    }
                }
            }
        }
        for (process, kept) in (0..).zip(&mut processes) {
            while kept.unwritten() > 0 {
                let rows = kept.pending(3);
                table.write(process, &rows);
                kept.record_written(&rows);
            }
            prop_assert_eq!(kept.dropped(), 0);
        }
        for (process, rows) in delayed {
            table.write(process, &rows);
        }
        oracle.retain(|_, sum| *sum != (0, 0));
        prop_assert_eq!(table.sums(NOW), oracle);
    }
}

/// A database that is away for long must not take all memory; what gives way is the smallest, and is counted.
#[test]
fn rows_that_cannot_be_written_are_bounded() {
    let mut kept = Kept::new(8);
    for counter in 0..20_u8 {
        kept.add([counter; 16], SLOT, (1 + i64::from(counter), 0), NOW);
    }
    assert_eq!(kept.len(), 8);
    let written: i64 = kept.pending(100).iter().map(|row| row.units).sum();
    assert_eq!(u64::try_from(written).expect("positive") + kept.dropped(), (1..=20).sum::<u64>());
    assert!(kept.pending(100).iter().any(|row| row.units == 20), "the largest is kept");
    kept.forget(SLOT.expires);
    assert!(kept.is_empty() && kept.unwritten() == 0);
}

pub(crate) fn month() -> Limit {
    let calendar = Calendar::new(CalendarUnit::Month, "UTC").expect("a zone");
    let rate = Rate { count: 1_000, period: Period::Calendar(calendar) };
    LimitSpec::new(Algorithm::FixedWindow, rate).build().expect("a limit")
}

/// Limits of every algorithm whose use can be recorded.
pub(crate) fn limits() -> impl Iterator<Item = Limit> {
    let day = Rate::per(1_000, TimeDelta::from_secs(86_400));
    let algorithms = [
        Algorithm::Gcra,
        Algorithm::TokenBucket,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::SlidingLog,
    ];
    let of_a_day = algorithms.map(|one| LimitSpec::new(one, day.clone()).build().expect("a limit"));
    of_a_day.into_iter().chain([month()])
}

pub(crate) type Clock = Arc<ManualClock>;
pub(crate) type Node = DurableStore<Arc<MemoryStore<Clock>>, Clock>;

pub(crate) fn counters(clock: &Clock) -> Arc<MemoryStore<Clock>> {
    Arc::new(MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store"))
}

pub(crate) fn node<S: CounterStore>(
    store: &Arc<S>,
    process: &str,
    clock: &Clock,
) -> DurableStore<Arc<S>, Clock> {
    let durable = Durable::new(b"key", process, &[], 4, Peers::None, Arc::clone(clock)).expect("valid");
    DurableStore::new(Arc::clone(store), Some(Arc::new(durable)))
}

pub(crate) fn charge<S: CounterStore>(
    node: &DurableStore<S, Clock>,
    limit: &Limit,
    key: &str,
    cost: Cost,
) -> u64 {
    let scope = Scope::new("d|api_key|fixed_window|1mo").with_durable(true);
    let parts = [KeyPart::Secret(key)];
    let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, limit, cost);
    pollster::block_on(node.charge(&[charge])).expect("an answer").per_charge[0].remaining
}

pub(crate) fn write<S: CounterStore>(table: &mut Table, process: u32, node: &DurableStore<S, Clock>) {
    let durable = node.durable().expect("a record");
    durable.collect();
    let rows = durable.pending(1_000);
    table.write(process, &rows);
    durable.record_written(&rows);
}

/// A Redis that comes back empty must not give every customer a second month.
#[test]
fn a_store_that_comes_back_empty_is_debited_once_by_all_nodes_together() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let (limit, mut table) = (month(), Table::default());
    let store = counters(&clock);
    let nodes = [node(&store, "one", &clock), node(&store, "two", &clock)];
    for one in &nodes {
        assert!(pollster::block_on(one.is_lost()).expect("an answer"), "a new process reads back");
        pollster::block_on(one.write_canaries()).expect("written");
        assert!(!pollster::block_on(one.is_lost()).expect("an answer"));
    }
    assert_eq!(charge(&nodes[0], &limit, "a", Cost::new(300)), 700);
    assert_eq!(charge(&nodes[1], &limit, "a", Cost::new(200)), 500);
    assert_eq!(charge(&nodes[0], &limit, "a", Cost::refund(50)), 550);
    (0..).zip(&nodes).for_each(|(process, node)| write(&mut table, process, node));

    // Emptied: other nodes of the same database, whose store is another.
    clock.advance(TimeDelta::from_secs(30));
    let empty = counters(&clock);
    let nodes = [node(&empty, "three", &clock), node(&empty, "four", &clock)];
    for one in &nodes {
        one.durable().expect("a record").install(table.saved(), ReadBack::Loss);
    }
    assert_eq!(charge(&nodes[0], &limit, "a", Cost::PEEK), 550, "read back, by a look as well");
    assert_eq!(charge(&nodes[1], &limit, "a", Cost::ONE), 549, "not debited twice");
    assert_eq!(charge(&nodes[0], &limit, "a", Cost::ONE), 548);
    assert_eq!(charge(&nodes[1], &limit, "b", Cost::ONE), 999, "of another caller nothing is saved");
    let restored = |node: &Node| node.durable().expect("a record").stats().restored_units;
    assert_eq!((restored(&nodes[0]), restored(&nodes[1])), (450, 0));

    // What was restored is not consumed once more: the rows have the requests alone.
    (2..).zip(&nodes).for_each(|(process, node)| write(&mut table, process, node));
    let all: i64 = table.saved().iter().map(|slot| slot.own).sum();
    assert_eq!(all, 450 + 2 + 1);

    // A reset refunds more than any counter has; what counts is what was used.
    let scope = Scope::new("d|api_key|fixed_window|1mo").with_durable(true);
    let parts = [KeyPart::Secret("a")];
    let key = CounterKey { scope: &scope, parts: &parts };
    let reset = Charge { mode: Mode::Central, ..Charge::new(key, &limit, Cost::refund(u64::MAX)) };
    pollster::block_on(nodes[0].debit(&[reset])).expect("reset");
    assert_eq!(charge(&nodes[1], &limit, "a", Cost::new(7)), 993);
    (2..).zip(&nodes).for_each(|(process, node)| write(&mut table, process, node));
    let all: i64 = table.saved().iter().map(|slot| slot.own).sum();
    assert_eq!(all, 7 + 1);

    // Next month the rows no longer count.
    clock.advance(TimeDelta::from_secs(32 * 86_400));
    let next = node(&counters(&clock), "five", &clock);
    next.durable().expect("a record").install(table.saved(), ReadBack::Loss);
    assert_eq!(charge(&next, &limit, "a", Cost::ONE), 999);
}

pub(crate) fn debit(node: &Node, limit: &Limit, key: &str, cost: Cost) {
    let scope = Scope::new("d|api_key|fixed_window|1mo").with_durable(true);
    let parts = [KeyPart::Secret(key)];
    let key = CounterKey { scope: &scope, parts: &parts };
    let debit = Charge { mode: Mode::Central, ..Charge::new(key, limit, cost) };
    pollster::block_on(node.debit(&[debit])).expect("debited");
}

pub(crate) fn reset(node: &Node, limit: &Limit, key: &str) {
    debit(node, limit, key, Cost::refund(u64::MAX));
}

/// A counter gives back no more than was used; a record that did would let callers consume a limit twice after a loss.
#[test]
fn a_refund_of_more_than_is_used_is_recorded_as_far_as_it_is_used() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let day = Rate::per(1_000, TimeDelta::from_secs(86_400));
    let gcra = LimitSpec::new(Algorithm::Gcra, day).build().expect("a limit");
    for limit in [month(), gcra] {
        let mut table = Table::default();
        let node = node(&counters(&clock), "one", &clock);
        // A negative cost, once below the limit and once above it.
        for refund in [500, 1_500] {
            charge(&node, &limit, "a", Cost::new(10));
            assert_eq!(charge(&node, &limit, "a", Cost::refund(refund)), 1_000);
        }
        // A reservation that is canceled after a reset.
        charge(&node, &limit, "a", Cost::new(500));
        reset(&node, &limit, "a");
        debit(&node, &limit, "a", Cost::refund(500));
        assert_eq!(charge(&node, &limit, "a", Cost::new(900)), 100);
        assert_eq!(charge(&node, &limit, "a", Cost::refund(50)), 150);
        write(&mut table, 0, &node);
        assert_eq!(table.saved().iter().map(|slot| slot.own).sum::<i64>(), 850);
    }
}

/// Without it a counter that is exactly used up counts as overdrawn by as much again: after a reset, a caller could consume the
/// limit once more than the record says.
#[test]
fn what_a_used_up_counter_gives_back_is_recorded_exactly() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    for limit in limits() {
        for used in [1_000, 1_300] {
            let give_back: [fn(&Node, &Limit); 3] = [
                |node, limit| reset(node, limit, "a"),
                |node, limit| debit(node, limit, "a", Cost::refund(1_900)),
                |node, limit| {
                    charge(node, limit, "a", Cost::refund(2_000));
                },
            ];
            for (way, give_back) in give_back.into_iter().enumerate() {
                let mut table = Table::default();
                let node = node(&counters(&clock), "one", &clock);
                debit(&node, &limit, "a", Cost::new(used));
                give_back(&node, &limit);
                assert_eq!(charge(&node, &limit, "a", Cost::new(900)), 100);
                write(&mut table, 0, &node);
                let recorded: i64 = table.saved().iter().map(|slot| slot.own).sum();
                assert_eq!(recorded, 900, "{:?}, {used} used, {way}", limit.algorithm());
            }
        }
    }
}

/// A store of which this process has leased units that no request has taken.
struct Leased(MemoryStore<Clock>, u64);

impl CounterStore for Leased {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.0.charge(charges).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.0.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.0.release(permits).await
    }

    fn leased_units(&self, _: &Charge<'_>) -> u64 {
        self.1
    }
}

/// Without it a node that starts while Redis is slow for a moment takes a late answer for a loss, and debits what other nodes have
/// refunded.
#[test]
fn a_canary_that_was_late_to_be_written_is_no_loss() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let store = counters(&clock);
    // Those of all processes, the mark of a new store and the own ones: four each.
    for late in 1..=12 {
        let durable = Durable::new(b"key", &format!("p{late}"), &[], 4, Peers::None, Arc::clone(&clock));
        let (slow, debits) = (FaultyStore::new(Arc::clone(&store)), AtomicUsize::new(0));
        slow.set_fault(move |call, _| match call {
            StoreCall::Debit if debits.fetch_add(1, Ordering::Relaxed) + 1 == late => Fault::timeout(),
            _ => Fault::None,
        });
        let node = DurableStore::new(slow, Some(Arc::new(durable.expect("valid"))));
        let is_lost = || pollster::block_on(node.is_lost()).expect("an answer");
        assert!(is_lost(), "a new process reads back");
        let written = pollster::block_on(node.write_canaries());
        assert!(!is_lost(), "number {late} was late");
        assert!(written.is_ok() || pollster::block_on(node.renew_canaries()).is_ok(), "made up for");
        assert!(!is_lost());
    }
    let durable = Durable::new(b"key", "lost", &[], 4, Peers::None, Arc::clone(&clock)).expect("valid");
    let durable = Some(Arc::new(durable));
    let node = DurableStore::new(counters(&clock), durable.clone());
    pollster::block_on(node.write_canaries()).expect("written");
    assert!(!pollster::block_on(node.is_lost()).expect("an answer"));
    let emptied = DurableStore::new(counters(&clock), durable);
    assert!(pollster::block_on(emptied.is_lost()).expect("an answer"));
}

/// Without it what Redis loses while it does not answer is not restored: the canaries are written to the emptied store, and
/// show no loss.
#[test]
fn a_loss_while_no_canary_can_be_written_is_noticed() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    for begins_well in [true, false] {
        let store = counters(&clock);
        let other = node(&store, "other", &clock);
        pollster::block_on(other.write_canaries()).expect("written");
        clock.advance(TimeDelta::from_secs(120));
        let durable = Durable::new(b"key", "own", &[], 4, Peers::None, Arc::clone(&clock)).expect("valid");
        let durable = Some(Arc::new(durable));
        let over =
            |store: Arc<MemoryStore<Clock>>| DurableStore::new(FaultyStore::new(store), durable.clone());
        let (well, badly) = (over(Arc::clone(&store)), over(store));
        badly.inner().set_fault(|call, _| match call {
            StoreCall::Debit => Fault::timeout(),
            _ => Fault::None,
        });
        if begins_well {
            pollster::block_on(well.write_canaries()).expect("written");
            pollster::block_on(badly.renew_canaries()).expect_err("no answer");
        } else {
            pollster::block_on(badly.write_canaries()).expect_err("no answer");
        }
        assert!(!pollster::block_on(well.is_lost()).expect("an answer"));
        let emptied = over(counters(&clock));
        pollster::block_on(emptied.renew_canaries()).expect_err("a loss");
        assert!(pollster::block_on(emptied.is_lost()).expect("an answer"));
        pollster::block_on(emptied.write_canaries()).expect("written");
        assert!(!pollster::block_on(emptied.is_lost()).expect("an answer"));
        pollster::block_on(emptied.renew_canaries()).expect("renewed");
    }
}

/// Without it a reset takes more off the record than requests have put there, and what is restored later is too little.
#[test]
fn a_reset_gives_back_no_units_that_are_leased() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let limit = month();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let durable = Durable::new(b"key", "one", &[], 4, Peers::None, Arc::clone(&clock));
    let node = DurableStore::new(Leased(store, 8), Some(Arc::new(durable.expect("valid"))));
    let scope = Scope::new("d|api_key|fixed_window|1mo").with_durable(true);
    let parts = [KeyPart::Secret("a")];
    let one = |cost| Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, cost);
    pollster::block_on(node.inner().debit(&[one(Cost::new(8))])).expect("leased");
    pollster::block_on(node.charge(&[one(Cost::new(500))])).expect("charged");
    pollster::block_on(node.debit(&[one(Cost::refund(u64::MAX))])).expect("reset");
    pollster::block_on(node.charge(&[one(Cost::new(900))])).expect("charged");
    let durable = node.durable().expect("a record");
    durable.collect();
    assert_eq!(durable.pending(8).iter().map(|row| row.units).sum::<i64>(), 900);
}

/// A node that restarts over a healthy store has read sums that age until a caller comes: they must not undo what other
/// nodes have refunded and reset since.
#[test]
fn a_restart_over_a_healthy_store_debits_nothing() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let (limit, mut table) = (month(), Table::default());
    let store = counters(&clock);
    let old = node(&store, "one", &clock);
    assert_eq!(charge(&old, &limit, "refunded", Cost::new(900)), 100);
    assert_eq!(charge(&old, &limit, "reset", Cost::new(900)), 100);
    write(&mut table, 0, &old);
    let restarted = node(&store, "two", &clock);
    restarted.durable().expect("a record").install(table.saved(), ReadBack::Start);
    charge(&old, &limit, "refunded", Cost::refund(800));
    reset(&old, &limit, "reset");
    clock.advance(TimeDelta::from_secs(3_600));
    assert_eq!(charge(&restarted, &limit, "refunded", Cost::ONE), 899);
    assert_eq!(charge(&restarted, &limit, "reset", Cost::ONE), 999);
    assert_eq!(restarted.durable().expect("a record").stats().restored_units, 0);
    // But what is gone is restored at a start too.
    let empty = node(&counters(&clock), "three", &clock);
    empty.durable().expect("a record").install(table.saved(), ReadBack::Start);
    assert_eq!(charge(&empty, &limit, "refunded", Cost::PEEK), 100);
}

/// A reset must not come back with the next restart, even of a counter that was overdrawn.
#[test]
fn a_reset_of_an_overdrawn_counter_stays() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let (limit, mut table) = (month(), Table::default());
    let one = node(&counters(&clock), "one", &clock);
    let scope = Scope::new("d|api_key|fixed_window|1mo").with_durable(true);
    let parts = [KeyPart::Secret("a")];
    let debit = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::new(900));
    pollster::block_on(one.debit(&[debit])).expect("debited");
    pollster::block_on(one.debit(&[debit])).expect("debited");
    reset(&one, &limit, "a");
    write(&mut table, 0, &one);
    let next = node(&counters(&clock), "two", &clock);
    next.durable().expect("a record").install(table.saved(), ReadBack::Loss);
    assert_eq!(charge(&next, &limit, "a", Cost::PEEK), 1_000);
}

/// Without it one canceled reservation erases a bucket's record: the next restart gives the whole limit again.
#[test]
fn a_refund_in_parts_of_a_unit_is_kept_in_units() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let rate = Rate::per(1_000, TimeDelta::from_secs(86_400));
    let limit = LimitSpec::new(Algorithm::Gcra, rate).build().expect("a limit");
    let (one, mut table) = (node(&counters(&clock), "one", &clock), Table::default());
    let scope = Scope::new("d|api_key|fixed_window|1mo").with_durable(true);
    let parts = [KeyPart::Secret("a")];
    assert_eq!(charge(&one, &limit, "a", Cost::new(900)), 100);
    for _ in 0..50 {
        let taken = tollgate_core::Clock::now(&*clock);
        assert_eq!(charge(&one, &limit, "a", Cost::new(50)), 50);
        clock.advance(TimeDelta::from_millis(3));
        let (finer, cost) =
            limit.refund(50, 50, taken, tollgate_core::Clock::now(&*clock)).expect("a refund");
        assert!(finer.parts_of_unit() > 1, "time has restored a part of a unit");
        let refund = Charge::new(CounterKey { scope: &scope, parts: &parts }, &finer, cost);
        pollster::block_on(one.debit(&[refund])).expect("refunded");
        write(&mut table, 0, &one);
    }
    assert_eq!(table.saved().iter().map(|slot| slot.own).sum::<i64>(), 901);
    assert_eq!(charge(&one, &limit, "a", Cost::PEEK), 100);
    let next = node(&counters(&clock), "two", &clock);
    next.durable().expect("a record").install(table.saved(), ReadBack::Loss);
    assert_eq!(charge(&next, &limit, "a", Cost::PEEK), 99, "rounded up");
}

/// Without it what an earlier release has written of a canceled reservation erases what was consumed before it.
#[test]
fn a_slot_with_more_refunds_than_a_counter_holds_is_not_believed() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_772_000_000)));
    let rate = Rate::per(1_000, TimeDelta::from_secs(86_400));
    let limit = LimitSpec::new(Algorithm::Gcra, rate).build().expect("a limit");
    let (one, mut table) = (node(&counters(&clock), "one", &clock), Table::default());
    assert_eq!(charge(&one, &limit, "a", Cost::new(900)), 100);
    write(&mut table, 0, &one);
    let mut saved = table.saved();
    let wrong = SavedSlot {
        slot: saved[0].slot + TimeDelta::from_secs(1),
        own: -4_319_979_324,
        all: -4_319_979_324,
        ..saved[0]
    };
    saved.push(wrong);
    let next = node(&counters(&clock), "two", &clock);
    next.durable().expect("a record").install(saved, ReadBack::Loss);
    assert_eq!(charge(&next, &limit, "a", Cost::PEEK), 100);
}
