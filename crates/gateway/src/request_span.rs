//! The span of a request that is part of a trace: from when its head was read until its answer is over. Whatever comes of
//! it, it is told when it is dropped. Requests without a trace have none, and pass their fields on as they came.

use crate::route::Route;
use http::Method;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_engine::{ForwardedRequest, Limiter, TraceContext};

/// A span that has begun.
pub(crate) struct RequestSpan<S: CounterStore> {
    limiter: Arc<Limiter<S>>,
    trace: TraceContext,
    method: Method,
    route: Arc<Route>,
    /// None, where the caller left before there was one.
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
