//! Decision summary: the facts from which a response is written, from the local engine or from a remote server.
//!
//! It contains only limits that can deny: the numbers of a shadow limit would make callers slow down for nothing.
//! `RateLimit` reports the limit nearest exhaustion: on a denial the denying one with the longest wait, where the store
//! failed the one of the rule that fails closed, else the one with the fewest units left (not the smallest fraction left:
//! the next request takes units, not fractions). A request that can never pass, because its cost is above the limit or
//! the limit is 0, has no time to retry: an invented one would be a loop of denials.
//!
//! A limit whose counter was not read (a store that failed, a denial from the cache, an emergency measure) is listed
//! too, because clients pace themselves by the list; it is the nearest one only if no other is known. It then has no
//! unit left if the request was refused, and all of them if it passed: nothing is counted against it.

use super::scope::RequestScope;
use http::StatusCode;
use smallvec::SmallVec;
use tollgate_core::{Limit, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{DecidedBy, Decision, DecisionId, LimitStatus, Origin, Window};
use tollgate_rules::{Class, DenialResponse, Rule, RuleLimit};

/// The result of a check, as the response reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The request may pass.
    Allowed,
    /// The caller is over a limit.
    Denied,
    /// No decision was possible and the rule fails closed, or load is shed.
    Unavailable,
}

impl Disposition {
    /// Returns the default status.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Allowed => StatusCode::OK,
            Self::Denied => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// One limit that the request matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy<'a> {
    /// Name of the rule.
    pub rule: &'a str,
    /// Units per window.
    pub quota: u64,
    /// The window.
    pub window: Window,
    /// Units left, never more than `quota`.
    pub remaining: u64,
    /// Seconds, rounded up: with units left, until the limit is fully available again; with none left, until the next
    /// one, or until a denied request would pass. 0 on a denial that no time ends.
    pub reset: u64,
    /// The same in microseconds, not rounded.
    reset_micros: u64,
    /// Seconds until the limit admits the request that it denied; the largest value if it never does.
    wait: u64,
    /// The limit denied this request.
    pub is_over: bool,
    /// The limit's counter was read.
    pub is_known: bool,
    /// The limit is of the rule that could not be decided and fails closed.
    is_failed: bool,
    /// The rule has several windows in this summary, so that its name alone is ambiguous.
    pub is_one_of_several: bool,
}

impl<'a> Policy<'a> {
    /// Creates an unused limit.
    #[must_use]
    pub const fn new(rule: &'a str, quota: u64, window: Window) -> Self {
        Self {
            rule,
            quota,
            window,
            remaining: quota,
            reset: 0,
            reset_micros: 0,
            wait: 0,
            is_over: false,
            is_known: true,
            is_failed: false,
            is_one_of_several: false,
        }
    }

    /// Sets the number of units left. A burst may be larger than the quota; the fields say what is left of the quota.
    #[must_use]
    pub const fn with_remaining(mut self, units: u64) -> Self {
        self.remaining = if units < self.quota { units } else { self.quota };
        self
    }

    /// Sets the reset in seconds.
    #[must_use]
    pub const fn with_reset(mut self, seconds: u64) -> Self {
        (self.reset, self.wait) = (seconds, seconds);
        self.reset_micros = seconds.saturating_mul(1_000_000);
        self
    }

    fn with_exact_reset(mut self, after: TimeDelta) -> Self {
        (self.reset, self.reset_micros) = (after.ceil_secs(), after.as_micros());
        self
    }

    /// Returns the point in time of the reset in seconds since 1970, rounded up, so that a client that waits until then
    /// has waited long enough.
    pub(super) fn reset_epoch(&self, at: Timestamp) -> u64 {
        at.as_micros().saturating_add(self.reset_micros).div_ceil(1_000_000)
    }

    /// Marks the limit as the one that denied the request.
    #[must_use]
    pub const fn denied(mut self) -> Self {
        self.is_over = true;
        self
    }

    /// Returns the window in seconds, rounded up so that no client paces itself too fast; `None` for months, whose
    /// length varies, and for permits, which have no window.
    pub(crate) fn seconds(&self) -> Option<u64> {
        match self.window {
            Window::Rolling(span) => Some(span.ceil_secs().max(1)),
            Window::Calendar(tollgate_core::CalendarUnit::Day) => Some(86_400),
            Window::Calendar(_) | Window::Concurrent => None,
        }
    }

