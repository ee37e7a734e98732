//! Ending without dropping anyone: who is there, and how they hear that it is time to go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How long whoever has just come may still take to say why: a request may be on its way to a connection that is new, and
/// would be lost with it.
pub const LAST_CHANCE: Duration = Duration::from_secs(2);

/// Shared by all connections.
#[derive(Debug, Default)]
pub struct Drain {
    begun: AtomicBool,
    begin: Notify,
    open: AtomicUsize,
    empty: Notify,
}

/// One connection that is open.
#[derive(Debug)]
pub struct Present(Arc<Drain>);

impl Drain {
    /// Counts a connection for as long as the answer lives.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> Present {
        self.open.fetch_add(1, Ordering::SeqCst);
        Present(Arc::clone(self))
    }

    /// Connections that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Whether it is time to go.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Wakes the task that polls it once, when draining begins: enough for a task that then asks `has_begun`.
    pub fn begin(&self) -> &Notify {
        &self.begin
    }

    /// Tells everyone, and waits until all have gone.
    pub async fn run(&self) {
        self.begun.store(true, Ordering::Release);
        self.begin.notify_waiters();
        loop {
            let empty = self.empty.notified();
            if self.open.load(Ordering::SeqCst) == 0 {
                return;
            }
            empty.await;
        }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.empty.notify_waiters();
        }
    }
}
