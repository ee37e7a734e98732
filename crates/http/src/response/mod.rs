//! What a caller is told of a decision: one place for every HTTP front.
//!
//! ```
//! use tollgate_http::response::{ResponseConfig, DecisionSummary, Policy, Disposition};
//! use tollgate_core::{TimeDelta, Timestamp};
//! use tollgate_engine::Window;
//!
//! let minute = Policy::new("per-key", 100, Window::Span(TimeDelta::from_secs(60))).left(0).until(12).over();
//! let facts = DecisionSummary { disposition: Disposition::Denied, retry_after: 12, ..DecisionSummary::from_policies([minute]) };
//! let answer = ResponseConfig::default().respond(&facts, Timestamp::ZERO);
//! assert_eq!(answer.status(), 429);
//! assert_eq!(answer.headers()["ratelimit"], "\"per-key\";r=0;t=12");
//! assert_eq!(answer.headers()["ratelimit-policy"], "\"per-key\";q=100;w=60");
//! assert_eq!(answer.headers()["retry-after"], "12");
//! ```
//!
//! | file | what |
//! |---|---|
//! | `summary` | what a decision has to say, whoever made it |
//! | `headers` | that as header fields |
//! | `body` | that as a denial's body |
//! | `field_value` | writing a field's value without allocating for each part |
//!
//! 429 says that a caller is over its own limit, 503 that nobody could decide and the rule fails closed, or that load is
//! shed. They are never mixed: a caller that gets a 503 has done nothing wrong.

mod body;
mod field_value;
mod headers;
mod summary;

pub use summary::{DecisionSummary, Disposition, Policy};

use crate::headers::HeaderSink;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Response, StatusCode};
use serde::Deserialize;
use tollgate_core::Timestamp;

/// How answers are written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseConfig {
    /// Which dialect of the `RateLimit` fields.
    pub ratelimit: Dialect,
    /// Whether `X-RateLimit-*` is written as well.
    pub legacy: LegacyHeaders,
    /// Whether a denial names its rule in `X-RateLimit-Denied-By`.
    pub denied_by: bool,
    /// The status of a caller over its limit.
    pub status: DenialStatus,
    /// The form of a denial's body.
    pub body: BodyFormat,
}

impl Default for ResponseConfig {
    fn default() -> Self {
        Self {
            ratelimit: Dialect::Draft11,
            legacy: LegacyHeaders::None,
            denied_by: true,
            status: DenialStatus::default(),
            body: BodyFormat::Problem,
        }
    }
}

/// The standard's fields are still a draft, and parameters may be renamed: each version is one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// draft-ietf-httpapi-ratelimit-headers-11.
    #[serde(rename = "draft-11")]
    Draft11,
    /// Not written.
    None,
}

/// The fields that came before the standard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LegacyHeaders {
    /// Not written.
    None,
    /// `X-RateLimit-Reset` is a point in time, in seconds since 1970, as GitHub has it.
    Epoch,
    /// `X-RateLimit-Reset` is seconds to go, as Envoy has it.
    Delta,
}

/// The form of a denial's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BodyFormat {
    /// `application/problem+json` (RFC 9457), with the types that the draft registers.
    Problem,
    /// `{"error": {"code", "message", "retry_after", "limit", "window", "scope"}}`.
    Plain,
}

/// The status of a denial: 429, or another of the client's errors for users who expect it.
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
                "`status: {code}` is no status of a denial; write 429, 403 or another of 400 to 499"
            )),
        }
    }
}

impl ResponseConfig {
    /// The status: 200, the denial's, or 503.
    #[must_use]
    pub const fn status(&self, disposition: Disposition) -> StatusCode {
        match disposition {
            Disposition::Denied => self.status.0,
            Disposition::Allowed | Disposition::Unavailable => disposition.status(),
        }
    }

    /// Adds all fields, in place of any of the same names. `now` is only asked for by `legacy: epoch`.
    pub fn write(&self, facts: &DecisionSummary<'_>, now: Timestamp, headers: &mut impl HeaderSink) {
        headers::write(self, facts, now, headers);
    }

    /// The body of a denial and its type; nothing for what may pass.
    #[must_use]
    pub fn body(&self, facts: &DecisionSummary<'_>) -> Option<(&'static str, Bytes)> {
        let mut bytes = Vec::new();
        self.write_body(facts, &mut bytes).map(|kind| (kind, Bytes::from(bytes)))
    }

    /// Writes the body of a denial and tells its type; nothing for what may pass.
    pub fn write_body(&self, facts: &DecisionSummary<'_>, out: &mut Vec<u8>) -> Option<&'static str> {
        (facts.disposition != Disposition::Allowed).then(|| body::write(self, facts, out))
    }

    /// The whole answer: 200 without a body, or the denial with its own.
    #[must_use]
    pub fn respond(&self, facts: &DecisionSummary<'_>, now: Timestamp) -> Response<Bytes> {
        let (kind, body) = self.body(facts).unzip();
        let mut answer = Response::new(body.unwrap_or_default());
        *answer.status_mut() = self.status(facts.disposition);
        answer.headers_mut().reserve(8);
        if let Some(kind) = kind {
            answer.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
        }
        self.write(facts, now, answer.headers_mut());
        answer
    }
}

/// Adds the marks of a request that passes in a lesser way (`X-RateLimit-Degraded`) or has been warned
/// (`X-RateLimit-Warning`), each with the rule's name: for the upstream, which should act on them.
pub fn write_markers(facts: &DecisionSummary<'_>, headers: &mut impl HeaderSink) {
    headers::write_markers(facts, headers);
}
