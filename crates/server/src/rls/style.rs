//! What a rate limit response contains beside its statuses: Tollgate's own headers and metadata, or those that
//! envoyproxy/ratelimit sends if asked.
//!
//! Envoy hands headers and metadata of the service to the caller and to other filters, so a service that takes the place of
//! another service must send nothing that it did not.

use super::decode::BadRequest;
use super::encode::{header, plain_response, response};
use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::service_metadata;
use std::fmt;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_engine::{Decision, Limiter, TraceContext};

/// Names of the headers that carry a limit, what is left of it, and the seconds until it is reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitHeaders {
    /// Name of the header with the limit.
    pub limit: String,
    /// Name of the header with what is left.
    pub remaining: String,
    /// Name of the header with the seconds until the reset.
    pub reset: String,
}

/// What responses contain beside their statuses.
#[derive(Clone, Default)]
pub enum ResponseStyle {
    /// Tollgate's own: a denial names its rule and its decision, and rules' metadata is passed on.
    #[default]
    Own,
    /// Nothing but what is asked for, as envoyproxy/ratelimit.
    Service {
        /// Headers of the limit that denies, or else has the least left.
        headers: Option<LimitHeaders>,
        /// Whether the request and the rules' metadata are sent as dynamic metadata.
        metadata: bool,
        /// Whether rules have been loaded; until then every check is an error.
        has_rules: Arc<dyn Fn() -> bool + Send + Sync>,
        /// Called with the protocol of each failed check.
        on_error: Arc<dyn Fn(&'static str) + Send + Sync>,
    },
}

impl fmt::Debug for ResponseStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "Own",
            Self::Service { .. } => "Service",
        })
    }
}

/// Why a check has no decision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RlsError {
    /// The request is invalid.
    #[error("{0}")]
    BadRequest(#[from] BadRequest),
    /// No rules have been loaded yet.
    #[error("no rate limit configuration loaded")]
    NoRules,
}

impl ResponseStyle {
    /// Decides one request that was received via the protocol `protocol`.
    ///
    /// # Errors
    /// [`RlsError`] if the request is invalid, or there are no rules yet.
    pub async fn decide<S: CounterStore>(
        &self,
        limiter: &Limiter<S>,
        protocol: &'static str,
        request: &RateLimitRequest,
        trace: Option<&TraceContext>,
    ) -> Result<Decision, RlsError> {
        let Self::Service { has_rules, on_error, .. } = self else {
            return Ok(super::decide(limiter, protocol, request, trace).await?);
        };
        let decided = if has_rules() {
            super::decide(limiter, protocol, request, trace).await.map_err(RlsError::from)
        } else {
            Err(RlsError::NoRules)
        };
        decided.inspect_err(|_| on_error(protocol))
    }

    /// Returns the response for a decision on this request.
    #[must_use]
    pub fn response(&self, request: &RateLimitRequest, decision: &Decision) -> RateLimitResponse {
        let Self::Service { headers, metadata, .. } = self else { return response(decision) };
        let mut response = plain_response(decision);
        if let Some(names) = headers {
            response.response_headers_to_add = limit_headers(names, &response.statuses);
        }
        if *metadata {
            response.dynamic_metadata = Some(service_metadata::metadata(request, decision, &response));
        }
        response
    }
}

/// Returns the headers of the limit that denies, the last of several, or else of the one with the least left, the first
/// of several.
fn limit_headers(names: &LimitHeaders, statuses: &[DescriptorStatus]) -> Vec<HeaderValue> {
    let limited = || statuses.iter().filter(|status| status.current_limit.is_some());
    let over = limited().rfind(|status| status.code == i32::from(Code::OverLimit));
    let Some(status) = over.or_else(|| limited().min_by_key(|status| status.limit_remaining)) else {
        return Vec::new();
    };
    let limit = status.current_limit.as_ref().map_or(0, |limit| limit.requests_per_unit);
    let reset = status.duration_until_reset.as_ref().map_or(0, |reset| reset.seconds);
    vec![
        header(&names.limit, &limit.to_string()),
        header(&names.remaining, &status.limit_remaining.to_string()),
        header(&names.reset, &reset.to_string()),
    ]
}
