//! Handshakes: connections of which it is not known yet whether a cell has opened them. Their number is bounded, apart from
//! that of links; beyond it the oldest one ends. So clients that connect and send nothing take no place of a cell's link,
//! and make no cell wait: its handshake takes a few round trips, and the oldest one has had more time than that.
//!
//! Rejected: refusing new connections while there are too many. Then a cell has to wait until others have run out of time.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Handshakes in the order in which they began.
pub(super) struct Handshakes {
    running: Mutex<Running>,
    most: usize,
}

#[derive(Default)]
struct Running {
    /// Ends a handshake when it is dropped.
    all: VecDeque<(u64, oneshot::Sender<()>)>,
    count: u64,
}

/// A handshake that is running.
pub(super) struct Handshake {
    all: Arc<Handshakes>,
    number: u64,
    ended: oneshot::Receiver<()>,
}

impl Handshakes {
    /// Creates room for this many.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { running: Mutex::default(), most })
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a handshake. Returns it, and whether the oldest one was ended for it.
    pub(super) fn begin(self: &Arc<Self>) -> (Handshake, bool) {
        let (end, ended) = oneshot::channel();
        let mut running = self.lock();
        running.count += 1;
        let number = running.count;
        running.all.push_back((number, end));
        let is_full = running.all.len() > self.most;
        if is_full {
            running.all.pop_front();
        }
        (Handshake { all: Arc::clone(self), number, ended }, is_full)
    }
}

impl Handshake {
    /// Performs it, until it is ended for another.
    pub(super) async fn run<T>(mut self, steps: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        tokio::select! {
            biased;
            done = steps => done,
            _ = &mut self.ended => {
                Err(io::Error::other("too many connections whose first message has not come"))
            }
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut running = self.all.lock();
        // In the order of their numbers.
        if let Ok(at) = running.all.binary_search_by_key(&self.number, |(number, _)| *number) {
            running.all.remove(at);
        }
    }
}
