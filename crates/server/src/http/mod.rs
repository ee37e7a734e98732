//! The HTTP protocol server: JSON over HTTP/1.1.
//!
//! | path | file | purpose |
//! |---|---|---|
//! | `POST /v1/check` | `check` | checks a request: 200 or 429, with the decision in the body |
//! | `POST /v1/reserve`, `/v1/settle`, `/v1/cancel` | `reserve` | charges an estimate, then the actual cost |
//! | `ANY /check`, `/check/*` | `forward_auth`, by `forward_domain` | checks the request that a proxy describes |
//! | `POST /v1/signals` | `signals` | how a service is doing, for limits that follow it |
//! | `POST /json` | `rls_json` | the JSON of Envoy's rate limit service |
//! | `GET /healthcheck`, `ANY /json` | `ratelimit_service` | the paths of envoyproxy/ratelimit, in its place |
//! | `GET /healthz`, `/readyz[?verbose]`, `/metrics`, `/v1/hot` | `health` | health, metrics and hot keys |
//!
//! `request_head` reads the head that a client has received, and `identities` has the resolvers that identify its caller.
//! `server` runs it on the HTTP/1 server ([`tollgate_http::server`]); `decision` is the JSON form of a decision.
//! Rejected: a router, because there are few paths and every request passes here.

mod check;
mod decision;
mod forward_auth;
mod forward_domain;
mod health;
mod identities;
mod pages;
mod ratelimit_service;
pub(crate) mod request;
mod request_head;
mod reserve;
mod rls_json;
mod server;
mod signals;

pub(crate) use decision::DecisionBody;
pub use forward_auth::{ForwardAuth, ForwardAuthConfig, ForwardAuthError};
pub use forward_domain::ForwardDomain;
pub use pages::{Page, Pages, serve_pages};
pub use request_head::{IdentifiedCaller, identify_head};
pub(crate) use reserve::MAX_RESERVATION_MILLIS;
pub use server::{ALPN, HttpConfig, serve};

use crate::rls::ResponseStyle;
use http::Method;
use problem::Problem;
use request::Request;
use std::sync::Arc;
use tollgate_core::{CounterStore, Timestamp};
use tollgate_engine::{Limiter, TraceContext};
use tollgate_http::headers::HeaderLookup;
use tollgate_http::response::ResponseConfig;
use tollgate_http::{h1, json_request as body, problem, same_site, traceparent};
use tollgate_observe::ProcessStatus;

/// State shared by all handlers.
pub(crate) struct App<S> {
    pub(crate) limiter: Arc<Limiter<S>>,
    pub(crate) status: Arc<dyn ProcessStatus>,
    pub(crate) responses: ResponseConfig,
    pub(crate) forward_auth: ForwardAuth,
    /// The paths that are served.
    pub(crate) api: HttpApi,
    /// What `/json` contains beside the statuses.
    pub(crate) style: ResponseStyle,
    /// Whether the listener is on a loopback address.
    pub(crate) is_loopback: bool,
}

/// The paths of the HTTP server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HttpApi {
    /// All of Tollgate's.
    #[default]
    Full,
    /// Those of envoyproxy/ratelimit: `/healthcheck` and `/json`.
    RatelimitService,
}

impl HttpApi {
    /// Returns whether the body of such a request is read.
    fn has_body(self, method: &str, path: &str) -> bool {
        match self {
            Self::Full => method == "POST" && is_check_path(path),
            Self::RatelimitService => path == "/json",
        }
    }
}

/// Returns whether a path is for programs alone. Forward auth passes on what a browser sends to a proxy, and probes may
/// name the host as they like.
fn is_for_programs(path: &str) -> bool {
    !forward_auth::is_at(path) && !matches!(path, "/healthz" | "/readyz")
}

/// Returns whether a path is part of the JSON API, which uses POST.
fn is_check_path(path: &str) -> bool {
    matches!(path, "/v1/check" | "/v1/reserve" | "/v1/settle" | "/v1/cancel" | "/v1/signals" | "/json")
}

/// Returns whether a response at this path is a decision.
fn decides(path: &str) -> bool {
    matches!(path, "/v1/check" | "/v1/reserve" | "/json") || forward_auth::is_at(path)
}

impl<S: CounterStore + 'static> App<S> {
    /// Serves one request.
    async fn handle(&self, request: &Request<'_>) -> h1::RawResponse {
        if !decides(request.path) {
            return route(self, request, Timestamp::ZERO, None).await.unwrap_or_else(Problem::response);
        }
        let began = self.limiter.clock().now();
        let trace = traceparent::from_headers(&self.limiter, &request.fields, || began);
        let response = route(self, request, began, trace.as_ref()).await;
        if response.is_ok() {
            self.limiter.record_latency("http", 1, self.limiter.clock().now().since(began));
        }
        response.unwrap_or_else(Problem::response)
    }
}

/// Dispatches a request by its path. The frequent handlers are awaited in place and the others in a box, because a
/// connection's future is as large as its largest state.
async fn route<S: CounterStore + 'static>(
    app: &App<S>,
    request: &Request<'_>,
    now: Timestamp,
    trace: Option<&TraceContext>,
) -> Result<h1::RawResponse, Problem> {
    let body = request.body;
    if app.api == HttpApi::RatelimitService {
        return Ok(Box::pin(ratelimit_service::handle(app, request, trace)).await);
    }
    if is_for_programs(request.path) {
        same_site::reject_cross_site(&request.fields)?;
        if app.is_loopback {
            let host = request.authority.map(str::as_bytes);
            same_site::reject_foreign_host(host.or_else(|| request.fields.first(&http::header::HOST)))?;
        }
    }
    match (request.path, request.method) {
        ("/v1/check", "POST") => check::handle(app, body, now, trace).await,
        (path, _) if forward_auth::is_at(path) => forward_auth::handle(app, request, now, trace).await,
        ("/v1/reserve", "POST") => Box::pin(reserve::reserve(app, body, now, trace)).await,
        ("/v1/settle", "POST") => Box::pin(reserve::settle(&app.limiter, body)).await,
        ("/v1/cancel", "POST") => Box::pin(reserve::cancel(&app.limiter, body)).await,
        ("/v1/signals", "POST") => signals::record(app, body),
        ("/json", "POST") => Box::pin(rls_json::handle(app, body, trace)).await,
        (path, _) if is_check_path(path) => Err(Problem::wrong_method(&Method::POST)),
        ("/healthz" | "/readyz" | "/metrics" | "/v1/hot", "GET" | "HEAD") => {
            Ok(Box::pin(health::response(&app.status, request)).await)
        }
        ("/healthz" | "/readyz" | "/metrics" | "/v1/hot", _) => Err(Problem::wrong_method(&Method::GET)),
        (path, _) => Err(Problem::not_found(path, "POST /v1/check")),
    }
}

/// See [`crate::properties::json_bodies`].
pub(crate) fn properties(bytes: &[u8]) {
    check::properties(bytes);
    rls_json::properties(bytes);
    reserve::properties(bytes);
}
