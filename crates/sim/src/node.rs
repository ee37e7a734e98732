//! A simulated node: the real engine and the real leases, over a link to the simulated store.

use crate::Bug;
use crate::authority::{Request, SentCharge};
use crate::world::{Records, Shared};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tollgate_core::{
    Charge, Clock, Cost, CounterStore, Outcomes, Permit, RecordStore, StoreError, Timestamp, UnitReturn,
};
use tollgate_engine::Limiter;
use tollgate_rules::Ruleset;
use tollgate_store::{LeaseConfig, LeasedStore, MemoryConfig, MemoryStore};

thread_local! {
    /// When the store decided the response that the running task has just received.
    static DECIDED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Takes the time at which the store decided the last response, if there was one.
pub(crate) fn decided() -> Option<u64> {
    DECIDED.with(Cell::take)
}

/// A node's own clock, with an arbitrary offset and a small drift.
#[derive(Clone)]
pub(crate) struct NodeClock {
    world: Shared,
    offset: u64,
    /// Drift in parts per million.
    drift: i64,
    frozen: bool,
}

impl Clock for NodeClock {
    fn now(&self) -> Timestamp {
        if self.frozen {
            return Timestamp::from_micros(self.offset);
        }
        let now = self.world.lock().now;
        let drifted = i128::from(now) * i128::from(1_000_000 + self.drift) / 1_000_000;
        Timestamp::from_micros(u64::try_from(drifted).unwrap_or(0) + self.offset)
    }
}

/// A node's link to the store.
#[derive(Clone)]
pub(crate) struct Link {
    world: Shared,
    node: usize,
}

struct Waiting {
    world: Shared,
    id: u64,
}

impl Future for Waiting {
    type Output = Result<Outcomes, StoreError>;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.world.lock().done(self.id, context.waker()) {
            None => Poll::Pending,
            Some(Err(error)) => Poll::Ready(Err(error)),
            Some(Ok((outcomes, at))) => {
                DECIDED.with(|decided| decided.set(Some(at)));
                Poll::Ready(Ok(outcomes))
            }
        }
    }
}

impl Link {
    fn send(&self, request: Request) -> Waiting {
        let id = self.world.lock().send(self.node, request);
        Waiting { world: self.world.clone(), id }
    }
}

impl CounterStore for Link {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.send(Request::Charge(charges.iter().map(SentCharge::charge).collect())).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.send(Request::Debit(charges.iter().map(SentCharge::charge).collect())).await.map(|_| ())
    }

    async fn release(&self, _: &[Permit<'_>]) -> Result<(), StoreError> {
        Ok(())
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let what = Box::new(SentCharge::charge(&Charge::new(back.key, back.limit, Cost::new(back.units))));
        self.send(Request::ReturnUnits { what, taken: back.taken_at, full_at: back.full_at, id: back.id })
            .await
            .map(|_| ())
    }
}

/// Leases over a link.
pub(crate) type Store = LeasedStore<Link, Link, NodeClock>;

/// Starts a process on a node; a node that crashed gets a new one.
pub(crate) fn process(
    world: &Shared,
    node: usize,
    rules: &Arc<Ruleset>,
    config: &LeaseConfig,
    records: &Arc<Records>,
    bug: Option<Bug>,
) -> Arc<Limiter<Store>> {
    let (offset, drift) = {
        let mut world = world.lock();
        let drift = i64::try_from(world.rng.below(801)).unwrap_or(0) - 400;
        (world.rng.between(1_000_000_000, 2_000_000_000), drift)
    };
    let frozen = bug == Some(Bug::ForgetsTime);
    let clock = NodeClock { world: world.clone(), offset, drift, frozen };
    let link = Link { world: world.clone(), node };
    let store = LeasedStore::new(link.clone(), link, clock.clone(), config.clone());
    let time: Arc<dyn Clock> = Arc::new(clock);
    let fallback = MemoryStore::new(&MemoryConfig::with_bytes(MemoryConfig::MIN_BYTES), Arc::clone(&time));
    let limiter = Limiter::new(Arc::clone(rules), store, time)
        .with_shared_reservations(Arc::clone(records) as Arc<dyn RecordStore>);
    Arc::new(match fallback {
        Ok(fallback) => limiter.with_fallback(fallback),
        Err(_) => limiter,
    })
}
