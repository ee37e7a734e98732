//! Requests in flight on each link.
//!
//! A request has a deadline. What the owner charges after it is a late charge: the caller keeps it, or it is undone.
//! The same holds for a request whose caller has left.

use crate::charge_codec::SentCharge;
use crate::message::{self, Message};
use crate::owner::{Transport, is_applied, undoing};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tollgate_core::{CounterId, LateAnswer, LateCharge, LateResponder, Outcome, Outcomes, StoreError};

/// Messages that wait to be written on one link.
pub(super) const QUEUE: usize = 4_096;
/// Requests in flight on one link, late ones included.
const MAX_IN_FLIGHT: usize = 65_536;

/// What a reply is for.
enum Waiter {
    Call { reply: oneshot::Sender<Message>, charged: Vec<SentCharge> },
    Late { responder: LateResponder, charged: Vec<SentCharge>, ids: Vec<CounterId> },
}

#[derive(Default)]
struct Link {
    queue: Mutex<Option<mpsc::Sender<Vec<u8>>>>,
    waiting: Mutex<HashMap<u64, Waiter>>,
}

/// The links to all peers.
pub struct Links {
    links: Vec<Link>,
    deadline: Duration,
    next: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unavailable(why: &str) -> StoreError {
    StoreError::Unavailable(why.to_owned())
}

/// Encodes a message, unless it is too long: the peer would end the link, and with it the requests of other callers.
fn encode(id: u64, message: &Message) -> Result<Vec<u8>, StoreError> {
    let bytes = message::encode(id, message);
    match bytes.len() <= message::PREFIX + message::MAX_MESSAGE {
        true => Ok(bytes),
        false => Err(unavailable("the request is too long for a message to another cell")),
    }
}

impl Links {
    /// Creates links to this many peers, none of them connected.
    #[must_use]
    pub fn new(peers: usize, deadline: Duration) -> Self {
        Self { links: (0..peers).map(|_| Link::default()).collect(), deadline, next: AtomicU64::new(1) }
    }

    /// Opens a link. Returns what must be written on it.
    pub(super) fn open(&self, peer: usize) -> mpsc::Receiver<Vec<u8>> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        *lock(&self.links[peer].queue) = Some(sender);
        receiver
    }

    /// Ends a link whose peer is gone.
    pub fn remove(&self, peer: usize) {
        self.close(peer);
    }

    /// Closes a link: every request in flight fails, and what it may have charged will never be known.
    pub(super) fn close(&self, peer: usize) {
        *lock(&self.links[peer].queue) = None;
        let waiting = std::mem::take(&mut *lock(&self.links[peer].waiting));
        for waiter in waiting.into_values() {
            if let Waiter::Late { responder, .. } = waiter {
                responder.answer(LateAnswer::Unknown, || {});
            }
        }
    }

    fn enqueue(&self, peer: usize, bytes: Vec<u8>) -> Result<(), StoreError> {
        let Some(queue) = lock(&self.links[peer].queue).clone() else {
            return Err(unavailable("the cell is not connected"));
        };
        queue.try_send(bytes).map_err(|_| unavailable("the link to the cell is busy"))
    }

