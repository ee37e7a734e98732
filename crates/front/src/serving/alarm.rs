//! A timeout that is set for every request and hardly ever goes off.
//!
//! Setting it only writes down when it is due; the timer behind it is moved when it fires too early. A timer a request
//! was rejected: putting it into the wheel and taking it out costs as much as reading the request.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// A timeout of one task: it wakes whoever asked last.
#[derive(Debug)]
pub struct Alarm {
    sleep: Pin<Box<Sleep>>,
    due: Instant,
    /// The timer has been asked since it was last moved, so it will wake its task.
    is_watched: bool,
}

impl Alarm {
    /// One that is due after `wait`.
    #[must_use]
    pub fn after(wait: Duration) -> Self {
        let due = Instant::now() + wait;
        Self { sleep: Box::pin(tokio::time::sleep_until(due)), due, is_watched: false }
    }

    /// Due after `wait` from now on.
    pub fn set(&mut self, wait: Duration) {
        self.due = Instant::now() + wait;
        if self.sleep.deadline() > self.due {
            self.sleep.as_mut().reset(self.due);
            self.is_watched = false;
        }
    }

    /// Ready when it is due.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.is_watched = true;
        // Not by the task's budget: with none left, the timer would be neither set nor known to be unset.
        while pin!(tokio::task::unconstrained(self.sleep.as_mut())).poll(cx).is_ready() {
            if Instant::now() >= self.due {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(self.due);
        }
        Poll::Pending
    }

    /// The same for a task that has just got on, and has always been the one that asked: it has no need to know whether
    /// time is up, only to be woken when it is. Asking the timer costs as much as a small request.
    pub fn watch(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // One that has gone off has woken somebody already, and would not again.
        if self.is_watched && !self.sleep.is_elapsed() { Poll::Pending } else { self.poll(cx) }
    }
}
