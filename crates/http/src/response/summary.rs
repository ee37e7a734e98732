//! What a decision has to say, whoever made it: the engine beside us, or a server that was asked.
//!
//! Only limits that can turn a request away are told: a shadow's number would make callers slow down for nothing.
//! `RateLimit` carries the limit nearest exhaustion: on a denial the denying one that lasts longest, else the one with the
//! fewest units left (not the smallest share left: the next request takes units, not shares).

use http::StatusCode;
use smallvec::SmallVec;
use tollgate_core::{Algorithm, Limit, Span, Verdict};
use tollgate_engine::{Decision, DecisionId, LimitStatus, Origin, RulingBy, Window};
use tollgate_rules::{Action, Class, RuleLimit};

/// What became of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// It may pass.
    Allowed,
    /// Its caller is over a limit.
    Denied,
    /// Nobody could decide, and the rule turns such requests away; or load is shed.
    Unavailable,
}

impl Disposition {
    /// Its status where nothing else is set.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Allowed => StatusCode::OK,
            Self::Denied => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// One limit that the request met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy<'a> {
    /// Its rule's name.
    pub rule: &'a str,
    /// Units a window.
    pub quota: u64,
    /// The window.
    pub window: Window,
    /// Units left.
    pub remaining: u64,
    /// Seconds, rounded up: until the same request would pass if it was denied, until the next unit if none is left, else
    /// until the limit is as good as unused.
    pub reset: u64,
    /// Whether it denied this request.
    pub is_over: bool,
    /// Whether the rule has other windows here, so that the name alone would not tell them apart.
    pub is_one_of_several: bool,
}

impl<'a> Policy<'a> {
    /// A limit of which nothing has been taken.
    #[must_use]
    pub const fn new(rule: &'a str, quota: u64, window: Window) -> Self {
        Self { rule, quota, window, remaining: quota, reset: 0, is_over: false, is_one_of_several: false }
    }

    /// With so many units left.
    #[must_use]
    pub const fn with_remaining(mut self, units: u64) -> Self {
        self.remaining = units;
        self
    }

    /// With so many seconds to go.
    #[must_use]
    pub const fn with_reset(mut self, seconds: u64) -> Self {
        self.reset = seconds;
        self
    }

    /// Denying this request.
    #[must_use]
    pub const fn denied(mut self) -> Self {
        self.is_over = true;
        self
    }

    /// The window in whole seconds, rounded up so that nobody paces too fast; a month has no length, permits no window.
    pub(crate) fn seconds(&self) -> Option<u64> {
        match self.window {
            Window::Span(span) => Some(span.ceil_secs().max(1)),
            Window::Calendar(tollgate_core::CalendarUnit::Day) => Some(86_400),
            Window::Calendar(_) | Window::Held => None,
        }
    }

    fn nearness(&self) -> (bool, u64, std::cmp::Reverse<u64>) {
        (!self.is_over, if self.is_over { 0 } else { self.remaining }, std::cmp::Reverse(self.reset))
    }
}

/// Everything that an answer is written from.
#[derive(Clone, Debug)]
pub struct DecisionSummary<'a> {
    /// What became of the request.
    pub disposition: Disposition,
    /// The limits that it met and that can deny, in the order of the rules.
    pub policies: SmallVec<[Policy<'a>; 4]>,
    /// Seconds to stay away, on a denial.
    pub retry_after: u64,
    /// The rule that denied.
    pub denied_by: Option<&'a str>,
    /// The rule by which the request should be served in a lesser way.
    pub degraded_by: Option<&'a str>,
    /// The rule whose soft mark has been passed.
    pub warned_by: Option<&'a str>,
    /// Whether the rule that denied guards against abuse (`class: security`).
    pub is_abnormal: bool,
    /// The decision's name.
    pub decision: Option<DecisionId>,
}

impl<'a> DecisionSummary<'a> {
    /// An allowed request that met these.
    #[must_use]
    pub fn from_policies(policies: impl IntoIterator<Item = Policy<'a>>) -> Self {
        let mut facts = Self {
            disposition: Disposition::Allowed,
            policies: policies.into_iter().collect(),
            retry_after: 0,
            denied_by: None,
            degraded_by: None,
            warned_by: None,
            is_abnormal: false,
            decision: None,
        };
        facts.mark_repeated_rules();
        facts
    }

