//! The place of a request among those in flight to an upstream.
//!
//! A permit is handed through several futures, so its body has a place of its own, which the thread that drops it keeps for its
//! next request: copying a permit right after it was written took a third of the time of passing a gate.

use super::{WorkerGate, known};
use crate::upstream_meters::MeteredRequest;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::oneshot;
use tollgate_overload::{Admitted, Ended, Ticket};

/// A request's place among those in flight to an upstream, where the rules limit or measure them. Dropping it gives the place
/// to the next request.
pub struct WorkerPermit(
    /// Present until it is dropped.
    Option<Box<Body>>,
);

/// A request in flight.
pub(super) struct Body {
    /// None where requests in flight are measured, not limited.
    pub(super) gate: Option<Arc<WorkerGate>>,
    /// Its place under the limit of the gate; none while it is given back.
    ticket: Option<Ticket>,
    is_paused: bool,
    /// Whether it may use the reserve; known while it is paused.
    is_patient: bool,
    /// Where it gets its place again, if it waits for that; none unless it is paused.
    returning: Option<oneshot::Receiver<WorkerPermit>>,
    ended: Ended,
    would_be_shed: Option<Box<str>>,
    metered: Option<MeteredRequest>,
}

impl Body {
    pub(super) fn new(gate: Option<Arc<WorkerGate>>) -> Box<Self> {
        Box::new(Self {
            gate,
            ticket: None,
            is_paused: false,
            is_patient: false,
            returning: None,
            ended: Ended::Abandoned,
            would_be_shed: None,
            metered: None,
        })
    }

    /// Measures the request again.
    fn resumed(&mut self) {
        if let Some(metered) = &mut self.metered {
            metered.resume();
        }
    }

    /// Frees the place and gives it to the next request. Returns whether it had one.
    #[inline]
    fn leave(&mut self, ended: Ended) -> bool {
        let (Some(gate), true) = (&self.gate, self.ticket.is_some()) else { return false };
        if let Some(admitted) = gate.gate.leave_at(&mut self.ticket, || gate.clock.now(), ended) {
            hand_over(gate, admitted);
        }
        true
    }
}

impl fmt::Debug for WorkerPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.0.as_ref().map(|body| body.ended);
        f.debug_struct("WorkerPermit").field("ended", &ended).finish_non_exhaustive()
    }
}

impl WorkerPermit {
    #[inline]
    pub(super) fn new(mut body: Box<Body>, ticket: Ticket) -> Self {
        body.ticket = Some(ticket);
        Self(Some(body))
    }

    /// Creates one of a request that passed only because of the shadow mode.
    #[cold]
    pub(super) fn shadowed(mut body: Box<Body>, ticket: Ticket, reason: String) -> Self {
        body.would_be_shed = Some(reason.into());
        Self::new(body, ticket)
    }

    /// Creates one where requests in flight are not limited.
    pub(super) fn unlimited() -> Self {
        Self(Some(known::unlimited_body()))
    }

    /// Begins to measure the request.
    pub(super) fn measure(&mut self, request: MeteredRequest) {
        if let Some(body) = &mut self.0 {
            body.metered = Some(request);
        }
    }

    /// Returns why the request would have been shed but for shadow mode, for
    /// [`Check::with_reason`](crate::Check::with_reason).
    #[must_use]
    #[inline]
    pub fn would_be_shed(&self) -> Option<&str> {
        self.0.as_ref()?.would_be_shed.as_deref()
    }

    /// Sets how the request ended; without it, the request was abandoned. Call it with [`Ended::Completed`] when the head
    /// of the response arrives: the time until then is the upstream's latency; with [`Ended::Failed`] if it reports a
    /// failure.
    #[inline]
    pub fn ended(&mut self, ended: Ended) {
        let Some(body) = &mut self.0 else { return };
        let is_first = std::mem::replace(&mut body.ended, ended) != ended;
        if let (Some(gate), Some(ticket)) = (&body.gate, &body.ticket)
            && ended == Ended::Completed
            && is_first
        {
            gate.gate.measure_at(ticket, || gate.clock.now());
        }
        if let Some(metered) = &mut body.metered {
            metered.ended(ended);
        }
    }

