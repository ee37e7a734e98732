//! Span of a request in a sampled trace: from the end of its head to the end of its response, recorded on drop. Requests
//! without a trace have none, and their trace headers are forwarded unchanged.

use crate::route::Route;
use http::Method;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_engine::{ForwardedRequest, Limiter, TraceContext};

/// A span in progress.
pub(crate) struct RequestSpan<S: CounterStore> {
    limiter: Arc<Limiter<S>>,
    trace: TraceContext,
    method: Method,
    route: Arc<Route>,
    /// Response status; `None` if the client disconnected before it.
    pub(crate) status: Option<u16>,
}

impl<S: CounterStore> RequestSpan<S> {
    pub(crate) fn new(
        limiter: &Arc<Limiter<S>>,
        trace: TraceContext,
        method: &Method,
        route: &Arc<Route>,
    ) -> Box<Self> {
        Box::new(Self {
            limiter: Arc::clone(limiter),
            trace,
            method: method.clone(),
            route: Arc::clone(route),
            status: None,
        })
    }
}

impl<S: CounterStore> Drop for RequestSpan<S> {
    fn drop(&mut self) {
        let Self { trace, method, route, status, .. } = self;
        let passed = ForwardedRequest {
            trace: *trace,
            method: method.as_str(),
            route: &route.config.path,
            status: *status,
        };
        self.limiter.record_forwarded(&passed);
    }
}
