//! Virtual time, events, and messages between cells.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tollgate_cells::message::Message;
use tollgate_cells::{SentCharge, Transport};
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{Clock, CounterId, Outcomes, StoreError, Timestamp};

/// Deadline of a request to another cell, in microseconds.
pub(crate) const DEADLINE: u64 = 150_000;

thread_local! {
    /// When another cell decided what the running task has just received.
    static DECIDED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Takes the time at which another cell decided the last reply, if there was one.
pub(crate) fn decided() -> Option<u64> {
    DECIDED.with(Cell::take)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A request arrives.
    Arrive(u64),
    /// A reply arrives.
    Reply(u64),
    /// A request times out.
    GiveUp(u64),
    Check(usize),
    /// A reservation is canceled: its cell, and its number.
    Cancel(usize, u64),
    Tick(usize),
    /// Something breaks.
    Break,
    /// The store of a cell takes charges again, if this is still its store.
    Return(usize, u64),
    /// A cell that has ended starts again.
    Start(usize),
}

pub(crate) struct Call {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// The process that sent it: a restarted cell gets no replies to the one before.
    pub(crate) process: u64,
    pub(crate) message: Message,
    reply: Option<(Message, u64)>,
    done: Option<Result<(Message, u64), StoreError>>,
    waker: Option<Waker>,
}

pub(crate) struct World {
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    pub(crate) rng: SplitMix64,
    pub(crate) calls: HashMap<u64, Call>,
    delay: (u64, u64),
    loss: u64,
    doubles: u64,
    /// Directions that carry nothing, and until when.
    pub(crate) cut: HashMap<(usize, usize), u64>,
    /// Directions that hold messages back, and until when.
    pub(crate) stalled: HashMap<(usize, usize), u64>,
}

#[derive(Clone)]
pub(crate) struct Shared(Arc<Mutex<World>>);

impl Shared {
    pub(crate) fn new(rng: SplitMix64, (delay, loss, doubles): ((u64, u64), u64, u64), start: u64) -> Self {
        Self(Arc::new(Mutex::new(World {
            now: start,
            queue: BinaryHeap::new(),
            order: 0,
            rng,
            calls: HashMap::new(),
            delay,
            loss,
            doubles,
            cut: HashMap::new(),
            stalled: HashMap::new(),
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World {
    pub(crate) fn at(&mut self, when: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((when.max(self.now), self.order, event)));
    }

    /// Advances time to the next event before `until` and returns it.
    pub(crate) fn next(&mut self, until: u64) -> Option<Event> {
        let Reverse((when, ..)) = self.queue.peek()?;
        if *when > until {
            return None;
        }
        let Reverse((when, _, event)) = self.queue.pop()?;
        self.now = self.now.max(when);
        Some(event)
    }

    pub(crate) fn send(
        &mut self,
        from: usize,
        to: usize,
        process: u64,
        message: Message,
        within: u64,
    ) -> u64 {
        self.order += 1;
        let (id, now) = (self.order, self.now);
        self.calls.insert(id, Call { from, to, process, message, reply: None, done: None, waker: None });
        self.at(now + within, Event::GiveUp(id));
        self.carry(from, to, Event::Arrive(id));
        id
    }

    fn carry(&mut self, from: usize, to: usize, event: Event) {
        let now = self.now;
        let is_cut = self.cut.get(&(from, to)).is_some_and(|until| now < *until);
        let leaves = self.stalled.get(&(from, to)).map_or(now, |until| now.max(*until));
        let copies = 1 + u64::from(self.rng.chance(self.doubles));
        for _ in 0..copies {
            let delay = self.rng.between(self.delay.0, self.delay.1);
            if !is_cut && !self.rng.chance(self.loss) {
                self.at(leaves + delay, event);
            }
        }
    }

    /// Sends the reply of a request that has been performed.
    pub(crate) fn reply(&mut self, id: u64, message: Message) {
        let now = self.now;
        let Some(call) = self.calls.get_mut(&id) else { return };
        let (from, to) = (call.from, call.to);
        call.reply.get_or_insert((message, now));
        self.carry(to, from, Event::Reply(id));
    }

    /// Completes a request with its reply or a timeout.
    pub(crate) fn end(&mut self, id: u64, is_reply: bool) {
        let Some(call) = self.calls.get_mut(&id).filter(|call| call.done.is_none()) else { return };
        call.done = match (&call.reply, is_reply) {
            (Some(reply), true) => Some(Ok(reply.clone())),
            (None, true) => return,
            (_, false) => Some(Err(StoreError::Timeout)),
        };
        if let Some(waker) = call.waker.take() {
            waker.wake();
        }
    }
}

/// A reply that has not come.
pub(crate) struct Waiting {
    pub(crate) world: Shared,
    pub(crate) id: u64,
}

impl Future for Waiting {
    type Output = Result<Message, StoreError>;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut world = self.world.lock();
        let Some(call) = world.calls.get_mut(&self.id) else { return Poll::Ready(Err(StoreError::Timeout)) };
        match call.done.clone() {
            None => {
                call.waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(Err(error)) => Poll::Ready(Err(error)),
            Some(Ok((message, at))) => {
                DECIDED.with(|decided| decided.set(Some(at)));
                Poll::Ready(Ok(message))
            }
        }
    }
}

/// The links of one cell.
#[derive(Clone)]
pub(crate) struct SimLinks {
    pub(crate) world: Shared,
    pub(crate) own: usize,
    pub(crate) process: u64,
}

impl SimLinks {
    /// Returns the cell that a peer's index stands for.
    pub(crate) const fn cell(&self, peer: usize) -> usize {
        if peer < self.own { peer } else { peer + 1 }
    }

    pub(crate) fn call(&self, peer: usize, message: Message, within: u64) -> Waiting {
        let id = self.world.lock().send(self.own, self.cell(peer), self.process, message, within);
        Waiting { world: self.world.clone(), id }
    }
}

impl Transport for SimLinks {
    async fn charge(
        &self,
        peer: usize,
        charges: Vec<SentCharge>,
        _: Vec<CounterId>,
    ) -> Result<Outcomes, StoreError> {
        match self.call(peer, Message::Charge(charges), DEADLINE).await? {
            Message::Outcomes(outcomes) => Ok(outcomes),
            other => Err(StoreError::Unavailable(format!("{other:?}"))),
        }
    }

    async fn send(&self, peer: usize, message: Message, _: Vec<CounterId>) -> Result<(), StoreError> {
        match self.call(peer, message, DEADLINE).await? {
            Message::Failed(why) => Err(StoreError::Unavailable(why)),
            _ => Ok(()),
        }
    }

    fn post(&self, peer: usize, message: Message) {
        drop(self.call(peer, message, DEADLINE));
    }
}

/// A cell's own clock, with an arbitrary offset and a small drift.
#[derive(Clone)]
pub(crate) struct CellClock {
    pub(crate) world: Shared,
    pub(crate) offset: u64,
    /// Drift in parts per million.
    pub(crate) drift: i64,
    /// For how long it has stood still.
    pub(crate) stood_still: Arc<AtomicU64>,
}

impl Clock for CellClock {
    fn now(&self) -> Timestamp {
        let now = i128::from(self.world.lock().now);
        let drifted = now + now % 1_000_000_000_000 * i128::from(self.drift) / 1_000_000;
        let stood_still = self.stood_still.load(Ordering::Relaxed);
        Timestamp::from_micros(u64::try_from(drifted).unwrap_or(0) + self.offset - stood_still)
    }
}
