//! The observer interface, called on the request thread after each decision. Implementations must not block.
//!
//! Observers count, log or sample decisions. They are called after a decision is made and before the response is sent,
//! so they must be fast, must never wait, and must keep what they need in their own memory.

use crate::check::Check;
use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::trace::ForwardedRequest;
use std::sync::Arc;
use tollgate_core::{Charge, Outcome, TimeDelta};
use tollgate_rules::Ruleset;

/// Observer of all decisions made by rules.
pub trait Observer: Send + Sync {
    /// Called with each check and its decision.
    fn on_decision(&self, check: &Check<'_>, decision: &Decision);

    /// Called with new rules before they become active.
    fn on_rules_changed(&self, rules: &Arc<Ruleset>) {
        let _ = rules;
    }

    /// Called with inline limits that were charged together, and the outcome of each.
    fn on_inline_limits(&self, charges: &[Charge<'_>], outcomes: &[Outcome], enforced: Enforced) {
        let _ = (charges, outcomes, enforced);
    }

    /// Called with the latency `each` of `requests` requests of the protocol server `protocol`, from the time they were
    /// read to the time they were decided.
    fn on_latency(&self, protocol: &'static str, requests: u64, each: TimeDelta) {
        let _ = (protocol, requests, each);
    }

    /// Returns whether this observer records spans of traced requests. If no observer does, protocol servers do not
    /// parse traces.
    fn follows_traces(&self) -> bool {
        false
    }

    /// Called when the response to a proxied, traced request is complete.
    fn on_forwarded(&self, passed: &ForwardedRequest<'_>) {
        let _ = passed;
    }
}

/// Enforcement of denials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforced {
    /// Denials are enforced.
    Yes,
    /// Every request passes: in shadow mode, or under an emergency measure.
    No,
}

impl<S> Limiter<S> {
    /// Adds an observer. Observers are called in the order in which they were added.
    #[must_use]
    pub fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.is_traced |= observer.follows_traces();
        self.observers.push(observer);
        self
    }

    /// Returns whether any observer records traces. Protocol servers check this before they parse a trace.
    #[must_use]
    #[inline]
    pub const fn is_traced(&self) -> bool {
        self.is_traced
    }

    /// Notifies the observers of a proxied request.
    pub fn record_forwarded(&self, passed: &ForwardedRequest<'_>) {
        for observer in &self.observers {
            observer.on_forwarded(passed);
        }
    }

    /// Notifies the observers of a protocol server's latency, which comes from clock values that it has read anyway.
    #[inline]
    pub fn record_latency(&self, protocol: &'static str, requests: u64, each: TimeDelta) {
        for observer in &self.observers {
            observer.on_latency(protocol, requests, each);
        }
    }

    #[inline]
    pub(crate) fn notify_observers(&self, check: &Check<'_>, decision: &Decision) {
        // The decision is made: a panic is counted and logged, and the caller has its answer.
        let _ = self.guarded(|| {
            for observer in &self.observers {
                observer.on_decision(check, decision);
            }
        });
    }
}
