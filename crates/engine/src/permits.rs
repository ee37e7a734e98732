//! What a request holds while it is under way: permits, and what it took for a turn that it is still waiting for.
//!
//! For those who stand in a request's way and see it end (a gateway, a layer): they give back what it holds when it has
//! been answered, has failed, or its caller has left. Nothing is remembered here, unlike reservations: who drops a
//! [`Held`] without a word leaves its permits to their deadline, as a process that dies does.

use crate::check::Check;
use crate::decision::{Answer, Decision, LimitStatus};
use crate::decision_id::DecisionId;
use crate::in_flight::Counted;
use crate::limiter::Limiter;
use crate::reservation::{Reserved, Settlement, holdings};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tollgate_core::{
    Algorithm, Charge, CounterStore, KeyPart, Permit, PermitId, StoreError, TimeDelta, Timestamp,
};
use tollgate_rules::{Hit, Plan};

/// What an allowed request holds.
#[derive(Clone)]
pub struct Held {
    id: PermitId,
    holdings: Vec<Reserved>,
    /// Counts it among those under way.
    _counted: Option<Arc<Counted>>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("id", &self.id).field("counters", &self.holdings.len()).finish()
    }
}

/// How a request came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was carried out, or failed: its permits come back.
    Over,
    /// Its turn never came: everything comes back.
    Withdrawn,
}

/// What is left to do when a store has to be waited for.
pub type GivingBack = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

impl Held {
    /// After how long its permits lapse unless they are renewed; nothing, where it has none.
    #[must_use]
    pub fn lapses_after(&self) -> Option<TimeDelta> {
        self.permits().map(|reserved| reserved.holding.limit.rate().period.length()).min()
    }

    fn permits(&self) -> impl Iterator<Item = &Reserved> {
        self.holdings.iter().filter(|reserved| reserved.holding.limit.algorithm() == Algorithm::Concurrency)
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Decides like [`Limiter::check`], and hands over what must be given back: permits, or a place in a queue. Most
    /// requests hold nothing.
    #[inline]
    pub async fn admit(&self, check: &Check<'_>) -> (Decision, Option<Held>) {
        let (id, asked) = (DecisionId::fresh(), self.clock.now());
        let mut held = None;
        let keep = |plan: &Plan<'_>, answer: &Answer| held = self.held(plan, answer, PermitId(id.0), asked);
        let decision = self.decide(check, id, keep).await;
        (decision, held)
    }

    #[inline]
    fn held(&self, plan: &Plan<'_>, answer: &Answer, id: PermitId, asked: Timestamp) -> Option<Held> {
        let is_permit = |(hit, status): &(&Hit<'_>, &LimitStatus)| {
            hit.limit.limit.algorithm() == Algorithm::Concurrency && status.outcome.verdict.is_allowed()
        };
        let permits = plan.hits.iter().zip(&answer.limits).filter(is_permit);
        if !answer.is_allowed() || (answer.delay() == TimeDelta::ZERO && permits.clone().next().is_none()) {
            return None;
        }
        let rules = permits.filter_map(|(hit, _)| hit.rule.map(|rule| rule.name.as_str()));
        Some(Held { id, holdings: holdings(plan, answer, asked), _counted: self.in_flight.enter(rules) })
    }

    /// Gives permits back: the request has ended.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not take them; they lapse at their deadline.
    pub async fn release(&self, held: &Held) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = held.permits().map(|reserved| reserved.holding.parts()).collect();
        let permits: Vec<Permit<'_>> = held
            .permits()
            .zip(&parts)
            .map(|(reserved, parts)| {
                let holding = &reserved.holding;
                Permit { key: holding.key(parts), limit: &holding.limit, id: held.id }
            })
            .collect();
        if permits.is_empty() {
            return Ok(());
        }
        // It may have been admitted while the store was unavailable.
        if let Some(fallback) = &self.fallback {
            fallback.try_release(&permits);
        }
        self.store.release(&permits).await
    }

    /// Gives everything back, as far as time has not: the caller left before its turn came. The turn itself comes back
    /// whole.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not take it.
    pub async fn withdraw(&self, held: &Held) -> Result<(), StoreError> {
        self.move_counters(&held.holdings, DecisionId(held.id.0), Settlement::Cancelled).await
    }

    /// Gives back what a request held, for guards that are dropped. In memory that is done at once, and the next request
    /// finds the place free; over a store that has to be waited for, the rest is handed over to be run.
    pub fn let_go(self: &Arc<Self>, held: &Arc<Held>, ending: Ending) -> Option<GivingBack>
    where
        S: 'static,
    {
        let (limiter, held) = (Arc::clone(self), Arc::clone(held));
        let mut giving: GivingBack = Box::pin(async move {
            match ending {
                Ending::Over => limiter.release(&held).await,
                Ending::Withdrawn => limiter.withdraw(&held).await,
            }
        });
        match giving.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(())) => None,
            // The error is the store's, and it is the caller who can log it.
            Poll::Ready(Err(error)) => Some(Box::pin(std::future::ready(Err(error)))),
            Poll::Pending => Some(giving),
        }
    }

    /// Puts the permits' deadline off: the request is still under way.
    ///
    /// # Errors
    /// [`StoreError`] if the store was not there.
    pub async fn renew(&self, held: &Held) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = held.permits().map(|reserved| reserved.holding.parts()).collect();
        let charges: Vec<Charge<'_>> = held
            .permits()
            .zip(&parts)
            .map(|(reserved, parts)| {
                let holding = &reserved.holding;
                let cost = tollgate_core::Cost::new(holding.units);
                Charge { permit: held.id, ..holding.charge(parts, cost) }
            })
            .collect();
        if charges.is_empty() { Ok(()) } else { self.store.charge(&charges).await.map(|_| ()) }
    }
}
