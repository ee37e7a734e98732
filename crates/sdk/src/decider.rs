//! The decider interface between the layer and the limiter, which is in this process or on a server.

use crate::check_request::CheckRequest;
use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// Decides requests.
pub trait Decider: Send + Sync + 'static {
    /// Decides a request. It cannot fail: if the limiter is unavailable, the fail policy decides.
    fn decide(&self, request: CheckRequest) -> impl Future<Output = LayerDecision> + Send;
}

/// A decision, in the form that the layer uses.
#[derive(Debug)]
pub struct LayerDecision {
    /// The response to send for a denial; for an allowed request, a 200 whose fields are added to the service's
    /// response.
    pub response: Response<Bytes>,
    /// The request may pass.
    pub is_allowed: bool,
    /// Request fields for the service: `X-RateLimit-Degraded`, `X-RateLimit-Warning`.
    pub markers: HeaderMap,
    /// Delay before the request may proceed.
    pub delay: Duration,
    /// Permits and delay-queue entries of the request in flight; dropping it releases them.
    pub hold: Option<Box<dyn HeldResource>>,
}

/// The result of [`HeldResource::enter`].
pub(crate) type Entering<'h> = Pin<Box<dyn Future<Output = Result<(), Box<LayerDecision>>> + Send + 'h>>;

/// A resource that a request in flight holds.
pub trait HeldResource: Any + Send + std::fmt::Debug {
    /// Called after the delay, when the request proceeds: from then on a drop releases permits and refunds no charge.
    fn begin(&mut self);

    /// Called after a delay, before the request proceeds: takes what it could not hold meanwhile. An error is the denial
    /// to answer with.
    fn enter(&mut self) -> Entering<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Called when the service has answered with this status; its body may still follow, for as long as the reader likes if
    /// `is_stream`.
    fn answered(&mut self, status: StatusCode, is_stream: bool) {
        let _ = (status, is_stream);
    }
}

impl LayerDecision {
    /// Returns a decision that allows the request and adds no fields.
    #[must_use]
    pub fn pass() -> Self {
        Self::from_response(Response::new(Bytes::new()))
    }

    /// Creates a decision from a response: 200 means allowed.
    pub(crate) fn from_response(response: Response<Bytes>) -> Self {
        let is_allowed = response.status() == StatusCode::OK;
        let mut markers = HeaderMap::new();
        for name in ["x-ratelimit-degraded", "x-ratelimit-warning"] {
            if let Some(value) = response.headers().get(name).filter(|_| is_allowed) {
                markers.insert(name, value.clone());
            }
        }
        Self { response, is_allowed, markers, delay: Duration::ZERO, hold: None }
    }
}
