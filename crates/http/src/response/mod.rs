//! The HTTP response to a decision: status, `RateLimit` and `Retry-After` fields, 429 body. All HTTP protocol servers
//! share it.
//!
//! ```
//! use tollgate_http::response::{ResponseConfig, DecisionSummary, Policy, Disposition};
//! use tollgate_core::{TimeDelta, Timestamp};
//! use tollgate_engine::Window;
//!
//! let minute = Policy::new("per-key", 100, Window::Rolling(TimeDelta::from_secs(60))).with_remaining(0).with_reset(12).denied();
//! let facts = DecisionSummary { disposition: Disposition::Denied, retry_after: Some(12), ..DecisionSummary::from_policies([minute]) };
//! let response = ResponseConfig::default().respond(&facts, Timestamp::from_secs(1_000));
//! assert_eq!(response.status(), 429);
//! assert_eq!(response.headers()["ratelimit"], "\"per-key\";r=0;t=12");
//! assert_eq!(response.headers()["ratelimit-policy"], "\"per-key\";q=100;w=60");
//! assert_eq!(response.headers()["x-ratelimit-reset"], "1012");
//! assert_eq!(response.headers()["retry-after"], "12");
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `summary` | the facts of a decision, from the engine or from a server |
//! | `scope` | the endpoint and the identity that a denial was about, masked |
//! | `headers` | the header fields |
//! | `denial_body` | the body of a denial, by the settings or by a rule's template |
//! | `field_value` | a field value builder without an allocation for each part |
//!
//! 429 means that the caller is over its own limit; 503 means that no decision was possible and the rule fails closed,
//! or that load is shed. The two are never mixed: a caller that receives a 503 has not exceeded a limit.

mod denial_body;
mod field_value;
mod headers;
mod scope;
mod summary;

pub use denial_body::render;
pub use scope::RequestScope;
pub use summary::{DecisionSummary, Disposition, Policy};

use crate::headers::HeaderSink;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Response, StatusCode};
use serde::Deserialize;
use tollgate_core::Timestamp;

/// Settings for the responses to decisions.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseConfig {
    /// Version of the `RateLimit` fields.
    pub ratelimit: Dialect,
    /// Format of the `X-RateLimit-*` fields.
    pub legacy: LegacyHeaders,
    /// Denials name their rule in `X-RateLimit-Denied-By`, and those of `/check` the reason in `X-RateLimit-Reason`.
    pub denied_by: bool,
    /// Status of a denial.
    pub status: DenialStatus,
    /// Format of a denial's body.
    pub body: BodyFormat,
    /// A page about the limits, named in the body of a denial.
    pub documentation_url: Option<DocumentationUrl>,
    /// Responses name the counter nearest exhaustion in `X-RateLimit-Bucket`.
    pub bucket: bool,
}

impl Default for ResponseConfig {
    fn default() -> Self {
        Self {
            ratelimit: Dialect::Draft11,
            legacy: LegacyHeaders::Epoch,
            denied_by: true,
            status: DenialStatus::default(),
            body: BodyFormat::Problem,
            documentation_url: None,
            bucket: false,
        }
    }
}

/// The version of the `RateLimit` fields. The standard is still a draft and may rename parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// draft-ietf-httpapi-ratelimit-headers-11.
    #[serde(rename = "draft-11")]
    Draft11,
    /// Not written.
    None,
}

/// The `X-RateLimit-*` fields that precede the standard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LegacyHeaders {
    /// Not written.
    None,
    /// `X-RateLimit-Reset` is a point in time, in seconds since 1970, as in GitHub's API.
    Epoch,
    /// `X-RateLimit-Reset` is the number of seconds left, as in Envoy.
    Delta,
}

/// The format of a denial's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BodyFormat {
    /// `application/problem+json` (RFC 9457), with the problem types that the draft registers.
    Problem,
    /// `{"error": {"code", "message", "retry_after", "limit", "window", "scope"}}`.
    Plain,
    /// Type, status and `retry_after` alone, in at most 200 bytes, for floods of denials.
    Minimal,
}

/// The address of a page about the limits.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct DocumentationUrl(String);

impl TryFrom<String> for DocumentationUrl {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        match text.parse::<http::Uri>() {
            Ok(url) if matches!(url.scheme_str(), Some("http" | "https")) && text.len() <= 2048 => {
                Ok(Self(text))
            }
            _ => Err(format!(
                "invalid `documentation_url: {text}`; write an address such as https://example.com/limits"
            )),
        }
    }
}

/// The status of a denial: 429, or another 4xx for clients that expect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u16")]
pub struct DenialStatus(StatusCode);

impl Default for DenialStatus {
    fn default() -> Self {
        Self(StatusCode::TOO_MANY_REQUESTS)
    }
}

impl TryFrom<u16> for DenialStatus {
    type Error = String;
    fn try_from(code: u16) -> Result<Self, String> {
        match StatusCode::from_u16(code) {
            Ok(status) if status.is_client_error() => Ok(Self(status)),
            _ => Err(format!(
                "invalid denial status `status: {code}`; write 429, 403 or another from 400 to 499"
            )),
        }
    }
}

impl ResponseConfig {
    /// Returns the status: 200, that of the denying rule, else the denial status, or 503.
    #[must_use]
    pub fn status(&self, facts: &DecisionSummary<'_>) -> StatusCode {
        match facts.disposition {
            Disposition::Denied => {
                let own = facts.response.and_then(|response| StatusCode::from_u16(response.status?).ok());
                own.unwrap_or(self.status.0)
            }
            Disposition::Allowed | Disposition::Unavailable => facts.disposition.status(),
        }
    }

    /// Sets all header fields, replacing those of the same names. Only `legacy: epoch` uses `now`, for facts without the
    /// time of their decision.
    pub fn write(&self, facts: &DecisionSummary<'_>, now: Timestamp, headers: &mut impl HeaderSink) {
        headers::write(self, facts, now, headers);
    }

    /// Returns the media type and the body of a denial; `None` for an allowed request.
    #[must_use]
    pub fn body(&self, facts: &DecisionSummary<'_>) -> Option<(&'static str, Bytes)> {
        let mut bytes = Vec::new();
        self.write_body(facts, &mut bytes).map(|kind| (kind, Bytes::from(bytes)))
    }

    /// Appends the body of a denial to `out` and returns its media type; `None` for an allowed request.
    pub fn write_body(&self, facts: &DecisionSummary<'_>, out: &mut Vec<u8>) -> Option<&'static str> {
        (facts.disposition != Disposition::Allowed).then(|| denial_body::write(self, facts, out))
    }

    /// Returns the complete response: 200 without a body, or a denial with its body.
    #[must_use]
    pub fn respond(&self, facts: &DecisionSummary<'_>, now: Timestamp) -> Response<Bytes> {
        let (kind, body) = self.body(facts).unzip();
        let mut response = Response::new(body.unwrap_or_default());
        *response.status_mut() = self.status(facts);
        response.headers_mut().reserve(8);
        if let Some(kind) = kind {
            response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
        }
        self.write(facts, now, response.headers_mut());
        response
    }
}

/// Sets the markers of a degraded request (`X-RateLimit-Degraded`) and of one over a soft limit
/// (`X-RateLimit-Warning`), each with the rule's name, for the upstream to act on.
pub fn write_markers(facts: &DecisionSummary<'_>, headers: &mut impl HeaderSink) {
    headers::write_markers(facts, headers);
}
