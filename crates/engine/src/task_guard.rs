//! Guard of a limiter's background task that runs only while there is something to do.
//!
//! A table records whether its task runs. A task that ends by itself clears that under the table's lock, so that nothing is
//! added in between. One that ends with its runtime cannot: the guard, which is dropped with it, does.

use crate::limiter::Limiter;
use std::sync::{Arc, Weak};

/// Guard of a background task, dropped with it.
pub(crate) struct TaskGuard<S> {
    limiter: Weak<Limiter<S>>,
    /// Records that the task no longer runs. `None` once it has ended by itself.
    on_abort: Option<fn(&Limiter<S>)>,
}

impl<S> TaskGuard<S> {
    /// Creates the guard of a task of `limiter`; `on_abort` records that it no longer runs.
    pub(crate) fn new(limiter: &Arc<Limiter<S>>, on_abort: fn(&Limiter<S>)) -> Self {
        Self { limiter: Arc::downgrade(limiter), on_abort: Some(on_abort) }
    }

    /// Returns the limiter, while it is in use.
    pub(crate) fn limiter(&self) -> Option<Arc<Limiter<S>>> {
        self.limiter.upgrade()
    }

    /// Marks a normal end, which is recorded already.
    pub(crate) fn end(mut self) {
        self.on_abort = None;
    }
}

impl<S> Drop for TaskGuard<S> {
    fn drop(&mut self) {
        if let (Some(on_abort), Some(limiter)) = (self.on_abort, self.limiter()) {
            on_abort(&limiter);
        }
    }
}
