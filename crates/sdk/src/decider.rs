//! The seam between the layer and who decides: this process, or a server.

use crate::check_request::CheckRequest;
use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use std::any::Any;
use std::future::Future;
use std::time::Duration;

/// Decides on requests.
pub trait Decider: Send + Sync + 'static {
    /// Decides. Cannot fail: who cannot decide answers by policy.
    fn decide(&self, ask: CheckRequest) -> impl Future<Output = LayerDecision> + Send;
}

/// A decision, as the layer needs it.
#[derive(Debug)]
pub struct LayerDecision {
    /// What to answer where it is a denial; where it is none, a 200 whose fields go onto the service's own answer.
    pub response: Response<Bytes>,
    /// Whether the request may pass.
    pub is_allowed: bool,
    /// Fields for the service itself: `X-RateLimit-Degraded`, `X-RateLimit-Warning`.
    pub markers: HeaderMap,
    /// How long to hold it back before it passes.
    pub delay: Duration,
    /// What the request holds while it is under way, given back by being dropped.
    pub hold: Option<Box<dyn HeldResource>>,
}

/// Something that a request holds.
pub trait HeldResource: Any + Send + std::fmt::Debug {
    /// Its turn has come: from now on only what lasts as long as the request is given back.
    fn begin(&mut self);
}

impl LayerDecision {
    /// A request that passes without anything to say of it.
    #[must_use]
    pub fn pass() -> Self {
        Self::from_response(Response::new(Bytes::new()))
    }

    /// By the status of an answer: 200 passes.
    pub(crate) fn from_response(answer: Response<Bytes>) -> Self {
        let passes = answer.status() == StatusCode::OK;
        let mut marks = HeaderMap::new();
        for name in ["x-ratelimit-degraded", "x-ratelimit-warning"] {
            if let Some(value) = answer.headers().get(name).filter(|_| passes) {
                marks.insert(name, value.clone());
            }
        }
        Self { response: answer, is_allowed: passes, markers: marks, delay: Duration::ZERO, hold: None }
    }
}
