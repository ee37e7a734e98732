//! One run: events in order, tasks as they wake, random faults; then a recovery phase, and the properties that must hold.

use crate::authority::Authority;
use crate::ceiling::CeilingCheck;
use crate::fairness::Fairness;
use crate::node::{self, Store};
use crate::scenario::Scenario;
use crate::world::{Event, Records, Shared, StoreClock, World};
use crate::{Bug, Report};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{Cost, CounterKey, KeyPart, Limit, PermitId, TimeDelta};
use tollgate_engine::{Check, Limiter, Origin, ReservationId};
use tollgate_rules::{Options, Ruleset, Source};

/// Start time of all runs, in microseconds.
const START: u64 = 1_790_000_000_000_000;
/// Interval at which nodes run lease tasks and the replica catches up, in microseconds.
const TASK_INTERVAL: u64 = 20_000;
/// Longest time that a message is in flight, in microseconds.
const MAX_DELAY: u64 = 60_000;

type Task = Pin<Box<dyn Future<Output = Option<Done>>>>;

/// A completed task.
enum Done {
    Checked(Checked),
    /// A reservation was settled or canceled.
    Closed {
        began: u64,
        is_failed: bool,
    },
}

/// A completed check.
struct Checked {
    node: usize,
    allowed: bool,
    origin: Origin,
    units: u64,
    /// When the store decided; `None` if the node did.
    decided: Option<u64>,
    /// The reservation, if the check was one.
    reservation: Option<ReservationId>,
}

/// A reservation that is open.
struct OpenReservation {
    id: ReservationId,
    units: u64,
    /// Its place among the admitted units.
    place: usize,
}

/// Puts a task back into the ready queue.
struct Ready(Arc<Mutex<VecDeque<u64>>>, u64);

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.1);
    }
}

pub(crate) struct Run {
    seed: u64,
    bug: Option<Bug>,
    scenario: Scenario,
    world: Shared,
    rules: Arc<Ruleset>,
    nodes: Vec<Arc<Limiter<Store>>>,
    records: Arc<Records>,
    open: Vec<OpenReservation>,
    /// How long refunds may have been in flight, in microseconds.
    in_flight: u64,
    tasks: HashMap<u64, (usize, Task)>,
    ready: Arc<Mutex<VecDeque<u64>>>,
    /// Tasks that became ready while their node was paused.
    parked: Vec<u64>,
    count: u64,
    ceiling: CeilingCheck,
    /// The whole limit, without a share set aside for nodes.
    whole: Limit,
    checks: u64,
    local: u64,
    served: Vec<u64>,
    fairness: Fairness,
    traffic_ends: u64,
}

impl Run {
    pub(crate) fn new(seed: u64, bug: Option<Bug>) -> Self {
        let mut rng = SplitMix64::new(seed);
        let scenario = Scenario::from_seed(&mut rng);
        let load = |nodes| {
            let options = Options { nodes, ..Options::default() };
            let rules = Ruleset::load(&[Source::new("sim.yaml", scenario.rules.as_str())], &options);
            Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")))
        };
        let rules = load(Some(scenario.nodes as u32));
        // Without the number of nodes, no share is set aside.
        let whole = load(None).rules()[0].limits.limits[0].limit.clone();
        let mut world = World::new(rng, Authority::new(bug), scenario.network.clone(), START);
        world.note(|| format!("{scenario:?}"));
        let traffic_ends = START + scenario.length;
        for node in 0..scenario.nodes {
            world.at(START + 1 + node as u64, Event::Check(node));
            world.at(START + TASK_INTERVAL, Event::RunTasks(node));
        }
        world.at(START + TASK_INTERVAL, Event::Replicate);
        if !scenario.calm {
            world.at(START + 200_000, Event::Break);
        }
        let world = Shared::new(world);
        let records = Arc::new(Records::new(StoreClock(world.clone())));
        let nodes = (0..scenario.nodes)
            .map(|node| node::process(&world, node, &rules, &scenario.leases, &records, bug))
            .collect();
        Self {
            seed,
            bug,
            served: vec![0; scenario.nodes],
            fairness: Fairness::new(scenario.nodes),
            scenario,
            world,
            rules,
            nodes,
            records,
            open: Vec::new(),
            in_flight: 0,
            tasks: HashMap::new(),
            ready: Arc::default(),
            parked: Vec::new(),
            count: 0,
            ceiling: CeilingCheck::default(),
            whole,
            checks: 0,
            local: 0,
            traffic_ends,
        }
    }

