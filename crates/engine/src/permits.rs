//! Concurrency permits and delay-queue entries held by a request in flight.
//!
//! For those who stand in a request's way and see it end (a gateway, a layer): they give back what it holds when it has
//! been answered, has failed, or its caller has left. Nothing is remembered here, unlike reservations: who drops a
//! [`Held`] without a word leaves its permits to their deadline, as a process that dies does.

use crate::check::Check;
use crate::decision::{Decision, DecisionDetails, LimitStatus};
use crate::decision_id::DecisionId;
use crate::in_flight::InFlightGuard;
use crate::limiter::Limiter;
use crate::reservation::{ReservedCharge, Settlement, reserved_charges};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tollgate_core::{
    Algorithm, Charge, CounterStore, KeyPart, Permit, PermitId, StoreError, TimeDelta, Timestamp,
};
use tollgate_rules::{MatchedLimit, Plan};

/// What an allowed request holds.
#[derive(Clone)]
pub struct HeldPermits {
    id: PermitId,
    charges: Vec<ReservedCharge>,
    /// Counts it among those under way.
    _in_flight: Option<Arc<InFlightGuard>>,
}

impl std::fmt::Debug for HeldPermits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldPermits").field("id", &self.id).field("counters", &self.charges.len()).finish()
    }
}

/// How a request came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// It was carried out, or failed: its permits come back.
    Completed,
    /// Its turn never came: everything comes back.
    Canceled,
}

/// What is left to do when a store has to be waited for.
pub type ReleaseFuture = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

impl HeldPermits {
    /// After how long its permits lapse unless they are renewed; nothing, where it has none.
    #[must_use]
    pub fn expires_after(&self) -> Option<TimeDelta> {
        self.permits().map(|reserved| reserved.record.limit.rate().period.length()).min()
    }

    fn permits(&self) -> impl Iterator<Item = &ReservedCharge> {
        self.charges.iter().filter(|reserved| reserved.record.limit.algorithm() == Algorithm::Concurrency)
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Decides like [`Limiter::check`], and hands over what must be given back: permits, or a place in a queue. Most
    /// requests hold nothing.
    #[inline]
    pub async fn admit(&self, check: &Check<'_>) -> (Decision, Option<HeldPermits>) {
        let (id, asked) = (DecisionId::generate(), self.clock.now());
        let mut held = None;
        let keep = |plan: &Plan<'_>, details: &DecisionDetails| {
            held = self.hold(plan, details, PermitId(id.0), asked);
        };
        let decision = self.decide(check, id, keep).await;
        (decision, held)
    }

    #[inline]
    fn hold(
        &self,
        plan: &Plan<'_>,
        details: &DecisionDetails,
        id: PermitId,
        asked: Timestamp,
    ) -> Option<HeldPermits> {
        let is_permit = |(matched, status): &(&MatchedLimit<'_>, &LimitStatus)| {
            matched.limit.limit.algorithm() == Algorithm::Concurrency && status.outcome.verdict.is_allowed()
        };
        let permits = plan.limits.iter().zip(&details.limits).filter(is_permit);
        if !details.is_allowed() || (details.delay() == TimeDelta::ZERO && permits.clone().next().is_none()) {
            return None;
        }
        let rules = permits.filter_map(|(matched, _)| matched.rule.map(|rule| rule.name.as_str()));
        Some(HeldPermits {
            id,
            charges: reserved_charges(plan, details, asked),
            _in_flight: self.in_flight.enter(rules),
        })
    }

    /// Gives permits back: the request has ended.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not take them; they lapse at their deadline.
    pub async fn release(&self, held: &HeldPermits) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = held.permits().map(|reserved| reserved.record.parts()).collect();
        let permits: Vec<Permit<'_>> = held
            .permits()
            .zip(&parts)
            .map(|(reserved, parts)| {
                let record = &reserved.record;
                Permit { key: record.key(parts), limit: &record.limit, id: held.id }
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
    pub async fn cancel_held(&self, held: &HeldPermits) -> Result<(), StoreError> {
        self.move_counters(&held.charges, DecisionId(held.id.0), Settlement::Canceled).await
    }

    /// Gives back what a request held, for guards that are dropped. In memory that is done at once, and the next request
    /// finds the place free; over a store that has to be waited for, the rest is handed over to be run.
    pub fn start_release(
        self: &Arc<Self>,
        held: &Arc<HeldPermits>,
        ending: ReleaseReason,
    ) -> Option<ReleaseFuture>
    where
        S: 'static,
    {
        let (limiter, held) = (Arc::clone(self), Arc::clone(held));
        let mut giving: ReleaseFuture = Box::pin(async move {
            match ending {
                ReleaseReason::Completed => limiter.release(&held).await,
                ReleaseReason::Canceled => limiter.cancel_held(&held).await,
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
    pub async fn renew(&self, held: &HeldPermits) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = held.permits().map(|reserved| reserved.record.parts()).collect();
        let charges: Vec<Charge<'_>> = held
            .permits()
            .zip(&parts)
            .map(|(reserved, parts)| {
                let record = &reserved.record;
                let cost = tollgate_core::Cost::new(record.units);
                Charge { permit: held.id, ..record.charge(parts, cost) }
            })
            .collect();
        if charges.is_empty() { Ok(()) } else { self.store.charge(&charges).await.map(|_| ()) }
    }
}
