//! A timeout that is set for every request and hardly ever goes off.
//!
//! Setting it only writes down when it is due; the timer behind it is moved when it fires too early. A timer a request
//! was rejected: putting it into the wheel and taking it out costs as much as reading the request.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

pub(crate) struct Alarm {
    sleep: Pin<Box<Sleep>>,
    due: Instant,
}

impl Alarm {
    /// One that is due after `wait`.
    pub(crate) fn after(wait: Duration) -> Self {
        let due = Instant::now() + wait;
        Self { sleep: Box::pin(tokio::time::sleep_until(due)), due }
    }

    /// Due after `wait` from now on.
    pub(crate) fn set(&mut self, wait: Duration) {
        self.due = Instant::now() + wait;
        if self.sleep.deadline() > self.due {
            self.sleep.as_mut().reset(self.due);
        }
    }

    /// Ready when it is due.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.sleep.as_mut().poll(cx).is_ready() {
            if Instant::now() >= self.due {
                return Poll::Ready(());
            }
            self.sleep.as_mut().reset(self.due);
        }
        Poll::Pending
    }
}
