//! Virtual time, pending events, and the network between nodes and store.

use crate::authority::{Authority, Request};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use tollgate_core::conformance::{MemoryRecords, SplitMix64};
use tollgate_core::{Clock, Outcomes, StoreError, Timestamp};

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A request arrives at the store.
    Arrive(u64),
    /// A response arrives at its node.
    Answer(u64),
    /// A call times out.
    GiveUp(u64),
    /// A node gets a check.
    Check(usize),
    /// A node runs its lease tasks.
    RunTasks(usize),
    /// The replica catches up.
    Replicate,
    /// A fault occurs.
    Break,
    /// A node resumes after a pause.
    Resume(usize),
}

/// A call in progress.
pub(crate) struct Call {
    node: usize,
    request: Request,
    answer: Option<(Outcomes, u64)>,
    done: Option<Result<(Outcomes, u64), StoreError>>,
    waker: Option<Waker>,
}

/// Behavior of the network.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    /// Minimum and maximum delay in microseconds.
    pub(crate) delay: (u64, u64),
    /// Lost and duplicated messages, per thousand.
    pub(crate) loss: u64,
    pub(crate) doubles: u64,
    /// Messages with a much longer delay, per thousand.
    pub(crate) stragglers: u64,
    /// Partitioned nodes: whether requests and responses are cut, and until when.
    pub(crate) cut: HashMap<usize, (bool, bool, u64)>,
}

pub(crate) struct World {
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    pub(crate) rng: SplitMix64,
    pub(crate) authority: Authority,
    pub(crate) network: Network,
    calls: HashMap<u64, Call>,
    /// Paused nodes, and until when.
    pub(crate) paused: HashMap<usize, u64>,
    pub(crate) history: Vec<String>,
}

/// The world, shared by everything in it.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Mutex<World>>);

/// Timeout of a call in microseconds.
pub(crate) const DEADLINE: u64 = 10_000;

impl Shared {
    pub(crate) fn new(world: World) -> Self {
        Self(Arc::new(Mutex::new(world)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The store's clock.
pub(crate) struct StoreClock(pub(crate) Shared);

impl Clock for StoreClock {
    fn now(&self) -> Timestamp {
        let world = self.0.lock();
        world.authority.time(world.now)
    }
}

/// Records of reservations, which all nodes see at once: only what becomes of counters is simulated.
pub(crate) type Records = MemoryRecords<StoreClock>;

impl World {
    pub(crate) fn new(rng: SplitMix64, authority: Authority, network: Network, start: u64) -> Self {
        Self {
            now: start,
            queue: BinaryHeap::new(),
            order: 0,
            rng,
            authority,
            network,
            calls: HashMap::new(),
            paused: HashMap::new(),
            history: Vec::new(),
        }
    }

    pub(crate) fn at(&mut self, when: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((when.max(self.now), self.order, event)));
    }

    pub(crate) fn note(&mut self, what: impl FnOnce() -> String) {
        let line = format!("{:>12.6} {}", self.now as f64 / 1e6, what());
        self.history.push(line);
    }

    /// Advances time to the next event before `until` and returns it.
    pub(crate) fn next(&mut self, until: u64) -> Option<Event> {
        let Reverse((when, ..)) = self.queue.peek()?;
        if *when > until {
            self.now = self.now.max(until);
            return None;
        }
        let Reverse((when, _, event)) = self.queue.pop()?;
        // Never backwards: time may have been moved past pending events.
        self.now = self.now.max(when);
        Some(event)
    }

    /// Sends a request from a node and returns the id of the call.
    pub(crate) fn send(&mut self, node: usize, request: Request) -> u64 {
        self.order += 1;
        let (id, now) = (self.order, self.now);
        self.calls.insert(id, Call { node, request, answer: None, done: None, waker: None });
        self.at(now + DEADLINE, Event::GiveUp(id));
        self.carry(node, Event::Arrive(id), true);
        id
    }

    /// Transmits a message: it may be lost, delayed, duplicated or cut off.
    fn carry(&mut self, node: usize, event: Event, towards_store: bool) {
        let now = self.now;
        let is_cut = self
            .network
            .cut
            .get(&node)
            .is_some_and(|(out, back, until)| now < *until && if towards_store { *out } else { *back });
        let is_refund = match event {
            Event::Arrive(id) => self.calls.get(&id).is_some_and(|call| call.request.is_refund()),
            _ => false,
        };
        let copies = 1 + u64::from(self.rng.chance(self.network.doubles) && !is_refund);
        for _ in 0..copies {
            let (least, most) = self.network.delay;
            let mut delay = self.rng.between(least, most);
            if self.rng.chance(self.network.stragglers) {
                delay += self.rng.below(50_000);
            }
            if !is_cut && !self.rng.chance(self.network.loss) {
                self.at(now + delay, event);
            }
        }
    }

    /// Handles a request at the store, possibly a duplicate.
    pub(crate) fn arrive(&mut self, id: u64) {
        let Some(call) = self.calls.get(&id) else { return };
        let (node, request, now) = (call.node, call.request.clone(), self.now);
        let outcomes = self.authority.handle(&request, now);
        if let Some(call) = self.calls.get_mut(&id) {
            call.answer.get_or_insert((outcomes, now));
        }
        self.carry(node, Event::Answer(id), false);
    }

    /// Completes a call with its response or a timeout.
    pub(crate) fn end(&mut self, id: u64, answered: bool) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        if call.done.is_some() {
            return;
        }
        call.done = match (&call.answer, answered) {
            (Some(answer), true) => Some(Ok(answer.clone())),
            (None, true) => return,
            (_, false) => Some(Err(StoreError::Timeout)),
        };
        if let Some(waker) = call.waker.take() {
            waker.wake();
        }
    }

    /// Returns the result of a call, or registers the waker.
    pub(crate) fn done(&mut self, id: u64, waker: &Waker) -> Option<Result<(Outcomes, u64), StoreError>> {
        let call = self.calls.get_mut(&id)?;
        if call.done.is_none() {
            call.waker = Some(waker.clone());
        }
        // The call is kept: a duplicate of the request may still arrive.
        call.done.clone()
    }
}
