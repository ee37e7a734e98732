//! Reads replies. A Tollgate server's has its decision as the HTTP API writes it, which is read as everywhere else
//! (`checks`); of another server of the protocol only the statuses are known.

use crate::checks::{Answer, CheckReason, CheckResult, Fault, read_check};
use crate::decider::LayerDecision;
use crate::rls::{DescriptorStatus, OK, OVER_LIMIT, RateLimitResponse};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use std::error::Error;
use std::time::Duration;
use tollgate_core::{CalendarUnit, TimeDelta, Timestamp};
use tollgate_engine::Window;
use tollgate_http::response::{DecisionSummary, Disposition, Policy, ResponseConfig};
use tonic::{Code, Status, TimeoutExpired};

/// What a server replied.
#[derive(Debug)]
pub(super) struct Replied {
    pub(super) answer: Answer,
    /// The reply, or the status of one that rejects the request.
    pub(super) reply: Result<RateLimitResponse, Status>,
}

impl Replied {
    /// Returns whether the server has no room for another reservation.
    pub(super) fn is_exhausted(&self) -> bool {
        self.reply.as_ref().is_err_and(|status| status.code() == Code::ResourceExhausted)
    }
}

/// Reads a reply, or the reason that there is none.
pub(super) fn read(result: Result<RateLimitResponse, Status>) -> Result<Replied, Fault> {
    let answer = match &result {
        Ok(reply) => read_reply(reply)?,
        Err(status) if is_rejection(status) => CheckResult::rejected(None).into(),
        Err(status) => {
            tracing::debug!(code = ?status.code(), message = status.message(), "no decision of a Tollgate server");
            return Err(fault(status));
        }
    };
    Ok(Replied { answer, reply: result })
}

/// Returns whether the request is at fault: one that is wrong, or that no server has room for, is so everywhere.
fn is_rejection(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition | Code::ResourceExhausted
    )
}

fn fault(status: &Status) -> Fault {
    let mut causes = std::iter::successors(status.source(), |cause| (*cause).source());
    match status.code() {
        Code::DeadlineExceeded => Fault::Timeout,
        _ if causes.any(|cause| cause.downcast_ref::<TimeoutExpired>().is_some()) => Fault::Timeout,
        // Only what this side found out has a cause.
        _ if status.source().is_some() => Fault::Unreachable,
        Code::Cancelled => Fault::Timeout,
        Code::Unauthenticated | Code::PermissionDenied => Fault::Unauthorized,
        Code::Unavailable | Code::Aborted => Fault::Unavailable,
        _ => Fault::InvalidResponse,
    }
}

fn read_reply(reply: &RateLimitResponse) -> Result<Answer, Fault> {
    let is_allowed = match reply.overall_code {
        OK => true,
        OVER_LIMIT => false,
        _ => return Err(Fault::InvalidResponse),
    };
    let status = field(reply, "tollgate-status").and_then(|status| status.parse::<u16>().ok());
    if status == Some(400) {
        return Ok(CheckResult::rejected(None).into());
    }
    let Some(decision) = field(reply, "tollgate-decision") else { return Ok(by_statuses(reply, is_allowed)) };
    // Denials have the status that the server is configured with.
    let status = match is_allowed {
        true => 200,
        false if status == Some(503) => 503,
        false => 429,
    };
    let answer = read_check(status, &Bytes::copy_from_slice(decision.as_bytes()))?;
    Ok(Answer { reservation: field(reply, "tollgate-reservation").map(str::to_owned), ..answer })
}

