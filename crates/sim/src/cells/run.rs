//! One run of cells: traffic in all of them, faults, then quiet, and what must hold.

use super::links::{CellClock, Event, Shared, SimLinks, decided};
use super::own_store::OwnStore;
use super::scenario::{MAX_DRIFT, Scenario};
use super::{CellBug, CellReport};
use crate::ceiling::CeilingCheck;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use tollgate_cells::message::{self, Message};
use tollgate_cells::{CellConfig, Members, PeerConfig, Pseudonyms, RegionalStore};
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{
    Admission, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LossPolicy, PermitId, RegionMode,
    Scope, TimeDelta, Timestamp, region_prefix,
};
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore};

/// Start time of all runs, in microseconds.
const START: u64 = 1_790_000_000_000_000;

type Store = RegionalStore<Arc<OwnStore>, SimLinks, CellClock>;
type Task = Pin<Box<dyn Future<Output = Option<(u64, Option<u64>)>>>>;
/// The store that made a reservation, its units, when by its clock, and whether it held another cell for silent.
type Reserved = (Arc<Store>, u64, Timestamp, bool);

struct Ready(Arc<Mutex<VecDeque<u64>>>, u64);

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.1);
    }
}

struct CellProcess {
    store: Arc<Store>,
    links: SimLinks,
    number: u64,
    /// What of it outlives the process, with the clock that it counts by.
    own: (Arc<OwnStore>, CellClock),
    /// Whether the process has ended.
    is_over: bool,
}

pub(crate) struct Run {
    bug: Option<CellBug>,
    scenario: Scenario,
    world: Shared,
    cells: Vec<CellProcess>,
    scope: Scope,
    /// Each cell's limit.
    limits: Vec<Limit>,
    tasks: HashMap<u64, Task>,
    ready: Arc<Mutex<VecDeque<u64>>>,
    count: u64,
    ceiling: CeilingCheck,
    /// Reservations to be canceled, by their numbers.
    reserved: Arc<Mutex<HashMap<u64, Reserved>>>,
    /// Units of reservations that a cell made or canceled while it held another for silent, as at its start.
    owed_longer: u64,
    checks: u64,
    failed: Arc<Mutex<u64>>,
}

impl Run {
    pub(crate) fn new(seed: u64, bug: Option<CellBug>) -> Self {
        let mut rng = SplitMix64::new(seed ^ 0x5ce1_1500_0000_0000);
        let scenario = Scenario::from_seed(&mut rng);
        let world = Shared::new(rng, (scenario.delay, scenario.loss, scenario.doubles), START);
        let weights = vec![1; scenario.cells];
        let is_split = scenario.mode == RegionMode::Split && bug != Some(CellBug::KeepsWholeLimit);
        let limits =
            (0..scenario.cells)
                .map(|cell| {
                    if is_split {
                        scenario.limit.weighted_part(&weights, cell)
                    } else {
                        scenario.limit.clone()
                    }
                })
                .collect();
        let scope = Scope::new(format!("{}sim|caller|gcra", region_prefix(scenario.mode, scenario.owner())));
        let mut run = Self {
            bug,
            scope,
            limits,
            world,
            cells: Vec::new(),
            tasks: HashMap::new(),
            ready: Arc::default(),
            count: 0,
            ceiling: CeilingCheck::default(),
            reserved: Arc::default(),
            owed_longer: 0,
            checks: 0,
            failed: Arc::default(),
            scenario,
        };
        for cell in 0..run.scenario.cells {
            let process = run.start(cell);
            run.cells.push(process);
            let mut world = run.world.lock();
            world.at(START + 1 + cell as u64, Event::Check(cell));
            world.at(START + 1 + cell as u64, Event::Tick(cell));
        }
        run.introduce();
        if run.scenario.apart {
            let ends = START + run.scenario.length;
            run.world.lock().cut.extend([((0, 1), ends), ((1, 0), ends)]);
        }
        if run.scenario.cuts || run.scenario.crashes || run.scenario.stalls || run.scenario.outages {
            run.world.lock().at(START + 300_000, Event::Break);
        }
        run
    }

    fn new_clock(&self, max_offset: u64) -> CellClock {
        let mut world = self.world.lock();
        let offset = world.rng.below(max_offset);
        let drift = world.rng.between(0, 2 * MAX_DRIFT) as i64 - MAX_DRIFT as i64;
        CellClock { world: self.world.clone(), offset, drift, stood_still: Arc::default() }
    }

