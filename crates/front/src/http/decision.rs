//! A decision as JSON: the same body for allowed and denied.

use super::{Answer, json_answer};
use hyper::StatusCode;
use hyper::header::{HeaderValue, RETRY_AFTER};
use serde::Serialize;
use serde::ser::SerializeSeq;
use tollgate_core::Verdict;
use tollgate_engine::{Decision, LimitStatus, Origin, Window};
use tollgate_rules::Role;

#[derive(Serialize)]
pub(crate) struct Body<'a> {
    allowed: bool,
    denied_by: Option<&'a str>,
    retry_after_ms: Option<u64>,
    limits: Limits<'a>,
    delay_ms: u64,
    origin: &'static str,
    revision: &'a str,
    decision_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    degraded_by: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    warned_by: Option<&'a str>,
}

struct Limits<'a>(&'a Decision);

#[derive(Serialize)]
struct Limit<'a> {
    rule: &'a str,
    limit: u64,
    window: String,
    remaining: u64,
    reset_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    over: bool,
}

impl Serialize for Limits<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(None)?;
        for limit in self.0.limits.iter().filter(|limit| limit.outcome.verdict != Verdict::Unanswered) {
            if let Some(facts) = self.0.limit(limit) {
                list.serialize_element(&Limit::new(self.0, limit, &facts.limit))?;
            }
        }
        list.end()
    }
}

impl<'a> Limit<'a> {
    fn new(decision: &'a Decision, limit: &LimitStatus, facts: &tollgate_core::Limit) -> Self {
        let (count, capacity) = (facts.quota().count, facts.capacity());
        let role = match limit.role {
            Role::Live => None,
            Role::Shadow => Some("shadow"),
            Role::Candidate => Some("candidate"),
            Role::Quota => Some("quota"),
        };
        Self {
            rule: decision.limit_name(limit),
            limit: count,
            window: Window::of(facts).to_string(),
            remaining: limit.outcome.remaining,
            reset_ms: limit.outcome.reset_after.ceil_millis(),
            burst: (capacity != count).then_some(capacity),
            role,
            over: limit.outcome.verdict.is_denied(),
        }
    }
}

impl<'a> Body<'a> {
    pub(crate) fn new(decision: &'a Decision) -> Self {
        Self {
            allowed: decision.is_allowed(),
            denied_by: decision.denied_by_name(),
            retry_after_ms: decision.retry_after().map(tollgate_core::Span::ceil_millis),
            limits: Limits(decision),
            delay_ms: decision.delay().ceil_millis(),
            origin: decision.origin.name(),
            revision: decision.revision(),
            decision_id: decision.id.to_string(),
            degraded_by: decision.degraded_by.map(|by| decision.name(by)),
            warned_by: decision.warned_by.map(|by| decision.name(by)),
        }
    }
}

/// The answer with its status and, on a denial, when to come back.
pub(crate) fn answer(decision: &Decision, body: &impl Serialize) -> Answer {
    let status = match decision.origin {
        _ if decision.is_allowed() => StatusCode::OK,
        Origin::FailClosed => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::TOO_MANY_REQUESTS,
    };
    let mut answer = json_answer(status, serde_json::to_vec(body).unwrap_or_default());
    if !decision.is_allowed() {
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(retry_after_secs(decision)));
    }
    answer
}

/// Whole seconds, rounded up. A request that can never pass is sent away for the longest window that it met.
fn retry_after_secs(decision: &Decision) -> u64 {
    let longest = decision.limits.iter().map(|status| {
        match decision.limit(status).map(|facts| Window::of(&facts.limit)) {
            Some(Window::Span(span)) => span.ceil_secs(),
            _ => status.outcome.reset_after.ceil_secs(),
        }
    });
    let wait = decision.retry_after().map(tollgate_core::Span::ceil_secs);
    wait.or_else(|| longest.max()).unwrap_or(1).max(1)
}
