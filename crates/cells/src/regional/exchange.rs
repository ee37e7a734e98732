//! The exchange of consumption in each tick: from the ledger into the outboxes, and out of them as batches.

use super::RegionalStore;
use crate::ledger::Consumed;
use crate::members::{PeerConfig, WHOLE};
use crate::message::{Batch, Hello, Message};
use crate::outbox::Outbox;
use crate::owner::Transport;
use crate::roster::PeerChanges;
use crate::stats::add;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use tollgate_core::{Clock, CounterStore, Timestamp};

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    pub(super) fn outbox(&self, peer: usize) -> Option<MutexGuard<'_, Outbox>> {
        self.outboxes.get(peer).map(|outbox| outbox.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn refresh(&self) {
        let now = self.clock.now();
        self.members.on_store(self.own.is_down());
        self.members.refresh(now);
        let division = self.members.division(now);
        let (part, all) = division.weights();
        if **self.division.load() != division {
            self.division.store(Arc::new(division));
        }
        let share = u128::from(part) * u128::from(WHOLE) / u128::from(all.max(1));
        self.share.store(u64::try_from(share).unwrap_or(WHOLE), Ordering::Relaxed);
    }

    /// Replaces the learned peers, and returns what has changed.
    pub fn set_peers(&self, peers: &[PeerConfig]) -> PeerChanges {
        let changes = self.members.set_peers(peers);
        let (now, most) = (self.clock.now(), self.members.config().max_pending);
        for at in &changes.removed {
            if let Some(mut outbox) = self.outbox(*at) {
                *outbox = Outbox::new(most, now);
            }
        }
        self.refresh();
        changes
    }

    /// Takes what was consumed since the last tick.
    fn drain(&self) -> Arc<Vec<Consumed>> {
        let mut last = self.last_tick.lock().unwrap_or_else(PoisonError::into_inner);
        match Arc::get_mut(&mut last) {
            Some(list) => self.ledger.drain_into(list),
            // An outbox has not sent all of it yet.
            None => *last = Arc::new(self.ledger.drain()),
        }
        Arc::clone(&last)
    }

    /// Moves what was consumed since the last tick into the outboxes, and looks who answers. Called once in a tick.
    pub fn tick(&self) {
        let consumed = self.drain();
        let now = self.clock.now();
        let share = self.share.load(Ordering::Relaxed);
        for (contact, others) in self.members.contacts(now) {
            let is_silent = self.members.is_silent(contact, now);
            // One node of a cell receives consumption, also what another did not receive in time.
            let mut moved = Vec::new();
            for other in others {
                let Some(mut outbox) = self.outbox(other) else { continue };
                if is_silent || self.members.is_silent(other, now) {
                    moved.push(outbox.take(now));
                }
                // Nothing more is added for it, so its next answer means that it knows everything.
                outbox.add(&[], is_silent, now);
            }
            if let Some(mut outbox) = self.outbox(contact) {
                outbox.set_share(if is_silent { share } else { WHOLE }, now);
                outbox.add_tick(&consumed, is_silent, now);
                moved.iter().for_each(|moved| outbox.add(moved, false, now));
            }
        }
        self.overdrafts.sweep(now);
        self.lost_units.sweep(now);
        let config = self.members.config();
        self.late.refresh(config.tick, config.silence, |cell| self.members.is_named_silent(cell, now), now);
        self.refresh();
    }

    /// Records the first message of a peer. One that refused this process before accepts it now.
    pub fn on_hello(&self, peer: usize, hello: Hello) {
        self.members.on_hello(peer, hello);
        self.refresh();
    }

    /// Records that a peer refuses this process, because it reaches another one under this cell's name. Returns whether it
    /// is the first to say so.
    pub fn on_displaced(&self, peer: usize) -> bool {
        let is_first = self.members.on_displaced(peer, self.clock.now());
        self.refresh();
        is_first
    }

    /// Returns the batch to send to a peer.
    pub fn next_batch(&self, peer: usize) -> Arc<Batch> {
        let now = self.clock.now();
        self.outbox(peer).map(|mut outbox| outbox.next_batch(now)).unwrap_or_default()
    }

    /// Records what a peer answered to a batch that was sent at `sent`. Returns whether there is more to send at once. A batch
    /// that it is still applying, or did not apply, is sent again.
    pub fn on_batch_answer(&self, peer: usize, sequence: u64, sent: Timestamp, answer: &Message) -> bool {
        let now = self.clock.now();
        match answer {
            Message::Done(seen) => {
                self.members.on_answer(peer, sent, seen, now);
                add(&self.counts.batches_sent, 1);
                self.outbox(peer).is_some_and(|mut outbox| {
                    outbox.acknowledge(sequence);
                    outbox.has_more()
                })
            }
            Message::Busy(seen) => {
                self.members.on_answer(peer, sent, seen, now);
                false
            }
            refused => {
                if let Message::NotApplied(_, seen) = refused {
                    self.members.on_heard(peer, sent, seen, now);
                }
                if let Some(mut outbox) = self.outbox(peer) {
                    outbox.refuse();
                }
                false
            }
        }
    }
}