    /// What the engine decided.
    #[must_use]
    pub fn from_decision(decision: &'a Decision) -> Self {
        let name = |by: Option<RulingBy>| by.map(|by| decision.name(by));
        let mut facts = Self {
            decision: Some(decision.id),
            degraded_by: name(decision.degraded_by),
            warned_by: name(decision.warned_by),
            ..Self::from_policies([])
        };
        if !decision.is_allowed() {
            facts.disposition = if decision.origin == Origin::FailClosed {
                Disposition::Unavailable
            } else {
                Disposition::Denied
            };
            facts.retry_after = retry_after(decision);
            facts.denied_by = name(decision.denied_by);
            facts.is_abnormal = decision.denied_by.is_some_and(|by| guards(decision, by));
        }
        let mut seen: SmallVec<[&RuleLimit; 4]> = SmallVec::new();
        for status in &decision.limits {
            let told = status.role.is_live() && status.outcome.verdict != Verdict::Unanswered;
            let Some(limit) = decision.limit(status).filter(|_| told) else { continue };
            let policy = facts.policy(decision, status, &limit.limit);
            // Two descriptors may meet one limit: its tighter counter is told.
            match seen.iter().position(|known| std::ptr::eq(*known, limit)) {
                Some(at) if policy.nearness() < facts.policies[at].nearness() => facts.policies[at] = policy,
                Some(_) => {}
                None => {
                    seen.push(limit);
                    facts.policies.push(policy);
                }
            }
        }
        facts.mark_repeated_rules();
        facts
    }

    fn policy(&self, decision: &'a Decision, status: &LimitStatus, limit: &Limit) -> Policy<'a> {
        let degrades = status
            .rule
            .and_then(|id| decision.rules().rule(id))
            .is_some_and(|rule| rule.action == Action::Degrade);
        let outcome = &status.outcome;
        let reset = match outcome.verdict {
            Verdict::Denied { retry_after: Some(wait) } => wait.ceil_secs(),
            Verdict::Denied { retry_after: None } if !degrades => self.retry_after,
            Verdict::Denied { retry_after: None } => outcome.reset_after.ceil_secs(),
            _ if outcome.remaining == 0 => next_unit(limit, outcome.reset_after).ceil_secs(),
            _ => outcome.reset_after.ceil_secs(),
        };
        Policy {
            remaining: outcome.remaining,
            reset,
            is_over: outcome.verdict.is_denied() && !degrades,
            ..Policy::new(decision.limit_name(status), limit.quota().count, Window::of(limit))
        }
    }

    /// Marks the windows of rules that have several here.
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

    /// The limit nearest exhaustion.
    #[must_use]
    pub fn nearest(&self) -> Option<&Policy<'a>> {
        self.policies.iter().min_by_key(|policy| policy.nearness())
    }
}

fn guards(decision: &Decision, by: RulingBy) -> bool {
    match by {
        RulingBy::Rule(id) => decision.rules().rule(id).is_some_and(|rule| rule.class == Class::Security),
        RulingBy::Own => false,
        // Whom operators shut out they hold for abusive.
        RulingBy::Emergency => true,
    }
}

/// When an empty limit has a unit again. A bucket gains one at each interval; the others tell only when they turn.
fn next_unit(limit: &Limit, full: Span) -> Span {
    match limit.algorithm() {
        Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            let (count, period) = (u128::from(limit.quota().count), limit.quota().period.length());
            let others = u128::from(limit.capacity().saturating_sub(1)) * u128::from(period.as_micros());
            let others = u64::try_from(others.checked_div(count).unwrap_or(0)).unwrap_or(u64::MAX);
            Span::from_micros(full.as_micros().saturating_sub(others).max(1))
        }
        _ => full,
    }
}

/// Whole seconds, rounded up. A request that can never pass is sent away for the longest window that it met.
fn retry_after(decision: &Decision) -> u64 {
    let longest = decision.limits.iter().map(|status| {
        match decision.limit(status).map(|facts| Window::of(&facts.limit)) {
            Some(Window::Span(span)) => span.ceil_secs(),
            _ => status.outcome.reset_after.ceil_secs(),
        }
    });
    let wait = decision.retry_after().map(Span::ceil_secs);
    wait.or_else(|| longest.max()).unwrap_or(1).max(1)
}
