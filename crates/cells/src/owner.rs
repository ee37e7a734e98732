//! The remote store: counters that other cells own, charged over links. For `region: leased` leases wrap it.
//!
//! A request whose counters have several owners is charged at all of them at once, and undone where it was admitted if
//! one denies or fails; the undo is sent without waiting. What an owner that does not answer in time may still charge
//! is a late charge, as with any store.

use crate::charge_codec::SentCharge;
use crate::last_outcomes::LastOutcomes;
use crate::members::{Decider, Members};
use crate::message::Message;
use futures_util::future::join_all;
use std::future::Future;
use std::sync::Arc;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterId, CounterStore, Enforcement, LastKnown, Outcome, Outcomes,
    Permit, StoreError, UnitReturn,
};

/// Carries requests to other cells.
pub trait Transport: Send + Sync {
    /// Charges a request at a peer, within the deadline. `ids` are the counters as the caller names them, for what the
    /// peer charges after the deadline.
    fn charge(
        &self,
        peer: usize,
        charges: Vec<SentCharge>,
        ids: Vec<CounterId>,
    ) -> impl Future<Output = Result<Outcomes, StoreError>> + Send;

    /// Sends a request that returns nothing. `ids` are the counters of a debit, as with [`Self::charge`].
    fn send(
        &self,
        peer: usize,
        message: Message,
        ids: Vec<CounterId>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Sends a request without waiting for it to be performed.
    fn post(&self, peer: usize, message: Message);
}

impl<T: Transport + ?Sized> Transport for Arc<T> {
    async fn charge(
        &self,
        peer: usize,
        charges: Vec<SentCharge>,
        ids: Vec<CounterId>,
    ) -> Result<Outcomes, StoreError> {
        (**self).charge(peer, charges, ids).await
    }

    async fn send(&self, peer: usize, message: Message, ids: Vec<CounterId>) -> Result<(), StoreError> {
        (**self).send(peer, message, ids).await
    }

    fn post(&self, peer: usize, message: Message) {
        (**self).post(peer, message);
    }
}

/// Counters that other cells own.
pub struct OwnerStore<T, C> {
    members: Arc<Members>,
    transport: T,
    clock: C,
    last: Arc<LastOutcomes>,
}

impl<T: Clone, C: Clone> Clone for OwnerStore<T, C> {
    fn clone(&self) -> Self {
        Self {
            members: Arc::clone(&self.members),
            transport: self.transport.clone(),
            clock: self.clock.clone(),
            last: Arc::clone(&self.last),
        }
    }
}

/// Charges of one owner: the peer, and their indexes in the request.
type Part = (usize, Vec<usize>);

impl<T: Transport, C: Clock> OwnerStore<T, C> {
    /// Creates the store.
    pub fn new(members: Arc<Members>, transport: T, clock: C) -> Self {
        Self { members, transport, clock, last: Arc::default() }
    }

    /// Groups charges by owner. Those without a living owner are in the second list, with the reason.
    fn parts<'c>(
        &self,
        keys: impl Iterator<Item = &'c tollgate_core::CounterKey<'c>>,
    ) -> (Vec<Part>, Vec<usize>, &'static str) {
        let now = self.clock.now();
        let (mut parts, mut nobody, mut why): (Vec<Part>, Vec<usize>, &str) = (Vec::new(), Vec::new(), "");
        for (at, key) in keys.enumerate() {
            match self.members.decider(key, now) {
                Decider::Peer(peer) => match parts.iter_mut().find(|(known, _)| *known == peer) {
                    Some((_, part)) => part.push(at),
                    None => parts.push((peer, vec![at])),
                },
                // The owner has changed since this cell looked: the request is decided again with the new one.
                Decider::Own => {
                    nobody.push(at);
                    why = "the owner has just changed";
                }
                Decider::Nobody(reason) => {
                    nobody.push(at);
                    why = reason;
                }
            }
        }
        (parts, nobody, why)
    }