    /// Returns whether there is a time after which more of the limit is available.
    pub(super) const fn has_reset(&self) -> bool {
        !self.is_over || self.reset > 0
    }

    fn nearness(&self) -> (bool, bool, bool, u64, std::cmp::Reverse<u64>) {
        let (left, lasts) = if self.is_over { (0, self.wait) } else { (self.remaining, self.reset) };
        (!self.is_failed, !self.is_over, !self.is_known, left, std::cmp::Reverse(lasts))
    }
}

/// The facts from which a response is written.
#[derive(Clone, Debug)]
pub struct DecisionSummary<'a> {
    /// The result of the check.
    pub disposition: Disposition,
    /// The matched limits that can deny, in rule order.
    pub policies: SmallVec<[Policy<'a>; 4]>,
    /// Seconds until a retry may pass, on a denial; `None` if the same request never will, or none was denied.
    pub retry_after: Option<u64>,
    /// The rule that denied the request.
    pub denied_by: Option<&'a str>,
    /// Why the request was refused, where nothing else in the response can say it: a proxy drops the body of a refusal. Absent
    /// from what callers receive directly, because it names the load and the capacity of the service.
    pub reason: Option<&'a str>,
    /// The rule that degraded the request.
    pub degraded_by: Option<&'a str>,
    /// The rule whose soft limit was exceeded.
    pub warned_by: Option<&'a str>,
    /// The rule that denied protects against abuse (`class: security`).
    pub is_abnormal: bool,
    /// Load was shed: the caller is not over a limit of its own.
    pub is_shed: bool,
    /// The decision ID.
    pub decision: Option<DecisionId>,
    /// When the limits' counters were read, by the clock that counts their windows, if it is known.
    pub at: Option<Timestamp>,
    /// What the denying rule says instead of the settings' status and body.
    pub response: Option<&'a DenialResponse>,
    /// What the request was about, for the body of a denial ([`super::ResponseConfig::scope`]).
    pub scope: Option<&'a RequestScope>,
}

impl<'a> DecisionSummary<'a> {
    /// Creates the summary of an allowed request that matched these limits.
    #[must_use]
    pub fn from_policies(policies: impl IntoIterator<Item = Policy<'a>>) -> Self {
        let mut facts = Self {
            disposition: Disposition::Allowed,
            policies: policies.into_iter().collect(),
            retry_after: None,
            denied_by: None,
            reason: None,
            degraded_by: None,
            warned_by: None,
            is_abnormal: false,
            is_shed: false,
            decision: None,
            at: None,
            response: None,
            scope: None,
        };
        facts.mark_repeated_rules();
        facts
    }

    /// Creates the summary of an engine's decision.
    #[must_use]
    pub fn from_decision(decision: &'a Decision) -> Self {
        let name = |by: Option<DecidedBy>| by.map(|by| decision.name(by));
        let mut facts = Self {
            decision: Some(decision.id()),
            degraded_by: name(decision.degraded_by),
            warned_by: name(decision.warned_by),
            at: Some(decision.at).filter(|at| *at != Timestamp::ZERO),
            ..Self::from_policies([])
        };
        if !decision.is_allowed() {
            facts.disposition = if decision.origin == Origin::FailClosed || decision.is_shed() {
                Disposition::Unavailable
            } else {
                Disposition::Denied
            };
            facts.retry_after = decision.retry_after().map(|wait| wait.ceil_secs().max(1));
            facts.denied_by = name(decision.denied_by);
            facts.is_shed = decision.is_shed();
            facts.is_abnormal = decision.denied_by.is_some_and(|by| guards(decision, by));
            let is_over = facts.disposition == Disposition::Denied;
            facts.response =
                denying_rule(decision).filter(|_| is_over).and_then(|rule| rule.response.as_deref());
        }
        let mut seen: SmallVec<[&RuleLimit; 4]> = SmallVec::new();
        for status in decision.deciding_limits() {
            let Some(limit) = decision.limit(status) else { continue };
            let policy = facts.policy(decision, status, &limit.limit);
            // Two descriptors may match the same limit: the tighter counter is reported.
            match seen.iter().position(|known| std::ptr::eq(*known, limit)) {
                Some(at) if policy.nearness() < facts.policies[at].nearness() => facts.policies[at] = policy,
                Some(_) => {}
                None => {
                    seen.push(limit);
                    facts.policies.push(policy);
                }
            }
        }
        if let Some((measure, wait)) = blocked_by(decision) {
            let window = Window::Rolling(TimeDelta::from_secs(wait));
            facts.policies.push(Policy::new(measure, 0, window).with_reset(wait).denied());
        }
        facts.mark_repeated_rules();
        facts
    }

