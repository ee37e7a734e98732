//! Virtual time, the events to come, and the network between nodes and store.

use crate::authority::{Authority, Request};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{Outcomes, StoreError};

/// What happens at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A request reaches the store.
    Arrive(u64),
    /// An answer reaches its node.
    Answer(u64),
    /// A caller waits no longer.
    GiveUp(u64),
    /// A node is asked for a decision.
    Check(usize),
    /// A node looks after its leases.
    RunTasks(usize),
    /// The replica catches up.
    Replicate,
    /// Something breaks.
    Break,
    /// A node goes on after a pause.
    Resume(usize),
}

/// A request under way.
pub(crate) struct Call {
    node: usize,
    request: Request,
    answer: Option<(Outcomes, u64)>,
    done: Option<Result<(Outcomes, u64), StoreError>>,
    waker: Option<Waker>,
}

/// How messages fare.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    /// Microseconds, least and most.
    pub(crate) delay: (u64, u64),
    /// In a thousand.
    pub(crate) loss: u64,
    pub(crate) doubles: u64,
    /// These come much later than they should.
    pub(crate) stragglers: u64,
    /// Which nodes cannot be heard, and which cannot hear, until when.
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
    /// Nodes that do not run, until when.
    pub(crate) paused: HashMap<usize, u64>,
    pub(crate) history: Vec<String>,
}

/// The world, shared by all that is in it.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Mutex<World>>);

/// How long a node waits for an answer.
pub(crate) const DEADLINE: u64 = 10_000;

impl Shared {
    pub(crate) fn new(world: World) -> Self {
        Self(Arc::new(Mutex::new(world)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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

    /// The next event, if there is one before `until`; time is then what it was for.
    pub(crate) fn next(&mut self, until: u64) -> Option<Event> {
        let Reverse((when, ..)) = self.queue.peek()?;
        if *when > until {
            self.now = self.now.max(until);
            return None;
        }
        let Reverse((when, _, event)) = self.queue.pop()?;
        // Not back: time may have been moved on past events that wait.
        self.now = self.now.max(when);
        Some(event)
    }

    /// A node asks.
    pub(crate) fn send(&mut self, node: usize, request: Request) -> u64 {
        self.order += 1;
        let (id, now) = (self.order, self.now);
        self.calls.insert(id, Call { node, request, answer: None, done: None, waker: None });
        self.at(now + DEADLINE, Event::GiveUp(id));
        self.carry(node, Event::Arrive(id), true);
        id
    }

    /// A message on its way: lost, late, doubled, or stopped by a cut.
    fn carry(&mut self, node: usize, event: Event, towards_store: bool) {
        let now = self.now;
        let is_cut = self
            .network
            .cut
            .get(&node)
            .is_some_and(|(out, back, until)| now < *until && if towards_store { *out } else { *back });
        let copies = 1 + u64::from(self.rng.chance(self.network.doubles));
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

    /// A request reaches the store, maybe for the second time.
    pub(crate) fn arrive(&mut self, id: u64) {
        let Some(call) = self.calls.get(&id) else { return };
        let (node, request, now) = (call.node, call.request.clone(), self.now);
        let outcomes = self.authority.handle(&request, now);
        if let Some(call) = self.calls.get_mut(&id) {
            call.answer.get_or_insert((outcomes, now));
        }
        self.carry(node, Event::Answer(id), false);
    }

    /// A call comes to its end, by an answer or for want of one.
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

    /// What came of a call, once.
    pub(crate) fn done(&mut self, id: u64, waker: &Waker) -> Option<Result<(Outcomes, u64), StoreError>> {
        let call = self.calls.get_mut(&id)?;
        if call.done.is_none() {
            call.waker = Some(waker.clone());
        }
        // It stays known: a copy of the request may still arrive.
        call.done.clone()
    }
}
