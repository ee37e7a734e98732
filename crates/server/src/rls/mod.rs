//! Envoy's rate limit service (RLS).
//!
//! [`handle`] implements the protocol without a transport (messages in, messages out), so that another HTTP/2 server
//! can host it. `service` runs it on tonic; `sdk_extension` is the extension for the Rust SDK. A malformed request is
//! always reported as the client's error.

pub(crate) mod codec;
mod decode;
mod dispatch;
mod encode;
mod health;
mod incoming;
mod incoming_tls;
mod listener;
mod sdk_extension;
mod service;
mod service_metadata;
mod style;

pub use decode::BadRequest;
pub use health::HealthNames;
pub use listener::{GrpcListener, UnixSocket};
pub use service::{ALPN, RlsConfig, serve};
pub use style::{LimitHeaders, ResponseStyle, RlsError};

/// The protobuf messages.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/envoy.rs"));
    /// The file descriptor set of all messages, for reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rls.fds"));
}

use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_core::CounterStore;
use tollgate_engine::{Check, CheckInput, Decision, Limiter, TraceContext};
use tollgate_http::response::{RequestScope, ResponseConfig};

/// Handles one request, which may be part of a trace.
///
/// # Errors
/// [`RlsError`] if the request is invalid, or there are no rules yet.
pub async fn handle<S: CounterStore>(
    limiter: &Limiter<S>,
    request: &RateLimitRequest,
    trace: Option<&TraceContext>,
    style: &ResponseStyle,
) -> Result<RateLimitResponse, RlsError> {
    let decision = style.decide(limiter, "rls", request, trace).await?;
    Ok(style.response(request, &decision))
}

/// Decides one request that was received via the protocol `protocol`, without encoding the response.
///
/// # Errors
/// [`BadRequest`] if the request is invalid.
pub async fn decide<S: CounterStore>(
    limiter: &Limiter<S>,
    protocol: &'static str,
    request: &RateLimitRequest,
    trace: Option<&TraceContext>,
) -> Result<Decision, BadRequest> {
    let entries = decode::entries(request)?;
    let descriptors = decode::descriptors(request, &entries)?;
    let check = Check::descriptors(&request.domain, &descriptors).with_cost(decode::hits(request));
    Ok(limiter.check(&check.with_protocol(protocol).with_trace(trace)).await)
}

pub use encode::response;

/// Returns what to report about the request of a decision; see [`ResponseConfig::scope`].
pub(crate) fn scope(
    responses: &ResponseConfig,
    request: &RateLimitRequest,
    decision: &Decision,
) -> Option<Box<RequestScope>> {
    // Decoded again, because few responses have it, and the decision must not borrow the request.
    let entries = decode::entries(request).ok()?;
    let descriptors = decode::descriptors(request, &entries).ok()?;
    responses.scope(decision, CheckInput::Descriptors(&descriptors))
}

/// Part of [`crate::properties::rls_request`].
pub(crate) fn properties(request: &RateLimitRequest) {
    let Ok(entries) = decode::entries(request) else { return };
    assert!(request.descriptors.len() <= 256 && entries.len() <= 256 * 64);
    assert!(entries.iter().all(|(key, value)| key.len().max(value.len()) <= 8 * 1024));
    if let Ok(descriptors) = decode::descriptors(request, &entries) {
        let count: usize = descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
        assert_eq!((descriptors.len(), count), (request.descriptors.len(), entries.len()));
    }
}