    fn begin(
        &self,
        peer: usize,
        message: &Message,
        charged: Vec<SentCharge>,
    ) -> Result<(u64, oneshot::Receiver<Message>), StoreError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let bytes = encode(id, message)?;
        let (reply, answer) = oneshot::channel();
        {
            let mut waiting = lock(&self.links[peer].waiting);
            if waiting.len() >= MAX_IN_FLIGHT {
                return Err(unavailable("too many requests to the cell are in flight"));
            }
            waiting.insert(id, Waiter::Call { reply, charged });
        }
        let sent = self.enqueue(peer, bytes);
        if sent.is_err() {
            lock(&self.links[peer].waiting).remove(&id);
        }
        sent.map(|()| (id, answer))
    }

    /// Sends a request and waits for the reply for this long.
    pub(super) async fn call(
        &self,
        peer: usize,
        message: &Message,
        within: Duration,
    ) -> Result<Message, StoreError> {
        let (id, answer) = self.begin(peer, message, Vec::new())?;
        let answer = tokio::time::timeout(within, answer).await;
        if answer.is_err() {
            lock(&self.links[peer].waiting).remove(&id);
        }
        match answer {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(_)) => Err(unavailable("the link to the cell broke")),
            Err(_) => Err(StoreError::Timeout),
        }
    }

    /// Completes a request with its reply.
    pub(super) fn complete(&self, peer: usize, id: u64, message: Message) {
        let waiter = lock(&self.links[peer].waiting).remove(&id);
        match waiter {
            None => {}
            Some(Waiter::Call { reply, charged }) => {
                // The caller has left: what was charged is not kept.
                if let Err(Message::Outcomes(outcomes)) = reply.send(message) {
                    let applied =
                        charged.into_iter().zip(&outcomes.per_charge).filter(|(charge, outcome)| {
                            is_applied(charge.enforcement, outcome, outcomes.admission)
                        });
                    let applied: Vec<SentCharge> = applied.map(|(charge, _)| charge).collect();
                    undoing(&applied).into_iter().for_each(|message| self.post(peer, message));
                }
            }
            Some(Waiter::Late { responder, charged, ids }) => match message {
                Message::Outcomes(outcomes) => {
                    let applied = |(charge, outcome): (&SentCharge, &Outcome)| {
                        is_applied(charge.enforcement, outcome, outcomes.admission)
                    };
                    let is_taken: Vec<bool> = charged.iter().zip(&outcomes.per_charge).map(applied).collect();
                    self.answer(peer, responder, (charged, ids), &is_taken);
                }
                Message::Done(_) => {
                    let is_taken = vec![true; ids.len()];
                    self.answer(peer, responder, (charged, ids), &is_taken);
                }
                _ => responder.answer(LateAnswer::NotCharged, || {}),
            },
        }
    }

    /// Waits for the reply to a request until the deadline; `None` if the link breaks. After the deadline the reply
    /// belongs to a late charge.
    async fn wait(
        &self,
        peer: usize,
        id: u64,
        answer: &mut oneshot::Receiver<Message>,
        ids: Vec<CounterId>,
    ) -> Result<Option<Message>, StoreError> {
        if let Ok(answer) = tokio::time::timeout(self.deadline, &mut *answer).await {
            return Ok(answer.ok());
        }
        let mut waiting = lock(&self.links[peer].waiting);
        match waiting.remove(&id) {
            Some(Waiter::Call { charged, .. }) => {
                let (late, responder) = LateCharge::new();
                waiting.insert(id, Waiter::Late { responder, charged, ids });
                Err(StoreError::Late(late))
            }
            // The reply has come in this moment.
            _ => Ok(answer.try_recv().ok()),
        }
    }

    /// Reports the charges that were applied too late; they are undone unless the caller keeps them.
    fn answer(
        &self,
        peer: usize,
        responder: LateResponder,
        (charged, ids): (Vec<SentCharge>, Vec<CounterId>),
        is_taken: &[bool],
    ) {
        let (ids, charged): (Vec<CounterId>, Vec<SentCharge>) = ids
            .into_iter()
            .zip(charged)
            .zip(is_taken)
            .filter(|(_, is_taken)| **is_taken)
            .map(|(pair, _)| pair)
            .unzip();
        if ids.is_empty() {
            return responder.answer(LateAnswer::NotCharged, || {});
        }
        let queue = lock(&self.links[peer].queue).clone();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        responder.answer(LateAnswer::Charged(ids), move || {
            for message in undoing(&charged) {
                let _ =
                    queue.as_ref().zip(encode(id, &message).ok()).map(|(queue, bytes)| queue.try_send(bytes));
            }
        });
    }
}

impl Transport for Links {
    async fn charge(
        &self,
        peer: usize,
        charges: Vec<SentCharge>,
        ids: Vec<CounterId>,
    ) -> Result<Outcomes, StoreError> {
        let message = Message::Charge(charges.clone());
        let (id, mut answer) = self.begin(peer, &message, charges)?;
        let in_time = self.wait(peer, id, &mut answer, ids).await?;
        match in_time {
            Some(Message::Outcomes(outcomes)) => Ok(outcomes),
            Some(Message::Failed(why)) => Err(StoreError::Unavailable(why)),
            Some(_) => Err(unavailable("another cell sent an unexpected answer")),
            None => Err(unavailable("the link to the cell broke")),
        }
    }

    async fn send(&self, peer: usize, message: Message, ids: Vec<CounterId>) -> Result<(), StoreError> {
        // A release or a return that is sent again does no harm; a debit is counted twice.
        let Message::Debit(charged) = &message else {
            return match self.call(peer, &message, self.deadline).await? {
                Message::Failed(why) => Err(StoreError::Unavailable(why)),
                _ => Ok(()),
            };
        };
        let (id, mut answer) = self.begin(peer, &message, charged.clone())?;
        match self.wait(peer, id, &mut answer, ids).await? {
            Some(Message::Failed(why)) => Err(StoreError::Unavailable(why)),
            Some(_) => Ok(()),
            None => Err(StoreError::Lost("the link to the cell broke".to_owned())),
        }
    }

    fn post(&self, peer: usize, message: Message) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let _ = encode(id, &message).and_then(|bytes| self.enqueue(peer, bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{Algorithm, Charge, Cost, CounterKey, KeyPart, LimitSpec, Rate, Scope, TimeDelta};

    /// Without it one caller with many limits on long values ends the link, and with it the requests of all others.
    #[tokio::test]
    async fn a_request_that_is_too_long_fails_alone() {
        let links = Links::new(1, Duration::from_millis(1));
        let mut queue = links.open(0);
        let hourly = LimitSpec::new(Algorithm::Gcra, Rate::per(5, TimeDelta::from_secs(3_600)));
        let (scope, limit, long) = (Scope::new("s"), hourly.build().expect("valid"), "v".repeat(8_000));
        let parts = [KeyPart::Text(&long)];
        let charge = Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE);
        let charges = |count: usize| vec![SentCharge::new(&charge); count];
        let failed = links.charge(0, charges(160), Vec::new()).await;
        assert!(
            matches!(&failed, Err(StoreError::Unavailable(why)) if why.contains("too long")),
            "{failed:?}"
        );
        links.post(0, Message::Debit(charges(160)));
        assert!(queue.try_recv().is_err(), "nothing was sent");
        let late = links.charge(0, charges(100), Vec::new()).await;
        assert!(matches!(late, Err(StoreError::Late(_))), "{late:?}");
        assert!(queue.try_recv().is_ok(), "one that fits is sent");
    }
}
