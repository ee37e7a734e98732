//! A timeout that is set for every request and rarely expires.
//!
//! Setting it only records the deadline; the underlying timer is moved when it fires too early. Rejected: one timer per
//! request, because inserting it into the timer wheel and removing it costs as much as parsing the request.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// A timeout for one task. It wakes the task that polled it last.
#[derive(Debug)]
pub struct LazyTimeout {
    sleep: Pin<Box<Sleep>>,
    deadline: Instant,
    /// The timer has been polled since it was last moved, so it will wake its task.
    is_registered: bool,
}

impl LazyTimeout {
    /// Creates a timeout that expires `after` from now.
    #[must_use]
    pub fn new(after: Duration) -> Self {
        let deadline = Instant::now() + after;
        Self { sleep: Box::pin(tokio::time::sleep_until(deadline)), deadline, is_registered: false }
    }

    /// Moves the deadline to `after` from now. Returns now.
    pub fn set(&mut self, after: Duration) -> Instant {
        let now = Instant::now();
        self.deadline = now + after;
        if self.sleep.deadline() > self.deadline {
            self.sleep.as_mut().reset(self.deadline);
            self.is_registered = false;
        }
        now
    }

    /// Ready once the deadline has passed.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_registered = true;
        // Not subject to the task's budget: without any left, the poll would return pending without registering the
        // timer.
        while pin!(tokio::task::unconstrained(self.sleep.as_mut())).poll(cx).is_ready() {
            if Instant::now() >= self.deadline {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(self.deadline);
        }
        Poll::Pending
    }

    /// Like [`Self::poll`], for a task that has just made progress and is the only one that ever polls this timeout. It
    /// only ensures that the task is woken at the deadline, because polling the timer costs as much as a small request.
    pub fn poll_registered(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // A timer that has fired has already woken its task and does not do so again.
        if self.is_registered && !self.sleep.is_elapsed() { Poll::Pending } else { self.poll(cx) }
    }
}
