//! The tower layer that limits the callers of a service. Denied requests, including their bodies, never reach the
//! service.

use crate::body::LimitedBody;
use crate::check_request::Extracted;
use crate::decider::{Decider, LayerDecision};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
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
use tollgate_http::problem::{MEDIA_TYPE, Problem};
use tollgate_http::traceparent::TRACEPARENT;
use tower_layer::Layer;
use tower_service::Service;

/// Default maximum number of requests delayed by `action: delay`.
const MAX_DELAYED: usize = 1024;

/// A layer that limits the callers of the inner service. `X` extracts the check request from each request; a request
/// for which it returns `None` is not limited, and one for which it returns an error is refused ([`Extracted`]).
pub struct TollgateLayer<D, X> {
    shared: Arc<Shared<D, X>>,
}

struct Shared<D, X> {
    decider: D,
    extract: X,
    queue: DelayQueue,
}

impl<D: Decider, E: Into<Extracted>, X: Fn(&Parts) -> E> TollgateLayer<D, X> {
    /// Creates a layer that decides with `decider` what `extract` returns for a request.
    pub fn new(decider: D, extract: X) -> Self {
        Self::with_queue(decider, extract, MAX_DELAYED)
    }

    /// Creates a layer that delays at most `max_delayed` requests for `action: delay`; more are shed with 503.
    pub fn with_queue(decider: D, extract: X, max_delayed: usize) -> Self {
        Self { shared: Arc::new(Shared { decider, extract, queue: DelayQueue::new(max_delayed) }) }
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

impl<S, D, X, B, R, E> Service<Request<B>> for TollgateService<S, D, X>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Body<Data = Bytes>,
    D: Decider,
    X: Fn(&Parts) -> E + Send + Sync + 'static,
    E: Into<Extracted>,
{
    type Response = Response<LimitedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The request takes the service that is ready; its clone must become ready for the next request.
        let copy = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, copy);
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            // Only the layer may set these markers, also on requests that are not limited.
            head.headers.remove("x-ratelimit-degraded");
            head.headers.remove("x-ratelimit-warning");
            let extracted = (shared.extract)(&head).into();
            let mut check = match extracted {
                Extracted::Check(check) => check,
                Extracted::Refused(error) => {
                    let is_grpc = is_grpc(&head);
                    return Ok(denial(refusal(&Problem::identity(&error)), is_grpc));
                }
                Extracted::Unlimited => {
                    let response = inner.call(Request::from_parts(head, body)).await?;
                    return Ok(response.map(|body| LimitedBody::passing(body, None)));
                }
            };
            check.traceparent = check.traceparent.or_else(|| head.headers.get(&TRACEPARENT).cloned());
            let mut decided = shared.decider.decide(check).await;
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
                if let Some(hold) = &mut decided.hold
                    && let Err(shed) = hold.enter().await
                {
                    // Dropping the decision refunds the charge.
                    return Ok(denial(*shed, is_grpc));
                }
            }
            if let Some(hold) = &mut decided.hold {
                hold.begin();
            }
            head.headers.extend(decided.markers);
            let mut response = inner.call(Request::from_parts(head, body)).await?;
            if let Some(hold) = &mut decided.hold {
                let is_stream = response.status() == StatusCode::SWITCHING_PROTOCOLS
                    || response.body().size_hint().exact().is_none();
                hold.answered(response.status(), is_stream);
            }
            response.headers_mut().extend(decided.response.into_parts().0.headers);
            Ok(response.map(|body| LimitedBody::passing(body, decided.hold)))
        })
    }
}

/// Turns a decision into a 503 because the delay queue is full. Dropping the result refunds the charge.
fn shed(decided: LayerDecision) -> LayerDecision {
    let mut response = decided.response;
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    // Rounded up, so that a retry is never earlier than the end of the delay.
    let seconds = decided.delay.as_secs() + u64::from(decided.delay.subsec_nanos() > 0);
    response.headers_mut().insert(http::header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
    LayerDecision { response, is_allowed: false, hold: decided.hold, ..LayerDecision::pass() }
}

/// Turns a problem into a decision that denies the request.
fn refusal(problem: &Problem) -> LayerDecision {
    let mut response = Response::new(Bytes::from(problem.body()));
    *response.status_mut() = problem.status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    if problem.status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    LayerDecision { response, is_allowed: false, ..LayerDecision::pass() }
}

fn is_grpc(head: &Parts) -> bool {
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    kind.is_some_and(|kind| kind.starts_with(b"application/grpc"))
}

/// Returns the response for a denial. gRPC clients get a gRPC status and no body.
fn denial<R: Body>(decided: LayerDecision, is_grpc: bool) -> Response<LimitedBody<R>> {
    let (mut head, body) = decided.response.into_parts();
    if !is_grpc {
        return Response::from_parts(head, LimitedBody::denying(body));
    }
    let (code, text) = match head.status {
        StatusCode::SERVICE_UNAVAILABLE => ("14", "the request could not be checked"),
        StatusCode::UNAUTHORIZED => ("16", "the credential cannot be read"),
        StatusCode::BAD_REQUEST => ("3", "the request is ambiguous or malformed"),
        _ => ("8", "rate limit exceeded"),
    };
    head.status = StatusCode::OK;
    head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    head.headers.insert("grpc-status", HeaderValue::from_static(code));
    head.headers.insert("grpc-message", HeaderValue::from_static(text));
    Response::from_parts(head, LimitedBody::denying(Bytes::new()))
}
