//! Who watches decisions: counts them, logs them, remembers some. They are told after a decision is made and before it is
//! answered, on the thread of the request: an observer is quick, never waits, and keeps what it needs in memory of its own.

use crate::check::Check;
use crate::decision::Decision;
use crate::limiter::Limiter;
use std::sync::Arc;

/// Sees every decision that is made by rules.
pub trait Observer: Send + Sync {
    /// This was asked, and this is the answer.
    fn decided(&self, check: &Check<'_>, decision: &Decision);
}

impl<S> Limiter<S> {
    /// Lets somebody watch. Several may; they are told in the order in which they came.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    #[inline]
    pub(crate) fn tell(&self, check: &Check<'_>, decision: &Decision) {
        for observer in &self.observers {
            observer.decided(check, decision);
        }
    }
}
