//! Connection draining for a graceful shutdown: counts open connections and signals them to finish.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Time that a new connection has to send its first request after draining has begun: the request may be in transit and
/// would be lost.
pub const GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The drain state, shared by all connections of a server.
#[derive(Debug, Default)]
pub struct Drain {
    has_begun: AtomicBool,
    begun: Notify,
    open: AtomicUsize,
    empty: Notify,
}

/// Counts one open connection until it is dropped.
#[derive(Debug)]
pub struct DrainGuard(Arc<Drain>);

impl Drain {
    /// Counts a connection for as long as the guard lives.
    #[must_use]
    pub fn enter(self: &Arc<Self>) -> DrainGuard {
        self.open.fetch_add(1, Ordering::SeqCst);
        DrainGuard(Arc::clone(self))
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns whether draining has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// Resolves when draining begins.
    pub fn begun(&self) -> Notified<'_> {
        self.begun.notified()
    }

    /// Registers the current task to be woken when draining begins, for as long as `begun` lives: enough for a task
    /// that checks [`Self::has_begun`] whenever it is polled.
    pub async fn wake_on_begin(mut begun: Pin<&mut Notified<'_>>) {
        poll_fn(|cx| {
            let _ = begun.as_mut().poll(cx);
            Poll::Ready(())
        })
        .await;
    }

    /// Begins draining, and waits until no connection is open.
    pub async fn run(&self) {
        self.has_begun.store(true, Ordering::Release);
        self.begun.notify_waiters();
        loop {
            let empty = self.empty.notified();
            if self.open.load(Ordering::SeqCst) == 0 {
                return;
            }
            empty.await;
        }
    }
}

impl Drop for DrainGuard {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.empty.notify_waiters();
        }
    }
}
