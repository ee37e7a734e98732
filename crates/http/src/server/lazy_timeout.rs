//! A timeout that is set for every request and rarely expires.
//!
//! Setting it only records the deadline; the timer behind it is moved when it fires too early. One timer per request was
//! rejected: inserting it into the timer wheel and removing it costs as much as parsing the request.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// A timeout of one task: it wakes the task that polled it last.
#[derive(Debug)]
pub struct LazyTimeout {
    sleep: Pin<Box<Sleep>>,
    deadline: Instant,
    /// The timer has been polled since it was last moved, so it will wake its task.
    is_registered: bool,
}

impl LazyTimeout {
    /// A timeout that expires `after` now.
    #[must_use]
    pub fn new(after: Duration) -> Self {
        let deadline = Instant::now() + after;
        Self { sleep: Box::pin(tokio::time::sleep_until(deadline)), deadline, is_registered: false }
    }

    /// Moves the deadline to `after` now.
    pub fn set(&mut self, after: Duration) {
        self.deadline = Instant::now() + after;
        if self.sleep.deadline() > self.deadline {
            self.sleep.as_mut().reset(self.deadline);
            self.is_registered = false;
        }
    }

    /// Ready once the deadline has passed.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_registered = true;
        // Outside the task's budget: with none left, the timer would be neither set nor known to be unset.
        while pin!(tokio::task::unconstrained(self.sleep.as_mut())).poll(cx).is_ready() {
            if Instant::now() >= self.deadline {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(self.deadline);
        }
        Poll::Pending
    }

    /// Like [`Self::poll`], for a task that has just made progress and is the only one that ever polls this timeout: it
    /// need not learn whether the deadline has passed, only be woken when it does. Polling the timer costs as much as a
    /// small request.
    pub fn poll_registered(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // A timer that has fired has woken its task already, and would not do so again.
        if self.is_registered && !self.sleep.is_elapsed() { Poll::Pending } else { self.poll(cx) }
    }
}
