//! Inbox: which batches of which senders have been applied. A batch that arrives again is acknowledged and not applied.
//!
//! A batch counts as applied only once it is: one that arrives again in between is refused, and sent again later. Of
//! one that failed in part, the inbox knows which entries were applied; the next attempt applies the others alone.
//!
//! Cells come back under other names, so the names are bounded: the cell that has been silent for longest gives way. A
//! batch that it repeats after that is counted twice, on the safe side. Refusing new names was rejected: after enough of
//! them no cell could join until a restart.

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

/// The processes of one cell.
#[derive(Debug, Default)]
struct Cell {
    processes: VecDeque<Sender>,
    /// Number of the last message of the cell among all that came.
    last_message: u64,
}

impl Cell {
    fn is_applying(&self) -> bool {
        let is_running = |sender: &Sender| sender.next.as_ref().is_some_and(|next| next.is_running);
        self.processes.iter().any(is_running)
    }
}

#[derive(Debug, Default)]
struct Cells {
    by_name: HashMap<String, Cell>,
    messages: u64,
}

/// Applied batches by sender.
#[derive(Debug, Default)]
pub struct Inbox {
    cells: Mutex<Cells>,
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
    /// Batches of as many cells as can be remembered are being applied.
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
        let mut cells = self.inbox.lock();
        let Some(cell) = cells.by_name.get_mut(&self.cell) else { return };
        let mut known = cell.processes.iter_mut();
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
        Self { cells: Mutex::default(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Cells> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the arrival of a batch.
    pub fn receive(&self, cell: &str, incarnation: u64, sequence: u64) -> Receipt<'_> {
        let mut cells = self.lock();
        let Cells { by_name, messages } = &mut *cells;
        if !by_name.contains_key(cell) && by_name.len() >= self.most {
            let idle = by_name.iter().filter(|(_, cell)| !cell.is_applying());
            let silent = idle.min_by_key(|(_, cell)| cell.last_message).map(|(name, _)| name.clone());
            let Some(silent) = silent else { return Receipt::Refused };
            by_name.remove(&silent);
        }
        *messages += 1;
        let known = by_name.entry(cell.to_owned()).or_default();
        known.last_message = *messages;
        let known = &mut known.processes;
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
