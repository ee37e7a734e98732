//! Limiting the callers of a service. A denied request never reaches it, nor does any of its body.

use crate::body::LimitedBody;
use crate::check_request::CheckRequest;
use crate::decider::{Decider, LayerDecision};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tollgate_core::TimeDelta;
use tollgate_engine::DelayQueue;
use tollgate_http::traceparent::TRACEPARENT;
use tower_layer::Layer;
use tower_service::Service;

/// Requests held back at once by `action: delay`, where nothing else is said.
const MAX_DELAYED: usize = 1024;

/// A layer that limits whoever calls the service below it. `X` says what each request is to the rules; a request of which
/// it says nothing is not limited.
pub struct TollgateLayer<D, X> {
    shared: Arc<Shared<D, X>>,
}

struct Shared<D, X> {
    decider: D,
    extract: X,
    queue: DelayQueue,
}

impl<D: Decider, X: Fn(&Parts) -> Option<CheckRequest>> TollgateLayer<D, X> {
    /// Decides by `decider` on what `extract` says of a request.
    pub fn new(decide: D, extract: X) -> Self {
        Self::with_queue(decide, extract, MAX_DELAYED)
    }

    /// With room for so many requests that `action: delay` holds back; more are answered with 503.
    pub fn with_queue(decide: D, extract: X, most_waiting: usize) -> Self {
        Self { shared: Arc::new(Shared { decider: decide, extract, queue: DelayQueue::new(most_waiting) }) }
    }
}

impl<D, X> Clone for TollgateLayer<D, X> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<D, X> fmt::Debug for TollgateLayer<D, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TollgateLayer").finish_non_exhaustive()
    }
}

impl<S, D, X> Layer<S> for TollgateLayer<D, X> {
    type Service = TollgateService<S, D, X>;
    fn layer(&self, inner: S) -> Self::Service {
        TollgateService { inner, shared: Arc::clone(&self.shared) }
    }
}

/// A service whose callers are limited.
pub struct TollgateService<S, D, X> {
    inner: S,
    shared: Arc<Shared<D, X>>,
}

impl<S: Clone, D, X> Clone for TollgateService<S, D, X> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, D, X> fmt::Debug for TollgateService<S, D, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TollgateService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, D, X, B, R> Service<Request<B>> for TollgateService<S, D, X>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Body<Data = Bytes>,
    D: Decider,
    X: Fn(&Parts) -> Option<CheckRequest> + Send + Sync + 'static,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready goes with the request; its copy becomes ready for the next.
        let copy = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, copy);
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            // Nobody but us may say that a request is served in a lesser way, of those that are not limited neither.
            head.headers.remove("x-ratelimit-degraded");
            head.headers.remove("x-ratelimit-warning");
            let Some(mut ask) = (shared.extract)(&head) else {
                let answer = inner.call(Request::from_parts(head, body)).await?;
                return Ok(answer.map(|body| LimitedBody::passing(body, None)));
            };
            ask.traceparent = ask.traceparent.or_else(|| head.headers.get(&TRACEPARENT).cloned());
            let mut decided = shared.decider.decide(ask).await;
            let is_grpc = is_grpc(&head);
            if !decided.is_allowed {
                return Ok(denial(decided, is_grpc));
            }
            if !decided.delay.is_zero() {
                let delay =
                    TimeDelta::from_micros(u64::try_from(decided.delay.as_micros()).unwrap_or(u64::MAX));
                if shared.queue.wait(delay).await.is_err() {
                    return Ok(denial(shed(decided), is_grpc));
                }
            }
            if let Some(hold) = &mut decided.hold {
                hold.begin();
            }
            head.headers.extend(decided.markers);
            let mut answer = inner.call(Request::from_parts(head, body)).await?;
            answer.headers_mut().extend(decided.response.into_parts().0.headers);
            Ok(answer.map(|body| LimitedBody::passing(body, decided.hold)))
        })
    }
}

/// Too many are held back already: what it took is given back, and its caller comes again.
fn shed(decided: LayerDecision) -> LayerDecision {
    let mut answer = decided.response;
    *answer.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    // Never sooner than it would have passed.
    let seconds = decided.delay.as_secs() + u64::from(decided.delay.subsec_nanos() > 0);
    answer.headers_mut().insert(http::header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
    LayerDecision { response: answer, is_allowed: false, hold: decided.hold, ..LayerDecision::pass() }
}

fn is_grpc(head: &Parts) -> bool {
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    kind.is_some_and(|kind| kind.starts_with(b"application/grpc"))
}

/// The denial as an answer. Callers over gRPC read a status of that protocol, and no body.
fn denial<R: Body>(decided: LayerDecision, is_grpc: bool) -> Response<LimitedBody<R>> {
    let (mut head, body) = decided.response.into_parts();
    if !is_grpc {
        return Response::from_parts(head, LimitedBody::denying(body));
    }
    let (code, text) = if head.status == StatusCode::SERVICE_UNAVAILABLE {
        ("14", "no decision can be made")
    } else {
        ("8", "over the limit")
    };
    head.status = StatusCode::OK;
    head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    head.headers.insert("grpc-status", HeaderValue::from_static(code));
    head.headers.insert("grpc-message", HeaderValue::from_static(text));
    Response::from_parts(head, LimitedBody::denying(Bytes::new()))
}
