//! The JSON form of a decision, with the same fields for allowed and denied requests.

use super::App;
use serde::Serialize;
use serde::ser::SerializeSeq;
use tollgate_core::{CounterStore, Verdict};
use tollgate_engine::{CheckInput, Decision, DecisionId, LimitStatus, Origin, Window};
use tollgate_http::h1::RawResponse;
use tollgate_http::response::DecisionSummary;
use tollgate_rules::{CostFrom, Role, RuleLimit};

/// Initial capacity in bytes; most bodies are shorter.
const ROOM: usize = 512;

#[derive(Serialize)]
pub(crate) struct DecisionBody<'a> {
    allowed: bool,
    denied_by: Option<&'a str>,
    retry_after_ms: Option<u64>,
    limits: Limits<'a>,
    delay_ms: u64,
    origin: &'static str,
    revision: &'a str,
    #[serde(serialize_with = "display")]
    decision_id: DecisionId,
    #[serde(skip_serializing_if = "Option::is_none")]
    degraded_by: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    warned_by: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    emergency: Option<&'a str>,
    /// Why the request was shed, or that its limits are tightened.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    /// The class up to which checks were shed, if the node was overloaded itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    shed: Option<&'static str>,
    /// What the denying rule has callers answered with, for those who answer them.
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<RuleResponse>,
}

/// The response that a rule sets, rendered.
#[derive(Serialize)]
struct RuleResponse {
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<&'static str>,
}

impl RuleResponse {
    fn new(decision: &Decision) -> Option<Self> {
        if decision.is_allowed() {
            return None;
        }
        let facts = DecisionSummary::from_decision(decision);
        let response = facts.response?;
        let body = response.body.as_deref().map(|template| {
            let mut bytes = Vec::new();
            tollgate_http::response::render(template, &facts, &mut bytes);
            // Text is all that is filled in.
            String::from_utf8(bytes).unwrap_or_default()
        });
        let content_type = response.body.as_deref().map(tollgate_rules::BodyTemplate::media_type);
        Some(Self { status: response.status, body, content_type })
    }
}

/// Serializes a value as text, without an intermediate string.
fn display<S: serde::Serializer>(value: &impl std::fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

struct Limits<'a>(&'a Decision);

#[derive(Serialize)]
struct Limit<'a> {
    rule: &'a str,
    limit: u64,
    #[serde(serialize_with = "display")]
    window: Window,
    remaining: u64,
    reset_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    over: bool,
    /// The counter was not read: a repeated denial, a store that failed, an emergency measure.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unread: bool,
}

impl Serialize for Limits<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(None)?;
        for limit in self.0.shown_limits() {
            if let Some(facts) = self.0.limit(limit) {
                list.serialize_element(&Limit::new(self.0, limit, facts))?;
            }
        }
        list.end()
    }
}

impl<'a> Limit<'a> {
    fn new(decision: &'a Decision, limit: &LimitStatus, from: &'a RuleLimit) -> Self {
        let facts = &from.limit;
        let (count, capacity) = (facts.rate().count, facts.capacity());
        let role = match limit.role {
            Role::Live if !decision.is_enforced(limit) => Some("degrade"),
            Role::Live => None,
            Role::Shadow => Some("shadow"),
            Role::Candidate => Some("candidate"),
            Role::Quota => Some("quota"),
            Role::Unenforced => Some("unenforced"),
        };
        let is_unread = limit.outcome.verdict == Verdict::Unknown;
        // As in the header fields: nothing is known to be counted against it, unless no request passes.
        let unread = if decision.origin == Origin::FailClosed { 0 } else { count };
        Self {
            rule: decision.limit_name(limit),
            limit: count,
            window: Window::from_limit(facts),
            remaining: if is_unread { unread } else { limit.outcome.remaining },
            reset_ms: limit.outcome.reported_reset().ceil_millis(),
            burst: (capacity != count).then_some(capacity),
            cost: match from.cost.as_deref() {
                Some(CostFrom::Attribute(name)) => Some(name),
                _ => None,
            },
            role,
            over: limit.outcome.verdict.is_denied(),
            unread: is_unread,
        }
    }
}

impl<'a> DecisionBody<'a> {
    pub(crate) fn new(decision: &'a Decision) -> Self {
        Self {
            allowed: decision.is_allowed(),
            denied_by: decision.denied_by_name(),
            retry_after_ms: decision.retry_after().map(tollgate_core::TimeDelta::ceil_millis),
            limits: Limits(decision),
            delay_ms: decision.delay().ceil_millis(),
            origin: decision.origin.name(),
            revision: decision.revision(),
            decision_id: decision.id(),
            degraded_by: decision.degraded_by.map(|by| decision.name(by)),
            warned_by: decision.warned_by.map(|by| decision.name(by)),
            emergency: decision.emergency(),
            reason: decision.reason.as_deref(),
            shed: decision.shed_class.map(tollgate_engine::ShedOrder::name),
            response: RuleResponse::new(decision),
        }
    }
}

/// Builds the response with the rate limit fields of every HTTP response. Its clients are programs, so the status is
/// always the API's own (200, 429, 503), not the configured denial status.
pub(crate) fn response<S: CounterStore>(
    app: &App<S>,
    input: CheckInput<'_>,
    decision: &Decision,
    body: &impl Serialize,
) -> RawResponse {
    let mut bytes = Vec::with_capacity(ROOM);
    // These types always serialize, and writing to memory cannot fail.
    let _ = serde_json::to_writer(&mut bytes, body);
    let scope = app.responses.scope(decision, input);
    let facts = DecisionSummary::from_decision(decision).with_scope(scope.as_deref());
    let mut response = RawResponse::json(facts.disposition.status(), bytes);
    app.responses.write(&facts, app.limiter.clock().now(), &mut response);
    response
}