    /// Undoes charges that owners have applied. If a message is lost, the units recover with time: on the safe side.
    pub(crate) fn undo(&self, charges: &[&Charge<'_>]) {
        let (parts, _, _) = self.parts(charges.iter().map(|charge| &charge.key));
        for (peer, part) in parts {
            let part: Vec<SentCharge> = part.into_iter().map(|at| SentCharge::new(charges[at])).collect();
            undoing(&part).into_iter().for_each(|message| self.transport.post(peer, message));
        }
    }

    async fn send_by_owner(
        &self,
        charges: &[Charge<'_>],
        message: impl Fn(Vec<SentCharge>) -> Message,
    ) -> Result<(), StoreError> {
        let (parts, failed, why) = self.parts(charges.iter().map(|charge| &charge.key));
        let mut errors = Vec::new();
        if !failed.is_empty() {
            errors.push((failed, StoreError::Unavailable(why.to_owned())));
        }
        let sends = parts.iter().map(|(peer, part)| {
            let sent = part.iter().map(|at| SentCharge::new(&charges[*at])).collect();
            let ids = part.iter().map(|at| charges[*at].key.id()).collect();
            self.transport.send(*peer, message(sent), ids)
        });
        for ((_, part), sent) in parts.iter().zip(join_all(sends).await) {
            errors.extend(sent.err().map(|error| (part.to_vec(), error)));
        }
        // What other owners have applied is not sent again.
        StoreError::of_debits(errors, charges.len())
    }
}

impl<T: Transport, C: Clock> CounterStore for OwnerStore<T, C> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let (parts, mut failed, why) = self.parts(charges.iter().map(|charge| &charge.key));
        let mut causes = Vec::new();
        if !failed.is_empty() {
            causes.push(StoreError::Unavailable(why.to_owned()));
            // Nothing is charged for a request that cannot be decided as a whole.
            return Err(partial(failed, causes, charges.len()));
        }
        // Of alternatives one must fit, wherever it is: each owner applies those that fit, and they are undone if none
        // does.
        let is_single = parts.len() == 1;
        let enforcement = |charge: &Charge<'_>| match charge.enforcement {
            Enforcement::Alternative if !is_single => Enforcement::Independent,
            other => other,
        };
        let calls = parts.iter().map(|(peer, part)| {
            let sent = |at: &usize| {
                let charge = &charges[*at];
                SentCharge::new(&Charge { enforcement: enforcement(charge), ..*charge })
            };
            let ids = part.iter().map(|at| charges[*at].key.id()).collect();
            self.transport.charge(*peer, part.iter().map(sent).collect(), ids)
        });
        let answers = join_all(calls).await;
        let mut per_charge = vec![Outcome::UNKNOWN; charges.len()];
        let (mut at, mut charged) = (tollgate_core::Timestamp::ZERO, Vec::new());
        for ((peer, part), answer) in parts.iter().zip(answers) {
            match answer {
                Ok(outcomes) if outcomes.per_charge.len() == part.len() => {
                    at = at.max(outcomes.at);
                    part.iter()
                        .zip(&outcomes.per_charge)
                        .for_each(|(at, outcome)| per_charge[*at] = *outcome);
                    charged.push((*peer, part, outcomes));
                }
                Ok(_) => {
                    failed.extend(part);
                    causes.push(StoreError::Unavailable("another cell sent a malformed answer".to_owned()));
                }
                Err(error) => {
                    failed.extend(part);
                    causes.push(error);
                }
            }
        }
        let pairs = charges.iter().map(|charge| charge.enforcement).zip(&per_charge);
        let admission = Outcomes::admission(pairs);
        if !failed.is_empty() || admission == Admission::Denied {
            // After a failure the request is charged again without what failed, after a denial what is only counted
            // stays.
            let is_undone =
                |at: &usize| !failed.is_empty() || charges[*at].enforcement != Enforcement::Independent;
            for (peer, part, outcomes) in &charged {
                let applied = part.iter().zip(&outcomes.per_charge).filter(|(at, outcome)| {
                    is_applied(enforcement(&charges[**at]), outcome, outcomes.admission)
                });
                let undone: Vec<usize> = applied.map(|(at, _)| *at).filter(is_undone).collect();
                let sent: Vec<SentCharge> = undone.iter().map(|at| SentCharge::new(&charges[*at])).collect();
                undoing(&sent).into_iter().for_each(|message| self.transport.post(*peer, message));
                for at in undone {
                    per_charge[at] = without(&charges[at], per_charge[at]);
                }
            }
        }
        let now = self.clock.now();
        for (charge, outcome) in charges.iter().zip(&per_charge) {
            self.last.set(charge, outcome, now);
        }
        if failed.is_empty() {
            return Ok(Outcomes { admission, at, per_charge: per_charge.into_iter().collect() });
        }
        failed.sort_unstable();
        Err(partial(failed, causes, charges.len()))
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.send_by_owner(charges, Message::Debit).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        let charges: Vec<Charge<'_>> = permits
            .iter()
            .map(|permit| Charge { permit: permit.id, ..Charge::new(permit.key, permit.limit, Cost::ONE) })
            .collect();
        self.send_by_owner(&charges, Message::Release).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let Decider::Peer(peer) = self.members.decider(&back.key, self.clock.now()) else { return Ok(()) };
        let units = Box::new(SentCharge::new(&Charge::new(back.key, back.limit, Cost::new(back.units))));
        let message = Message::Return { units, taken_at: back.taken_at, full_at: back.full_at, id: back.id };
        self.transport.send(peer, message, vec![back.key.id()]).await
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        self.last.get(charge, self.clock.now())
    }
}

/// Returns whether a charge of a request was applied where it was sent with this enforcement.
pub(crate) fn is_applied(enforcement: Enforcement, outcome: &Outcome, admission: Admission) -> bool {
    outcome.verdict.is_allowed()
        && (admission == Admission::Admitted || enforcement == Enforcement::Independent)
}

/// Returns the messages that undo charges which an owner has applied.
pub(crate) fn undoing(applied: &[SentCharge]) -> Vec<Message> {
    let is_held = |charge: &&SentCharge| charge.counter.limit.is_released(charge.permit);
    let (held, spent): (Vec<&SentCharge>, Vec<&SentCharge>) =
        applied.iter().filter(|charge| !charge.cost.is_peek()).partition(is_held);
    let mut messages = Vec::new();
    if !spent.is_empty() {
        messages.push(Message::Debit(spent.into_iter().map(SentCharge::negated).collect()));
    }
    if !held.is_empty() {
        messages.push(Message::Release(held.into_iter().cloned().collect()));
    }
    messages
}

/// Returns the error of charges that could not be decided.
fn partial(failed: Vec<usize>, mut causes: Vec<StoreError>, all: usize) -> StoreError {
    let cause = match causes.len() {
        1 => causes.remove(0),
        _ => StoreError::Several(causes),
    };
    if failed.len() == all { cause } else { StoreError::Partial { failed, cause: Box::new(cause) } }
}

/// Returns what remains of a limit without a charge that was undone.
pub(crate) fn without(charge: &Charge<'_>, outcome: Outcome) -> Outcome {
    if !outcome.verdict.is_allowed() || charge.cost.is_refund() {
        return outcome;
    }
    let remaining = outcome.remaining.saturating_add(charge.cost.units()).min(charge.limit.capacity());
    outcome.with_remaining(remaining)
}
