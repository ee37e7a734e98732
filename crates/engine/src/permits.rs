//! Concurrency permits and delay-queue entries held by a request in flight.
//!
//! For integrations that see a request end (a gateway, a layer): they release what it holds when the response is
//! complete, the request fails or the client disconnects. Unlike reservations, nothing is stored here: dropping
//! [`HeldPermits`] without a release leaves its permits to expire at their deadline, as when a process dies.

use crate::check::Check;
use crate::consumption::ReservedConsumption;
use crate::decision::{Decision, DecisionDetails, LimitStatus};
use crate::fallback::TryCharge;
use crate::in_flight::InFlightGuard;
use crate::limiter::Limiter;
use crate::reservation::{ReservedCharge, Settlement, reserved_charges};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, Permit, PermitId, Rate,
    StoreError, TimeDelta, Timestamp,
};
use tollgate_rules::{MatchedLimit, Plan};

/// Most permits that a limit may have.
const MAX_PERMITS: u64 = 100_000;

/// Permits and charges that an allowed request holds.
#[derive(Clone)]
pub struct HeldPermits {
    id: PermitId,
    charges: Vec<ReservedCharge>,
    /// What is billed for a request that may still be canceled.
    consumed: Vec<ReservedConsumption>,
    /// Counts the request as in flight.
    _in_flight: Option<Arc<InFlightGuard>>,
}

impl std::fmt::Debug for HeldPermits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldPermits").field("id", &self.id).field("counters", &self.charges.len()).finish()
    }
}

/// Reason for a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReason {
    /// The request completed or failed: its permits are released.
    Completed,
    /// The request was canceled before its delay ended: everything is refunded.
    Canceled,
}

/// The rest of a release that must wait for the store.
pub type ReleaseFuture = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

impl HeldPermits {
    /// Returns the time after which the permits expire unless they are renewed; `None` if there are no permits.
    #[must_use]
    pub fn expires_after(&self) -> Option<TimeDelta> {
        self.permits().map(|reserved| reserved.record.limit.rate().period.length()).min()
    }

    fn permits(&self) -> impl Iterator<Item = &ReservedCharge> {
        self.charges.iter().filter(|reserved| reserved.record.limit.algorithm() == Algorithm::Concurrency)
    }