/// Reads the reply of a server that does not send its decision: of each descriptor the tightest limit is known.
fn by_statuses(reply: &RateLimitResponse, is_allowed: bool) -> Answer {
    let facts = summary(&reply.statuses, is_allowed);
    let number = |name: &str| field(reply, name).and_then(|number| number.parse::<u64>().ok());
    let nearest = facts.nearest();
    let is_ours = field(reply, "tollgate-status").is_some();
    // A Tollgate server leaves it out if the request can never pass.
    let retry_after = number("retry-after").or_else(|| facts.retry_after.filter(|_| !is_ours));
    let reason = if is_allowed { CheckReason::Allowed } else { CheckReason::Denied };
    let result = CheckResult {
        rule: nearest.map(|policy| policy.rule.to_owned()),
        limit: nearest.map(|policy| policy.quota),
        remaining: nearest.map(|policy| policy.remaining),
        reset_after: nearest.map(|policy| Duration::from_secs(policy.reset)),
        retry_after: if is_allowed { Some(Duration::ZERO) } else { retry_after.map(Duration::from_secs) },
        delay: Duration::from_millis(number("tollgate-delay-ms").unwrap_or(0)),
        ..CheckResult::by_server(is_allowed, reason)
    };
    let reservation = field(reply, "tollgate-reservation").map(str::to_owned);
    Answer { reservation, ..result.into() }
}

/// Returns the decision for a layer: the response of the server, or one that is generated from the statuses.
pub(super) fn layer_decision(
    reply: RateLimitResponse,
    responses: &ResponseConfig,
    now: Timestamp,
) -> LayerDecision {
    let is_allowed = reply.overall_code == OK;
    let Some(status) = field(&reply, "tollgate-status").and_then(|code| code.parse::<StatusCode>().ok())
    else {
        let facts = summary(&reply.statuses, is_allowed);
        return LayerDecision { is_allowed, ..LayerDecision::from_response(responses.respond(&facts, now)) };
    };
    let delay = field(&reply, "tollgate-delay-ms").and_then(|delay| delay.parse().ok()).unwrap_or(0);
    let mut response = Response::new(reply.raw_body);
    *response.status_mut() = status;
    for field in reply.response_headers_to_add {
        let parts = (HeaderName::try_from(&field.key), HeaderValue::try_from(field.value));
        if let (Ok(key), Ok(value)) = parts
            && !field.key.starts_with("tollgate-")
        {
            response.headers_mut().append(key, value);
        }
    }
    LayerDecision {
        is_allowed,
        delay: Duration::from_millis(delay),
        ..LayerDecision::from_response(response)
    }
}

/// Returns a field of the reply.
pub(super) fn field<'r>(reply: &'r RateLimitResponse, name: &str) -> Option<&'r str> {
    let mut all = reply.response_headers_to_add.iter();
    all.find(|field| field.key == name).map(|field| field.value.as_str())
}

/// Summarizes the response of another server of the protocol.
fn summary(statuses: &[DescriptorStatus], is_allowed: bool) -> DecisionSummary<'_> {
    let policies = statuses.iter().filter_map(|status| {
        let limit = status.current_limit.as_ref()?;
        let window = match limit.unit {
            2 => Window::Rolling(TimeDelta::from_secs(60)),
            3 => Window::Rolling(TimeDelta::from_secs(3_600)),
            4 => Window::Rolling(TimeDelta::from_secs(86_400)),
            5 => Window::Calendar(CalendarUnit::Month),
            6 => Window::Rolling(TimeDelta::from_secs(365 * 86_400)),
            7 => Window::Rolling(TimeDelta::from_secs(7 * 86_400)),
            _ => Window::Rolling(TimeDelta::from_secs(1)),
        };
        let reset = status
            .duration_until_reset
            .as_ref()
            .map_or(0, |reset| u64::try_from(reset.seconds).unwrap_or(0) + u64::from(reset.nanos > 0));
        let name = if limit.name.is_empty() { "default" } else { &limit.name };
        let policy = Policy::new(name, u64::from(limit.requests_per_unit), window)
            .with_remaining(u64::from(status.limit_remaining))
            .with_reset(reset);
        Some(if status.code == OVER_LIMIT { policy.denied() } else { policy })
    });
    let mut facts = DecisionSummary::from_policies(policies);
    if !is_allowed {
        facts.disposition = Disposition::Denied;
        facts.retry_after = Some(facts.nearest().map_or(1, |policy| policy.reset.max(1)));
        facts.denied_by = facts.nearest().map(|policy| policy.rule);
    }
    facts
}