    /// Creates the store of a cell.
    fn new_own(&self) -> (Arc<OwnStore>, CellClock) {
        let clock = self.new_clock(self.scenario.max_offset());
        // The longest log of a scenario fits.
        let memory = MemoryConfig::with_bytes(1 << 19);
        let memory = MemoryStore::new(&memory, clock.clone()).unwrap_or_else(|error| panic!("{error}"));
        (Arc::new(OwnStore::new(memory, self.new_clock(3_600_000_000))), clock)
    }

    /// Starts a process of a cell.
    fn start(&mut self, cell: usize) -> CellProcess {
        self.count += 1;
        let number = self.count;
        let kept = self.cells.get(cell).filter(|_| self.scenario.keeps).map(|process| process.own.clone());
        let (own, clock) = kept.unwrap_or_else(|| self.new_own());
        let peers = (0..self.scenario.cells).filter(|other| *other != cell);
        let peers = peers.map(|other| PeerConfig::new(format!("r{other}"), format!("c{other}")));
        let mut config = CellConfig::new(format!("c{cell}"), format!("r{cell}"), peers.collect());
        (config.tick, config.silence) = (self.scenario.tick, self.scenario.silence);
        config.keeps_counters = self.scenario.keeps;
        let links = SimLinks { world: self.world.clone(), own: cell, process: number };
        let now = tollgate_core::Clock::now(&clock);
        let members = Arc::new(Members::new(config, number, now));
        let leases = LeaseConfig {
            ttl: TimeDelta::from_secs(1),
            horizon: TimeDelta::from_millis(400),
            idle: TimeDelta::from_millis(400),
            nodes: u32::try_from(self.scenario.cells).unwrap_or(1),
            ..LeaseConfig::default()
        };
        let (names, kept) = (Pseudonyms::new(b"sim"), (Arc::clone(&own), clock.clone()));
        let store = Store::new(own, members, links.clone(), names, clock, leases);
        CellProcess { store: Arc::new(store), links, number, own: kept, is_over: false }
    }

    /// Sends all cells each other's names.
    fn introduce(&self) {
        for one in &self.cells {
            for peer in 0..self.scenario.cells - 1 {
                let hello = self.cells[one.links.cell(peer)].store.hello();
                one.store.members().on_hello(peer, hello);
            }
        }
    }

    pub(crate) fn finish(mut self) -> CellReport {
        let ends = START + self.scenario.length;
        self.run_until(ends);
        self.ceiling.excuse(START, self.scenario.drift());
        let violation = self.ceiling.violation(&self.scenario.bound(), 0);
        let violation = violation.or_else(|| self.settle(ends));
        let failed = *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        CellReport {
            scenario: format!("{:?}", self.scenario),
            violation,
            checks: self.checks,
            admitted: self.ceiling.total(),
            assumed: self.cells.iter().map(|cell| cell.store.stats().late_assumed).sum(),
            failed,
        }
    }

    /// Heals all links, and checks that the cells agree: of a limit that time does not restore, each counts what all have
    /// admitted.
    fn settle(&mut self, from: u64) -> Option<String> {
        let is_slow = self.scenario.limit.rate().period.length() > TimeDelta::from_secs(3_600);
        let is_settled = !matches!(
            self.bug,
            Some(
                CellBug::ForgetsBatches
                    | CellBug::DecidesWithoutOwner
                    | CellBug::KeepsWholeLimit
                    | CellBug::SkipsDeduction
            )
        );
        if self.scenario.mode != RegionMode::Shared || !is_slow || !is_settled {
            return None;
        }
        self.world.lock().cut.clear();
        self.world.lock().stalled.clear();
        self.run_until(from + 20_000_000);
        let used = self.ceiling.total().min(self.scenario.limit.capacity());
        let less = self.scenario.max_owed_longer().saturating_add(self.owed_longer);
        for (cell, process) in self.cells.iter().enumerate() {
            let parts = [KeyPart::Text("caller")];
            let key = CounterKey { scope: &self.scope, parts: &parts };
            let peek = Charge::new(key, &self.limits[cell], Cost::PEEK);
            let outcomes = now_or_never(process.store.charge(&[peek])).and_then(Result::ok);
            let left = outcomes.map(|outcomes| outcomes.per_charge[0].remaining);
            let expected = self.scenario.limit.capacity() - used;
            let is_right = left.is_some_and(|left| left <= expected && expected - left <= less);
            if !is_right {
                return Some(format!(
                    "cell {cell} has {left:?} left of a limit of which {expected} are left"
                ));
            }
        }
        None
    }