    pub(crate) fn finish(mut self) -> Report {
        let broken = self.traffic().or_else(|| self.recover());
        let mut world = self.world.lock();
        if let Some(broken) = &broken {
            world.note(|| broken.clone());
        }
        Report {
            seed: self.seed,
            violation: broken,
            history: std::mem::take(&mut world.history),
            checks: self.checks,
            local: self.local,
            admitted: self.ceiling.total(),
        }
    }

    /// Runs traffic and faults, then checks the ceiling.
    fn traffic(&mut self) -> Option<String> {
        self.until(self.traffic_ends);
        self.rush();
        self.until(self.traffic_ends + 100_000);
        let phase = self.key(|key, whole, _| whole.phase(key.stable_hash()).as_micros());
        if self.in_flight > 0 {
            // A refund restores what time has restored while it was in flight.
            let rate = self.whole.rate();
            let units = rate.count.saturating_mul(self.in_flight) / rate.period.length().as_micros() + 1;
            self.ceiling.excuse(START, units);
        }
        self.ceiling.violation(&self.whole, phase).or_else(|| self.unfair(phase))
    }

    /// Spends at one instant all units available on all nodes: excess outstanding units show up here.
    fn rush(&mut self) {
        for node in 0..self.scenario.nodes {
            for _ in 0..2 * self.whole.capacity() {
                let before = self.served[node];
                if self.world.lock().paused.contains_key(&node) {
                    break;
                }
                self.check(node, 1);
                if self.served[node] == before {
                    break;
                }
            }
        }
        // Checks that reach the store get what is left there.
        for turn in 0..40 {
            let node = turn % self.scenario.nodes;
            let units = (self.whole.capacity() / 20).max(1);
            if !self.world.lock().paused.contains_key(&node) {
                self.check(node, units);
            }
        }
    }

    /// Returns a violation if, without faults and with equal demand, a node got much less than its due.
    fn unfair(&mut self, phase: u64) -> Option<String> {
        let even = self.scenario.pace.iter().all(|pace| *pace == self.scenario.pace[0]);
        let comparable = self.scenario.calm && even;
        let least = 400 * self.scenario.cost;
        self.fairness.violation(&self.whole, phase, least).filter(|_| comparable)
    }

