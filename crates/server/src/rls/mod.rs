//! Envoy's rate limit service.
//!
//! [`handle`] is the protocol: messages in, messages out, no transport in sight, so that another HTTP/2 server can carry
//! it. `service` puts it on tonic; `sdk_extension` is what the Rust layer asks beyond it. A malformed request is the caller's error and nobody else's.

pub(crate) mod codec;
mod decode;
mod encode;
mod incoming;
mod sdk_extension;
mod service;

pub use decode::BadRequest;
pub use service::{RlsConfig, serve};

/// The protocol's messages.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/envoy.rs"));
    /// All messages, for reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rls.fds"));
}

use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_core::CounterStore;
use tollgate_engine::{Check, Decision, Limiter, TraceContext};

/// Answers one request, which may be part of a trace.
///
/// # Errors
/// [`BadRequest`] if the request is not one.
pub async fn handle<S: CounterStore>(
    limiter: &Limiter<S>,
    request: &RateLimitRequest,
    trace: Option<&TraceContext>,
) -> Result<RateLimitResponse, BadRequest> {
    let decision = decide(limiter, "rls", request, trace).await?;
    Ok(encode::response(&decision))
}

/// Decides on one request that came by `front`, without putting the answer on the wire.
///
/// # Errors
/// [`BadRequest`] if the request is not one.
pub async fn decide<S: CounterStore>(
    limiter: &Limiter<S>,
    front: &'static str,
    request: &RateLimitRequest,
    trace: Option<&TraceContext>,
) -> Result<Decision, BadRequest> {
    let entries = decode::entries(request)?;
    let descriptors = decode::descriptors(request, &entries)?;
    let check = Check::descriptors(&request.domain, &descriptors).with_cost(decode::hits(request));
    Ok(limiter.check(&check.with_protocol(front).with_trace(trace)).await)
}

pub use encode::response;