    /// Adds its permits of a counter to a fallback counter.
    pub(crate) fn copy_permits(&self, fallback: &dyn TryCharge, counter: &CounterKey<'_>) {
        for reserved in self.permits().filter(|reserved| reserved.record.scope.id() == counter.scope.id()) {
            let parts = reserved.record.parts();
            if parts == counter.parts {
                let limit = unbounded(&reserved.record.limit);
                let charge = reserved.record.charge(&parts, Cost::new(reserved.record.units));
                fallback.try_debit(&Charge { permit: self.id, limit: &limit, ..charge });
            }
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Decides like [`Limiter::check`], and returns what must be released: permits, or a delay-queue entry. Most
    /// requests hold nothing.
    #[inline]
    pub async fn admit(&self, check: &Check<'_>) -> (Decision, Option<HeldPermits>) {
        let asked = self.clock.now();
        let mut held = None;
        let keep = |plan: &Plan<'_>, details: &DecisionDetails| held = self.hold(plan, details, asked);
        let decision = self.decide(check, |drawn| PermitId(drawn.id().0), keep).await;
        if let Some(held) = held.as_mut().filter(|_| decision.delay() > TimeDelta::ZERO) {
            held.consumed = self.reserved_consumption(check, &decision);
        }
        (decision, held)
    }

    #[inline]
    fn hold(&self, plan: &Plan<'_>, details: &DecisionDetails, asked: Timestamp) -> Option<HeldPermits> {
        let is_permit = |(matched, status): &(&MatchedLimit<'_>, &LimitStatus)| {
            matched.limit.limit.algorithm() == Algorithm::Concurrency && status.outcome.verdict.is_allowed()
        };
        let permits = plan.limits.iter().zip(&details.limits).filter(is_permit);
        let has_permit = || permits.clone().next().is_some() || holds_guarantee(plan);
        if !details.is_allowed() || (details.delay() == TimeDelta::ZERO && !has_permit()) {
            return None;
        }
        let is_shedding = |matched: &MatchedLimit<'_>| matched.rule.is_some_and(|rule| rule.is_shedding);
        let fleet = permits.clone().any(|(matched, _)| is_shedding(matched)).then(|| self.fleet_place(plan));
        // A request's permits of the fleet are one place: in its capacity, below each reserve, and in a guarantee.
        let mut is_in_fleet = false;
        let rules = permits.filter_map(|(matched, _)| {
            let rule = matched.rule?;
            let is_repeated = rule.is_shedding && std::mem::replace(&mut is_in_fleet, true);
            (!is_repeated).then_some(rule.name.as_str())
        });
        Some(HeldPermits {
            id: PermitId(details.id().0),
            charges: reserved_charges(plan, details, asked),
            consumed: Vec::new(),
            _in_flight: self.in_flight.enter(rules, fleet.flatten()),
        })
    }

    /// Releases the permits of a request that has ended.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not release them; they expire at their deadline.
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
        // The request may have been admitted while the store was unavailable.
        if let Some(fallback) = &self.fallback {
            fallback.try_release(&permits);
        }
        let released = self.store.release(&permits).await;
        self.fleet_shares.on_released(&permits);
        released
    }

    /// Refunds everything that has not been refilled over time, for a client that disconnected before its delay ended.
    /// The delay-queue entry itself is refunded in full.
    ///
    /// # Errors
    /// [`StoreError`] if the store did not apply the refund.
    pub async fn cancel_held(&self, held: &HeldPermits) -> Result<(), StoreError> {
        self.correct_consumption(&held.consumed, Settlement::Canceled);
        let mut charges = held.charges.clone();
        self.move_counters(&mut charges, held.id, Settlement::Canceled, self.clock.now()).await
    }

    /// Releases what a request held, for guards that are dropped. In memory this completes immediately, and the next
    /// request can use the free slot; if the store must be awaited, the rest is returned as a future for the caller to
    /// run.
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
            // Returned to the caller, which can log the store's error.
            Poll::Ready(Err(error)) => Some(Box::pin(std::future::ready(Err(error)))),
            Poll::Pending => Some(giving),
        }
    }

    /// Extends the permits' deadline while the request is in flight. A store that has lost them counts them again, whatever others hold: a
    /// request within a guarantee is in flight although the capacity is in use.
    ///
    /// # Errors
    /// [`StoreError`] if the store was unavailable.
    pub async fn renew(&self, held: &HeldPermits) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = held.permits().map(|reserved| reserved.record.parts()).collect();
        let limits: Vec<Limit> = held.permits().map(|reserved| unbounded(&reserved.record.limit)).collect();
        let charges: Vec<Charge<'_>> = (held.permits().zip(&parts).zip(&limits))
            .map(|((reserved, parts), limit)| {
                let record = &reserved.record;
                Charge { permit: held.id, limit, ..record.charge(parts, Cost::new(record.units)) }
            })
            .collect();
        if charges.is_empty() {
            return Ok(());
        }
        // The next outage of the store may last longer than the permits.
        if let Some(fallback) = &self.fallback {
            charges.iter().for_each(|charge| fallback.try_debit(charge));
        }
        self.store.charge(&charges).await.map(|_| ())
    }
}

/// Returns the limit of permits that are held already: they count, whatever others hold.
fn unbounded(limit: &Limit) -> Limit {
    let rate = Rate { count: MAX_PERMITS, period: limit.rate().period.clone() };
    LimitSpec::new(Algorithm::Concurrency, rate).build().unwrap_or_else(|_| limit.clone())
}

/// Returns whether the request holds a place of a guarantee.
fn holds_guarantee(plan: &Plan<'_>) -> bool {
    let held = plan.held_guarantee();
    held.is_some_and(|(matched, _)| matched.limit.limit.algorithm() == Algorithm::Concurrency)
}
