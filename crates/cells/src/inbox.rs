//! Inbox: which batches of which senders have been applied. A batch that arrives again is acknowledged and not applied.
//!
//! A batch counts as applied only once it is: one that arrives again in between is refused, and sent again later. Of
//! one that failed in part, the inbox knows which entries were applied; the next attempt applies the others alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Processes of one cell that are remembered: its nodes, and those before a restart whose last messages may still come.
const MAX_INCARNATIONS: usize = 64;

#[derive(Debug, Default)]
struct Sender {
    incarnation: u64,
    /// Last batch that was applied.
    last: u64,
    /// The batch after it, if an attempt has begun.
    next: Option<Attempt>,
}

#[derive(Debug)]
struct Attempt {
    sequence: u64,
    is_running: bool,
    /// Positions of the entries that were applied.
    applied: HashSet<usize>,
}

/// Applied batches by sender.
#[derive(Debug, Default)]
pub struct Inbox {
    senders: Mutex<HashMap<String, VecDeque<Sender>>>,
    most: usize,
}

/// What to do with a batch.
#[derive(Debug)]
pub enum Receipt<'a> {
    /// Apply it.
    New(Application<'a>),
    /// It has been applied.
    Repeated,
    /// A batch of the sender is being applied: it is sent again later.
    Busy,
    /// There are more senders than can be remembered.
    Refused,
}

/// A batch that is being applied. If it is dropped before its end, it is applied when it is sent again.
#[derive(Debug)]
pub struct Application<'a> {
    inbox: &'a Inbox,
    cell: String,
    incarnation: u64,
    sequence: u64,
    is_whole: bool,
    /// Positions of the entries that were applied, by an earlier attempt too.
    pub applied: HashSet<usize>,
}

impl Application<'_> {
    /// Ends it: the whole batch is applied.
    pub fn finish(mut self) {
        self.is_whole = true;
    }
}

impl Drop for Application<'_> {
    fn drop(&mut self) {
        let mut senders = self.inbox.lock();
        let mut known = senders.get_mut(&self.cell).into_iter().flatten();
        let Some(sender) = known.find(|sender| sender.incarnation == self.incarnation) else { return };
        if self.is_whole {
            sender.last = sender.last.max(self.sequence);
            sender.next = None;
        } else if let Some(next) = sender.next.as_mut().filter(|next| next.sequence == self.sequence) {
            next.is_running = false;
            next.applied = std::mem::take(&mut self.applied);
        }
    }
}

impl Inbox {
    /// Creates an inbox for at most this many cells.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { senders: Mutex::default(), most }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, VecDeque<Sender>>> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the arrival of a batch.
    pub fn receive(&self, cell: &str, incarnation: u64, sequence: u64) -> Receipt<'_> {
        let mut senders = self.lock();
        if !senders.contains_key(cell) {
            if senders.len() >= self.most {
                return Receipt::Refused;
            }
            senders.insert(cell.to_owned(), VecDeque::new());
        }
        let Some(known) = senders.get_mut(cell) else { return Receipt::Refused };
        if !known.iter().any(|sender| sender.incarnation == incarnation) {
            if known.len() >= MAX_INCARNATIONS {
                known.pop_front();
            }
            known.push_back(Sender { incarnation, ..Sender::default() });
        }
        let Some(sender) = known.iter_mut().find(|sender| sender.incarnation == incarnation) else {
            return Receipt::Refused;
        };
        if sequence <= sender.last {
            return Receipt::Repeated;
        }
        let applied = match sender.next.take() {
            Some(next) if next.is_running => {
                sender.next = Some(next);
                return Receipt::Busy;
            }
            Some(next) if next.sequence == sequence => next.applied,
            // What a sender has given up, it has sent to another node of this cell.
            _ => HashSet::new(),
        };
        sender.next = Some(Attempt { sequence, is_running: true, applied: HashSet::new() });
        let cell = cell.to_owned();
        Receipt::New(Application { inbox: self, cell, incarnation, sequence, is_whole: false, applied })
    }
}