    /// Ends all faults and traffic: the whole budget must return, and every node must be served.
    fn recover(&mut self) -> Option<String> {
        {
            let mut world = self.world.lock();
            world.note(|| "recovery".to_owned());
            world.network = crate::world::Network { delay: (100, 500), ..Default::default() };
            world.paused.clear();
        }
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).extend(std::mem::take(&mut self.parked));
        let now = self.world.lock().now;
        // Long enough for two window changes, and for a bucket to fill.
        let quota = self.whole.rate();
        let length = quota.period.length().as_micros();
        let fill = u128::from(self.whole.capacity()) * u128::from(length) / u128::from(quota.count.max(1));
        let period = length.max(u64::try_from(fill).unwrap_or(u64::MAX));
        let idle = self.scenario.leases.idle.as_micros() + self.scenario.leases.ttl.as_micros();
        self.until(now + 2 * idle + 1_000_000);
        // The store's clock may have jumped back: units taken before lie that much further in the future.
        let behind = self.world.lock().authority.offset.min(0).unsigned_abs();
        self.world.lock().now += behind + 4 * period;
        let remaining = self.key(|key, _, run| {
            let limit = run.limit();
            let mut world = run.world.lock();
            let now = world.now;
            world.authority.remaining(key, &limit, now)
        });
        let capacity = self.limit().capacity();
        if remaining != capacity {
            return Some(format!("{remaining} of {capacity} units remain after recovery: units have leaked"));
        }
        for node in 0..self.scenario.nodes.min(usize::try_from(capacity).unwrap_or(usize::MAX)) {
            let before = self.ceiling.total();
            self.check(node, 1);
            let now = self.world.lock().now;
            // Long enough for surplus units that this node fetched to be returned for the next.
            self.until(now + 2 * idle + 100_000);
            if self.ceiling.total() != before + 1 {
                return Some(format!(
                    "node {node} is not served, although units are available and there are no faults"
                ));
            }
        }
        None
    }

    /// Returns the limit of the store's counters.
    fn limit(&self) -> Limit {
        self.rules.rules()[0].limits.limits[0].limit.clone()
    }

    fn key<T>(&mut self, with: impl FnOnce(CounterKey<'_>, &Limit, &mut Self) -> T) -> T {
        let rules = Arc::clone(&self.rules);
        let (parts, whole) = ([KeyPart::Text("alice")], self.whole.clone());
        let key = CounterKey { scope: &rules.rules()[0].limits.limits[0].scope, parts: &parts };
        with(key, &whole, self)
    }

    fn until(&mut self, end: u64) {
        loop {
            self.run_ready();
            let Some(event) = self.world.lock().next(end) else { break };
            self.happen(event);
        }
        self.run_ready();
    }

    fn happen(&mut self, event: Event) {
        let now = self.world.lock().now;
        match event {
            Event::Arrive(id) => self.world.lock().arrive(id),
            Event::Answer(id) => self.world.lock().end(id, true),
            Event::GiveUp(id) => self.world.lock().end(id, false),
            Event::Check(node) => {
                if now < self.traffic_ends {
                    let mut world = self.world.lock();
                    let pace = self.scenario.pace[node];
                    // Occasionally a node is quiet for a while.
                    let wait = world.rng.below(2 * pace) + if world.rng.chance(5) { 400_000 } else { 0 };
                    world.at(now + wait, Event::Check(node));
                    let units = world.rng.between(1, self.scenario.cost);
                    let paused = world.paused.contains_key(&node);
                    let reserves = self.scenario.reserves && world.rng.chance(300);
                    let closes = self.scenario.reserves && world.rng.chance(250);
                    drop(world);
                    if !paused {
                        self.ask(node, units, reserves);
                        if closes {
                            self.close_reservation(node);
                        }
                    }
                }
            }
            Event::RunTasks(node) => {
                let recovering = now > self.traffic_ends;
                self.world.lock().at(
                    now + if recovering { 10 * TASK_INTERVAL } else { TASK_INTERVAL },
                    Event::RunTasks(node),
                );
                self.run_lease_tasks(node);
            }
            Event::Replicate => {
                let mut world = self.world.lock();
                world.authority.replicate(now);
                let lag = world.rng.between(1, 100) * 1_000;
                if now < self.traffic_ends {
                    world.at(now + lag, Event::Replicate);
                }
            }
            Event::Resume(node) => {
                self.world.lock().paused.remove(&node);
                self.ready
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .extend(std::mem::take(&mut self.parked));
            }
            Event::Break => self.break_something(now),
        }
    }

    fn break_something(&mut self, now: u64) {
        if now >= self.traffic_ends {
            return;
        }
        let mut world = self.world.lock();
        let again = world.rng.between(100, 900) * 1_000;
        world.at(now + again, Event::Break);
        let node = usize::try_from(world.rng.below(self.scenario.nodes as u64)).unwrap_or(0);
        let length = world.rng.between(1, 1_500) * 1_000;
        match world.rng.below(10) {
            0..=3 => {
                let (out, back) = *world.rng.pick(&[(true, true), (true, false), (false, true)]);
                world.note(|| format!("node {node}: cut (out {out}, back {back}) for {length} us"));
                world.network.cut.insert(node, (out, back, now + length));
            }
            4 | 5 => {
                world.note(|| format!("node {node}: paused for {length} us"));
                world.paused.insert(node, now + length);
                world.at(now + length, Event::Resume(node));
            }
            6 | 7 => {
                world.note(|| format!("node {node}: crashes and restarts"));
                drop(world);
                self.tasks.retain(|_, (whose, _)| *whose != node);
                let share = self.rules.rules()[0].limits.limits[0]
                    .node_share
                    .as_ref()
                    .map_or(0, |share| share.capacity());
                if self.scenario.fallback {
                    // The new process does not know what the old one admitted from its share.
                    self.ceiling.excuse(now, share);
                }
                let Self { world, rules, scenario, records, bug, .. } = &*self;
                self.nodes[node] = node::process(world, node, rules, &scenario.leases, records, *bug);
            }
            8 => {
                let lost = world.authority.fail_over(now);
                world.note(|| format!("store: fails over and loses {lost} units"));
                drop(world);
                self.ceiling.excuse(now, lost);
            }
            _ if self.scenario.jumps => {
                let by = i64::try_from(world.rng.below(4_000_000)).unwrap_or(0) - 2_000_000;
                world.authority.jump(by);
                world.note(|| format!("store: its clock jumps by {by} us"));
                drop(world);
                self.excuse_jump(now, by);
            }
            _ => {}
        }
    }

    /// Excuses what a clock jump adds: the units of that time, and outstanding units that it may void.
    fn excuse_jump(&mut self, now: u64, by: i64) {
        let limit = &self.whole;
        let period = limit.rate().period.length().as_micros();
        let ahead = by.unsigned_abs();
        let units = limit.rate().count.saturating_mul(ahead) / period + 1 + limit.capacity();
        self.ceiling.excuse(now, units);
    }

    fn check(&mut self, node: usize, units: u64) {
        self.ask(node, units, false);
    }

    /// Sends a check to a node, or a reservation.
    fn ask(&mut self, node: usize, units: u64, reserves: bool) {
        self.checks += 1;
        let now = self.world.lock().now;
        // The rush at the end is no demand of equals: it asks node after node for all that is left.
        if now < self.traffic_ends {
            self.fairness.ask(node, now, units);
        }
        let limiter = Arc::clone(&self.nodes[node]);
        self.spawn(
            node,
            Box::pin(async move {
                let attributes = [("user", "alice")];
                let check = Check::attributes("sim", &attributes).with_cost(Cost::new(units));
                let (decision, reservation) = if reserves {
                    let made = limiter.reserve(&check, TimeDelta::from_secs(60), None).await.ok()?;
                    (made.decision, made.id)
                } else {
                    (limiter.check(&check).await, None)
                };
                let decided = node::decided();
                let (allowed, origin) = (decision.is_allowed(), decision.origin);
                Some(Done::Checked(Checked { node, allowed, origin, units, decided, reservation }))
            }),
        );
        self.run_lease_tasks(node);
    }

    /// Settles or cancels an open reservation on a node. It is sent once: what is not refunded recovers with time.
    fn close_reservation(&mut self, node: usize) {
        if self.open.is_empty() {
            return;
        }
        let (began, place, used) = {
            let mut world = self.world.lock();
            let place = usize::try_from(world.rng.below(self.open.len() as u64)).unwrap_or(0);
            let used = world.rng.below(self.open[place].units + 1);
            (world.now, place, used)
        };
        let OpenReservation { id, place, .. } = self.open.swap_remove(place);
        self.ceiling.settle(place, used);
        let limiter = Arc::clone(&self.nodes[node]);
        self.spawn(
            node,
            Box::pin(async move {
                let closed = match used {
                    0 => limiter.cancel(id).await,
                    used => limiter.settle(id, used).await,
                };
                node::decided();
                Some(Done::Closed { began, is_failed: closed.is_err() })
            }),
        );
    }

    /// Runs the due lease tasks of a node.
    fn run_lease_tasks(&mut self, node: usize) {
        if self.world.lock().paused.contains_key(&node) {
            return;
        }
        for task in self.nodes[node].store().due_tasks() {
            let limiter = Arc::clone(&self.nodes[node]);
            self.count += 1;
            let id = PermitId(u128::from(self.count));
            self.spawn(
                node,
                Box::pin(async move {
                    limiter.store().run_task(task, id).await;
                    node::decided();
                    None
                }),
            );
        }
    }

    fn spawn(&mut self, node: usize, task: Task) {
        self.count += 1;
        self.tasks.insert(self.count, (node, task));
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.count);
        self.run_ready();
    }

    fn run_ready(&mut self) {
        loop {
            let next = self.ready.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(id) = next else { return };
            let Some((node, task)) = self.tasks.get_mut(&id) else { continue };
            if self.world.lock().paused.contains_key(node) {
                self.parked.push(id);
                continue;
            }
            let waker = Waker::from(Arc::new(Ready(Arc::clone(&self.ready), id)));
            node::decided();
            if let std::task::Poll::Ready(done) = task.as_mut().poll(&mut Context::from_waker(&waker)) {
                self.tasks.remove(&id);
                if let Some(done) = done {
                    self.note(&done);
                }
            }
        }
    }

    fn note(&mut self, done: &Done) {
        let now = self.world.lock().now;
        let done = match done {
            Done::Checked(done) => done,
            Done::Closed { began, is_failed } => {
                // What the node no longer waits for may arrive later.
                self.in_flight += now - began + if *is_failed { MAX_DELAY } else { 0 };
                return;
            }
        };
        self.local += u64::from(done.decided.is_none());
        if done.allowed {
            debug_assert!(done.origin != Origin::FailOpen, "no rule here fails open");
            let place = self.ceiling.admit(done.decided.unwrap_or(now), done.units);
            self.open.extend(done.reservation.map(|id| OpenReservation { id, units: done.units, place }));
            self.served[done.node] += done.units;
            if now < self.traffic_ends {
                self.fairness.serve(done.node, now, done.units);
            }
        }
    }
}