    fn run_until(&mut self, until: u64) {
        loop {
            let event = self.world.lock().next(until);
            let Some(event) = event else { return };
            match event {
                Event::Arrive(id) => self.arrive(id),
                Event::Reply(id) => {
                    let is_current = {
                        let world = self.world.lock();
                        world.calls.get(&id).is_some_and(|call| self.cells[call.from].number == call.process)
                    };
                    if is_current {
                        self.world.lock().end(id, true);
                    }
                }
                Event::GiveUp(id) => self.world.lock().end(id, false),
                Event::Check(cell) => self.check(cell),
                Event::Cancel(cell, id) => self.cancel(cell, id),
                Event::Tick(cell) => self.tick(cell),
                Event::Break => self.break_something(),
                Event::Return(cell, process) => {
                    if self.scenario.keeps || self.cells[cell].number == process {
                        self.cells[cell].store.own().set_down(false);
                    }
                }
                Event::Start(cell) => {
                    let process = self.start(cell);
                    self.cells[cell] = process;
                    self.introduce();
                }
            }
            self.run_ready();
        }
    }

    fn arrive(&mut self, id: u64) {
        let (from, to, process, message) = {
            let world = self.world.lock();
            let Some(call) = world.calls.get(&id) else { return };
            (call.from, call.to, call.process, call.message.clone())
        };
        if self.cells[to].is_over {
            return;
        }
        let mut hello = self.cells[from].store.hello();
        hello.incarnation = process;
        let message = match (self.bug, message) {
            (Some(CellBug::ForgetsBatches), Message::Batch(mut batch)) => {
                Arc::make_mut(&mut batch).entries.clear();
                Message::Batch(batch)
            }
            (Some(CellBug::CountsLateReportsTwice), Message::Batch(mut batch))
                if self.cells[to].store.stats().late_peers > 0 =>
            {
                Arc::make_mut(&mut batch).entries.iter_mut().for_each(|entry| entry.units *= 2);
                Message::Batch(batch)
            }
            (Some(CellBug::ForgetsRefunds), Message::Batch(mut batch)) => {
                Arc::make_mut(&mut batch).entries.retain(|entry| entry.units >= 0);
                Message::Batch(batch)
            }
            (Some(CellBug::CountsRefundsTwice), Message::Batch(mut batch)) => {
                let refunds = Arc::make_mut(&mut batch).entries.iter_mut().filter(|entry| entry.units < 0);
                refunds.for_each(|entry| entry.units *= 2);
                Message::Batch(batch)
            }
            (Some(CellBug::DatesRefundsTooEarly), Message::Batch(mut batch)) => {
                let made_at = &mut Arc::make_mut(&mut batch).made_at;
                *made_at = made_at.map(|at| at + 3_600_000_000);
                Message::Batch(batch)
            }
            (Some(CellBug::SkipsDeduction), Message::Charge(mut charges)) => {
                charges
                    .iter_mut()
                    .filter(|charge| charges_own(charge))
                    .for_each(|charge| charge.cost = Cost::PEEK);
                Message::Charge(charges)
            }
            (_, message) => message,
        };
        let store = Arc::clone(&self.cells[to].store);
        let message = received(&message);
        // Counters in memory answer at once.
        if let Some(reply) = now_or_never(store.handle(&hello, message)) {
            self.world.lock().reply(id, reply);
        }
    }

