//! The decision in the form that a layer uses: the limit fields of the server's response, and for a denial a response of
//! this program.

use super::result::{CheckReason, CheckResult, RuleResponse};
use crate::decider::LayerDecision;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, Response, StatusCode};
use std::time::Duration;
use tollgate_core::Timestamp;
use tollgate_http::problem::{MEDIA_TYPE, Problem};
use tollgate_http::response::{DecisionSummary, Disposition, ResponseConfig};

/// Returns the decision for a layer. `fields` are those of the server's response, if a server decided.
pub(crate) fn layer_decision(
    result: &CheckResult,
    fields: &HeaderMap,
    responses: &ResponseConfig,
    now: Timestamp,
) -> LayerDecision {
    if result.reason == CheckReason::Rejected {
        return LayerDecision::from_response(rejection(result));
    }
    let disposition = match (result.is_allowed, result.reason) {
        (true, _) => Disposition::Allowed,
        (false, CheckReason::Denied) => Disposition::Denied,
        (false, _) => Disposition::Unavailable,
    };
    let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let retry_after = match disposition {
        Disposition::Allowed => None,
        Disposition::Denied => result.retry_after.map(|wait| seconds(wait).max(1)),
        Disposition::Unavailable => Some(result.retry_after.map_or(1, |wait| seconds(wait).max(1))),
    };
    let facts = DecisionSummary {
        disposition,
        retry_after,
        denied_by: result.rule.as_deref().filter(|_| disposition == Disposition::Denied),
        ..DecisionSummary::from_policies([])
    };
    let mut response = responses.respond(&facts, now);
    if let Some(own) = result.response.as_ref().filter(|_| disposition == Disposition::Denied) {
        apply(own, &mut response);
    }
    for name in fields.keys().filter(|name| is_limit_field(name)) {
        response.headers_mut().remove(name);
    }
    let fields = fields.iter().filter(|(name, _)| is_limit_field(name));
    response.headers_mut().extend(fields.map(|(name, value)| (name.clone(), value.clone())));
    LayerDecision {
        is_allowed: result.is_allowed,
        delay: result.delay,
        ..LayerDecision::from_response(response)
    }
}

/// Puts a rule's status and body in the place of the program's own.
fn apply(own: &RuleResponse, response: &mut Response<Bytes>) {
    if let Some(status) = own.status.and_then(|status| StatusCode::from_u16(status).ok()) {
        *response.status_mut() = status;
    }
    if let Some(body) = &own.body {
        *response.body_mut() = body.clone();
        let kind = own.content_type.as_deref().and_then(|kind| HeaderValue::from_str(kind).ok());
        let kind = kind.unwrap_or(HeaderValue::from_static("application/json"));
        response.headers_mut().insert(CONTENT_TYPE, kind);
    }
}

/// The response to a request that cannot be checked because of itself, or of this program.
fn rejection(result: &CheckResult) -> Response<Bytes> {
    let (status, body) = match &result.problem {
        Some(problem) => (problem.status, problem.body.clone()),
        None => (400, Problem::bad("The request could not be checked.").body().into()),
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    if response.status() == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

fn is_limit_field(name: &HeaderName) -> bool {
    let name_text = name.as_str();
    name_text.starts_with("ratelimit") || name_text.starts_with("x-ratelimit-") || *name == RETRY_AFTER
}