    /// Sets what the request was about.
    #[must_use]
    pub fn with_scope(mut self, scope: Option<&'a RequestScope>) -> Self {
        self.scope = scope;
        self
    }

    fn policy(&self, decision: &'a Decision, status: &LimitStatus, limit: &Limit) -> Policy<'a> {
        let outcome = &status.outcome;
        let policy = Policy::new(decision.limit_name(status), limit.rate().count, Window::from_limit(limit));
        if outcome.verdict == Verdict::Unknown {
            let is_failed = self.disposition == Disposition::Unavailable
                && decision.denying_limit().is_some_and(|denying| denying.rule == status.rule);
            let policy = match self.disposition {
                Disposition::Unavailable => {
                    policy.with_remaining(0).with_reset(self.retry_after.unwrap_or_default())
                }
                Disposition::Allowed | Disposition::Denied => policy,
            };
            return Policy { is_known: false, is_failed, ..policy };
        }
        let wait = match outcome.verdict {
            Verdict::Denied { retry_after } => retry_after.map_or(u64::MAX, TimeDelta::ceil_secs),
            Verdict::Allowed { .. } | Verdict::Unknown => 0,
        };
        let policy = policy.with_remaining(outcome.remaining).with_exact_reset(outcome.reported_reset());
        Policy { is_over: decision.is_over(status), wait, ..policy }
    }

    /// Marks the policies of rules with several windows.
    fn mark_repeated_rules(&mut self) {
        for at in 1..self.policies.len() {
            for earlier in 0..at {
                if self.policies[at].rule == self.policies[earlier].rule {
                    self.policies[at].is_one_of_several = true;
                    self.policies[earlier].is_one_of_several = true;
                }
            }
        }
    }

    /// Returns the limit nearest exhaustion.
    #[must_use]
    pub fn nearest(&self) -> Option<&Policy<'a>> {
        self.policies.iter().min_by_key(|policy| policy.nearness())
    }

    /// Returns the limit that a denial is attributed to: of the rule's limits that denied, the one that lasts longest.
    pub(super) fn denying(&self) -> Option<&Policy<'a>> {
        let is_own = |policy: &&Policy<'a>| policy.is_over && Some(policy.rule) == self.denied_by;
        let own = self.policies.iter().filter(is_own).min_by_key(|policy| policy.nearness());
        own.or_else(|| self.nearest())
    }

    /// Returns the limit nearest exhaustion among those of rates.
    #[must_use]
    pub fn nearest_rate(&self) -> Option<&Policy<'a>> {
        let rates = self.policies.iter().filter(|policy| policy.window != Window::Concurrent);
        rates.min_by_key(|policy| policy.nearness())
    }

    /// Returns the limit nearest exhaustion among those of requests at once. A denial that did not read it tells
    /// nothing about it.
    #[must_use]
    pub fn nearest_concurrency(&self) -> Option<&Policy<'a>> {
        let permits = self.policies.iter().filter(|policy| policy.window == Window::Concurrent);
        let nearest = permits.min_by_key(|policy| policy.nearness());
        nearest.filter(|policy| policy.is_known || self.disposition != Disposition::Denied)
    }
}

/// Returns the emergency measure that blocks the request, and the seconds until it ends.
fn blocked_by(decision: &Decision) -> Option<(&str, u64)> {
    let is_blocked = decision.denied_by == Some(DecidedBy::Emergency);
    let ends = decision.retry_after().map_or(0, |left| left.ceil_secs().max(1));
    is_blocked.then(|| (decision.name(DecidedBy::Emergency), ends))
}

fn denying_rule(decision: &Decision) -> Option<&Rule> {
    match decision.denied_by? {
        DecidedBy::Rule(id) => decision.rules().rule(id),
        _ => None,
    }
}

fn guards(decision: &Decision, by: DecidedBy) -> bool {
    match by {
        DecidedBy::Rule(_) => denying_rule(decision).is_some_and(|rule| rule.class == Class::Security),
        // A caller that operators blocked counts as abusive.
        DecidedBy::Emergency => true,
        _ => false,
    }
}