    fn check(&mut self, cell: usize) {
        let (units, next) = {
            let mut world = self.world.lock();
            let (pace, most) = (self.scenario.pace, self.scenario.cost);
            let pause = world.rng.between(pace / 2, pace * 3 / 2);
            let now = world.now;
            (world.rng.between(1, most), (now < START + self.scenario.length).then_some(now + pause))
        };
        let Some(next) = next else { return };
        self.world.lock().at(next, Event::Check(cell));
        let is_pause = self.scenario.pauses && (next - START) % 20_000_000 < 8_000_000;
        if is_pause || self.cells[cell].is_over {
            return;
        }
        self.checks += 1;
        let (store, scope, limit) =
            (Arc::clone(&self.cells[cell].store), self.scope.clone(), self.limits[cell].clone());
        let (bug, failed) = (self.bug, Arc::clone(&self.failed));
        let canceled_after = {
            let mut world = self.world.lock();
            let is_canceled = self.scenario.cancels > 0 && world.rng.chance(self.scenario.cancels);
            is_canceled.then(|| world.rng.between(100, 1_000_000))
        };
        let (world, reserved, id) = (self.world.clone(), Arc::clone(&self.reserved), self.checks);
        self.spawn(Box::pin(async move {
            let parts = [KeyPart::Text("caller")];
            let charge = Charge {
                loss_policy: LossPolicy::AssumeExhausted,
                ..Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::new(units))
            };
            let (taken, mut outcomes) = (store.now(), tollgate_core::Outcomes::default());
            let is_silent = has_silent_peer(&store);
            let charged = match store.try_charge(&[charge], &mut outcomes) {
                true => Ok(outcomes),
                false => store.charge(&[charge]).await,
            };
            let charged = match charged {
                Err(_) if bug == Some(CellBug::DecidesWithoutOwner) => store.own().charge(&[charge]).await,
                other => other,
            };
            match (charged, canceled_after) {
                // What is canceled has not been used, whenever that is.
                (Ok(outcomes), Some(after)) => {
                    if outcomes.admission == Admission::Admitted {
                        let one = (Arc::clone(&store), units, taken, is_silent);
                        reserved.lock().unwrap_or_else(PoisonError::into_inner).insert(id, one);
                        let mut world = world.lock();
                        let now = world.now;
                        world.at(now + after, Event::Cancel(cell, id));
                    }
                    None
                }
                (Ok(outcomes), None) => {
                    (outcomes.admission == Admission::Admitted).then(|| (units, decided()))
                }
                (Err(_), _) => {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                    None
                }
            }
        }));
    }

    fn cancel(&mut self, cell: usize, id: u64) {
        let reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let Some((store, units, taken, was_silent)) = reserved else { return };
        if was_silent || has_silent_peer(&store) {
            self.owed_longer += units;
        }
        let (scope, limit) = (self.scope.clone(), self.limits[cell].clone());
        self.spawn(Box::pin(async move {
            let parts = [KeyPart::Text("caller")];
            let key = CounterKey { scope: &scope, parts: &parts };
            if let Some((limit, cost)) = limit.refund(units, units, taken, store.now()) {
                let _ = store.debit(&[Charge::new(key, &limit, cost)]).await;
            }
            None
        }));
    }

    fn tick(&mut self, cell: usize) {
        let now = self.world.lock().now;
        self.world.lock().at(now + self.scenario.tick.as_micros(), Event::Tick(cell));
        if self.cells[cell].is_over {
            return;
        }
        self.cells[cell].store.tick();
        for peer in 0..self.scenario.cells - 1 {
            let CellProcess { store, links, .. } = &self.cells[cell];
            let (store, links, within) =
                (Arc::clone(store), links.clone(), self.scenario.silence.as_micros() / 2);
            self.spawn(Box::pin(async move {
                let batch = store.next_batch(peer);
                let (sequence, sent) = (batch.sequence, store.now());
                if let Ok(answer) = links.call(peer, Message::Batch(batch), within).await {
                    store.on_batch_answer(peer, sequence, sent, &answer);
                }
                None
            }));
        }
        let store = Arc::clone(&self.cells[cell].store);
        self.spawn(Box::pin(async move {
            if let Some(records) = store.own().records() {
                let _ = store.share_tenure(records).await;
            }
            None
        }));
        for task in self.cells[cell].store.leases().due_tasks() {
            self.count += 1;
            let (store, id) = (Arc::clone(&self.cells[cell].store), PermitId(u128::from(self.count)));
            self.spawn(Box::pin(async move {
                store.leases().run_task(task, id).await;
                None
            }));
        }
    }

    fn break_something(&mut self) {
        if self.world.lock().now >= START + self.scenario.length {
            return;
        }
        let cells = self.scenario.cells as u64;
        let (crash, one, other, both, length, next) = {
            let mut world = self.world.lock();
            let crash = self.scenario.crashes && (!self.scenario.cuts || world.rng.chance(300));
            let pair = (world.rng.below(cells) as usize, world.rng.below(cells) as usize);
            let (both, length) = (world.rng.chance(600), world.rng.between(50_000, 5_000_000));
            (crash, pair.0, pair.1, both, length, world.now + world.rng.between(200_000, 2_000_000))
        };
        if crash {
            // What is kept is of use only once the cell has joined the others again.
            let next =
                self.end(one).map_or(next, |back| back + next % (8 * self.scenario.silence.as_micros()));
            self.world.lock().at(next, Event::Break);
            return;
        }
        self.world.lock().at(next, Event::Break);
        let mut world = self.world.lock();
        let is_others = self.scenario.cuts || self.scenario.crashes;
        if self.scenario.outages && (!is_others || world.rng.chance(400)) {
            // Until it is noticed, until the others decide, and longer.
            let until = world.now + world.rng.between(50_000, 6 * self.scenario.silence.as_micros());
            let CellProcess { store, number, .. } = &self.cells[one];
            if !store.own().set_down(true) {
                world.at(until, Event::Return(one, *number));
            }
            return;
        }
        if self.scenario.stalls && (!self.scenario.cuts || world.rng.chance(600)) {
            // Late, and not silent: below the silence time.
            let most = self.scenario.silence.as_micros() * 3 / 4;
            let until = world.now + world.rng.between(most / 4, most);
            let other = if one == other { (one + 1) % cells as usize } else { other };
            world.stalled.insert((one, other), until);
            return;
        }
        let until = world.now + length;
        // A cell is cut off from one other, or from all.
        let others: Vec<usize> = if one == other { (0..cells as usize).collect() } else { vec![other] };
        for other in others.into_iter().filter(|other| *other != one) {
            let directions = if both { &[(one, other), (other, one)][..] } else { &[(one, other)] };
            for direction in directions {
                let cut = world.cut.entry(*direction).or_default();
                *cut = until.max(*cut);
            }
        }
    }

    /// Ends a cell's process. One that loses its counters is replaced at once, another after a while: returns when.
    fn end(&mut self, cell: usize) -> Option<u64> {
        if self.cells[cell].is_over {
            return None;
        }
        self.count += 1;
        // It receives no replies any more.
        (self.cells[cell].number, self.cells[cell].is_over) = (self.count, true);
        let mut world = self.world.lock();
        let silence = self.scenario.silence.as_micros();
        let pause = match (self.scenario.keeps, world.rng.chance(400)) {
            (false, _) => 0,
            (true, true) => world.rng.below(silence),
            (true, false) => world.rng.between(silence, 6 * silence),
        };
        let now = world.now;
        world.at(now + pause, Event::Start(cell));
        if self.bug == Some(CellBug::BelievesOldTenures) {
            self.cells[cell].own.0.stand_still(pause);
        }
        self.scenario.keeps.then_some(now + pause)
    }

    fn spawn(&mut self, task: Task) {
        self.count += 1;
        self.tasks.insert(self.count, task);
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.count);
        self.run_ready();
    }

    fn run_ready(&mut self) {
        loop {
            let next = self.ready.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(id) = next else { return };
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            let waker = Waker::from(Arc::new(Ready(Arc::clone(&self.ready), id)));
            let _ = decided();
            if let Poll::Ready(done) = task.as_mut().poll(&mut Context::from_waker(&waker)) {
                self.tasks.remove(&id);
                if let Some((units, at)) = done {
                    let now = self.world.lock().now;
                    self.ceiling.admit(at.unwrap_or(now), units);
                }
            }
        }
    }
}

/// Returns a message as its receiver reads it: a limit has fields that are not sent.
fn received(message: &Message) -> Message {
    let bytes = message::encode(0, message);
    message::decode(&bytes[message::PREFIX..]).map_or_else(|error| panic!("{error}"), |(_, message)| message)
}

/// Returns whether a charge is on a limit's own counter, not on one that leases keep beside it.
fn charges_own(charge: &tollgate_cells::SentCharge) -> bool {
    !["|escrow", "|leased"].iter().any(|suffix| charge.counter.scope.label().ends_with(suffix))
}

/// Returns whether a cell decides by its part, because another is silent.
fn has_silent_peer(store: &Store) -> bool {
    let (members, now) = (store.members(), store.now());
    members.config().peers.iter().enumerate().any(|(peer, _)| members.is_silent(peer, now))
}

/// Polls a future once.
fn now_or_never<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        Poll::Pending => None,
    }
}