    /// Gives the place back while the request waits for its client, not for the upstream: a client that sends its request or reads
    /// its response slowly takes no place meanwhile, and its slowness is not taken for the upstream's.
    pub fn pause(&mut self) {
        let Some(body) = &mut self.0 else { return };
        if let Some(ticket) = &body.ticket {
            body.is_patient = ticket.is_patient();
        }
        // Neither a latency nor an abandoned request: only the place is free.
        body.is_paused |= body.leave(Ended::Completed);
        // A place that came now would be held by a request that waits for its client.
        body.returning = None;
        if let Some(metered) = &mut body.metered {
            metered.pause();
        }
    }

    /// Takes the place again whether or not one is free, because the upstream is at work on the request's response.
    pub fn resume(&mut self) {
        let Some(body) = &mut self.0 else { return };
        if let Some(gate) = body.gate.as_ref().filter(|_| std::mem::replace(&mut body.is_paused, false)) {
            body.returning = None;
            body.ticket = Some(gate.gate.enter_again(body.is_patient, || gate.clock.now()));
        }
        body.resumed();
    }

    /// Takes the place again if one is free, because the upstream is to work on the request. Returns whether the request has
    /// one. The latency is measured from here.
    pub fn try_resume(&mut self) -> bool {
        let Some(body) = &mut self.0 else { return true };
        if let Some(gate) = body.gate.as_ref().filter(|_| body.is_paused) {
            body.ticket = gate.gate.try_enter_again(body.is_patient, || gate.clock.now());
            if body.ticket.is_none() {
                return false;
            }
            body.is_paused = false;
        }
        body.resumed();
        true
    }

    /// Takes the place again, as [`WorkerPermit::try_resume`]; waits until one is free. Requests that have not had a place yet
    /// wait behind.
    pub fn poll_resume(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.0.as_ref().is_none_or(|body| body.returning.is_none()) && self.try_resume() {
            return Poll::Ready(());
        }
        let Some(body) = &mut self.0 else { return Poll::Ready(()) };
        let Some(gate) = &body.gate else { return Poll::Ready(()) };
        if body.returning.is_none() {
            let (waiter, place) = oneshot::channel();
            body.returning = Some(place);
            gate.gate.wait_again(body.is_patient, waiter);
            hand_over(gate, gate.gate.admit_waiting(gate.clock.now()));
        }
        let Some(place) = &mut body.returning else { return Poll::Ready(()) };
        let Poll::Ready(given) = Pin::new(place).poll(cx) else { return Poll::Pending };
        body.returning = None;
        let ticket = given.ok().and_then(Self::take_ticket);
        let again = || gate.gate.enter_again(body.is_patient, || gate.clock.now());
        body.ticket = Some(ticket.unwrap_or_else(again));
        body.is_paused = false;
        body.resumed();
        Poll::Ready(())
    }

    /// Takes the place from a permit that was not received.
    fn take_ticket(mut self) -> Option<Ticket> {
        self.0.as_mut()?.ticket.take()
    }
}

impl Drop for WorkerPermit {
    #[inline]
    fn drop(&mut self) {
        let Some(mut body) = self.0.take() else { return };
        body.leave(body.ended);
        body.ended = Ended::Abandoned;
        if body.is_paused {
            (body.is_paused, body.returning) = (false, None);
        }
        if body.metered.is_some() || body.would_be_shed.is_some() {
            (body.metered, body.would_be_shed) = (None, None);
        }
        known::give_back(body);
    }
}

/// Gives free places to waiting requests. A request that has left meanwhile passes its place on, in a loop and not by
/// dropping the permit, because thousands may have left at once.
#[cold]
pub(super) fn hand_over(gate: &Arc<WorkerGate>, admitted: Admitted<oneshot::Sender<WorkerPermit>>) {
    let mut admitted: Vec<_> = admitted.into_iter().collect();
    while let Some((waiter, ticket)) = admitted.pop() {
        let permit = WorkerPermit::new(Body::new(Some(Arc::clone(gate))), ticket);
        if let Err(returned) = waiter.send(permit)
            && let Some(ticket) = returned.take_ticket()
        {
            admitted.extend(gate.gate.leave(ticket, gate.clock.now(), Ended::Abandoned));
        }
    }
}
