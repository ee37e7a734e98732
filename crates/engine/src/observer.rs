//! The observer interface, called on the request thread after each decision. Implementations must not block.
//!
//! Who watches decisions: counts them, logs them, remembers some. They are told after a decision is made and before it is
//! answered, on the thread of the request: an observer is quick, never waits, and keeps what it needs in memory of its own.

use crate::check::Check;
use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::trace::ForwardedRequest;
use std::sync::Arc;
use tollgate_core::{Charge, Outcome, TimeDelta};
use tollgate_rules::Ruleset;

/// Sees every decision that is made by rules.
pub trait Observer: Send + Sync {
    /// This was asked, and this is the answer.
    fn on_decision(&self, check: &Check<'_>, decision: &Decision);

    /// These rules decide next. Told before they do, where rules are replaced.
    fn on_rules_changed(&self, rules: &Arc<Ruleset>) {
        let _ = rules;
    }

    /// Limits that callers brought themselves were asked together, and this is what each said.
    fn on_inline_limits(&self, charges: &[Charge<'_>], outcomes: &[Outcome], bites: Enforced) {
        let _ = (charges, outcomes, bites);
    }

    /// So many requests of this front took so long each, from the moment that they had been read until they were decided.
    fn on_latency(&self, front: &'static str, requests: u64, each: TimeDelta) {
        let _ = (front, requests, each);
    }

    /// Whether it makes spans of requests that are part of a trace. Where nobody does, fronts do not look for one.
    fn follows_traces(&self) -> bool {
        false
    }

    /// A request that is part of a trace was passed on, and its answer is over.
    fn on_forwarded(&self, passed: &ForwardedRequest<'_>) {
        let _ = passed;
    }
}

/// Whether a denial turns anybody away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforced {
    /// It does.
    Yes,
    /// Everything passes: in shadow, or in an emergency.
    No,
}

impl<S> Limiter<S> {
    /// Lets somebody watch. Several may; they are told in the order in which they came.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.is_traced |= observer.follows_traces();
        self.observers.push(observer);
        self
    }

    /// Whether anybody follows traces. Fronts ask before they look for one.
    #[must_use]
    #[inline]
    pub const fn is_traced(&self) -> bool {
        self.is_traced
    }

    /// Tells those who watch of a request that was passed on.
    pub fn record_forwarded(&self, passed: &ForwardedRequest<'_>) {
        for observer in &self.observers {
            observer.on_forwarded(passed);
        }
    }

    /// Tells those who watch how long a front took. Fronts know it from clocks that they have read anyway.
    #[inline]
    pub fn record_latency(&self, front: &'static str, requests: u64, each: TimeDelta) {
        for observer in &self.observers {
            observer.on_latency(front, requests, each);
        }
    }

    #[inline]
    pub(crate) fn notify_observers(&self, check: &Check<'_>, decision: &Decision) {
        for observer in &self.observers {
            observer.on_decision(check, decision);
        }
    }
}
