//! Who watches decisions: counts them, logs them, remembers some. They are told after a decision is made and before it is
//! answered, on the thread of the request: an observer is quick, never waits, and keeps what it needs in memory of its own.

use crate::check::Check;
use crate::decision::Decision;
use crate::limiter::Limiter;
use std::sync::Arc;
use tollgate_core::Span;

/// Sees every decision that is made by rules.
pub trait Observer: Send + Sync {
    /// This was asked, and this is the answer.
    fn decided(&self, check: &Check<'_>, decision: &Decision);

    /// So many requests of this front took so long each, from the moment that they had been read until they were decided.
    fn took(&self, front: &'static str, requests: u64, each: Span) {
        let _ = (front, requests, each);
    }
}

impl<S> Limiter<S> {
    /// Lets somebody watch. Several may; they are told in the order in which they came.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Tells those who watch how long a front took. Fronts know it from clocks that they have read anyway.
    #[inline]
    pub fn took(&self, front: &'static str, requests: u64, each: Span) {
        for observer in &self.observers {
            observer.took(front, requests, each);
        }
    }

    #[inline]
    pub(crate) fn tell(&self, check: &Check<'_>, decision: &Decision) {
        for observer in &self.observers {
            observer.decided(check, decision);
        }
    }
}
