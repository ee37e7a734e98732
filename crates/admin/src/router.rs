//! Routes of the admin listener, and the middleware that applies to all of them.
//!
//! A request passes, in order: the dashboard, which is public; the rejection of cross-site requests; the route; a
//! time limit; and the extractors of the handler, the first of which authenticates. `Viewer`, `Operator` or
//! `Administrator` in a handler's signature enforces the required role, and `x-role` in its annotation documents it;
//! a test compares the two.
//!
//! Literal path segments take precedence over parameters: an API key that is literally `by-id` is written `by%2Did`.

use crate::api::{
    audit, consumption, decision_export, decisions, emergency, explain, health, history, log_level, openapi,
    overload, quota_bulk, quota_preview, quotas, replica, rule_files, rule_tree, rules, stats, tokens, usage,
};
use crate::auth::tls::ClientPeer;
use crate::auth::{reject_cross_site, session};
use crate::conn::listener;
use crate::error::{ApiError, database_unavailable};
use crate::{AdminState, dashboard};
use axum::extract::{MatchedPath, Request};
use axum::middleware::{Next, from_fn, map_request, map_response};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderValue, REFERRER_POLICY, STRICT_TRANSPORT_SECURITY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderName, StatusCode};
use std::future::Future;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tollgate_http::problem::Problem;
use tollgate_http::server::connections::ConnectionSlots;
use tollgate_http::tls::ServerTls;
use utoipa_axum::router::OpenApiRouter;

/// Time limit until a response starts: a hanging database must not block operators.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Serves until `drain` completes, and then until all connections are drained. `slots` are of the budget that all
/// listeners of the process share; [`port_limits`] are those of this one.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    admin: AdminState,
    slots: ConnectionSlots,
    drain: impl Future<Output = ()> + Send,
) {
    let mut router = router(Arc::new(admin));
    if tls.is_some() {
        router = router.layer(map_response(with_strict_transport_security));
    }
    listener::serve(listener, tls, slots, drain, router).await;
}

/// Returns the documented routes.
pub(crate) fn api() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::with_openapi(openapi::header())
        .merge(session::routes())
        .merge(rule_tree::routes())
        .merge(rules::routes())
        .merge(rule_files::routes())
        .merge(quota_bulk::routes())
        .merge(quotas::routes())
        .merge(quota_preview::routes())
        .merge(usage::routes())
        .merge(emergency::routes())
        .merge(audit::routes())
        .merge(consumption::routes())
        .merge(log_level::routes())
        .merge(overload::routes())
        .merge(openapi::routes())
        .merge(health::routes())
        .merge(decisions::routes())
        .merge(decision_export::routes())
        .merge(explain::routes())
        .merge(stats::routes())
        .merge(history::routes())
        .merge(tokens::routes())
        .merge(replica::routes())
}

fn router(admin: Arc<AdminState>) -> Router {
    let (api, _) = api().split_for_parts();
    let routed = api
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .layer(from_fn(within_time_limit))
        .layer(from_fn(same_site_only))
        .with_state(admin)
        .merge(dashboard::routes())
        .layer(map_response(with_security_headers));
    Router::new().fallback_service(routed).layer(map_request(without_empty_segments))
}

/// Returns the router as it serves a client that has this name in its certificate, or none. For tests.
#[doc(hidden)]
pub fn router_for(admin: AdminState, name: Option<&str>) -> Router {
    let mut peer = ClientPeer::plain(Ipv4Addr::LOCALHOST.into());
    peer.names = name.map(str::to_owned).into_iter().collect();
    router(Arc::new(admin)).layer(Extension(peer))
}

/// The path as received.
#[derive(Clone)]
struct SentPath(String);

/// Replaces empty segments with a NUL. axum's path parameters never match an empty segment, but a client that sends
/// an empty key or id should get an error about that parameter. No key, id or number contains a NUL, so handlers
/// reject it with the same message.
async fn without_empty_segments(mut request: Request) -> Request {
    let path = request.uri().path();
    let Some(rest) = path.strip_prefix("/admin/v1/") else { return request };
    if !rest.split('/').any(str::is_empty) {
        return request;
    }
    let segments: Vec<&str> =
        rest.split('/').map(|part| if part.is_empty() { "%00" } else { part }).collect();
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let filled = format!("/admin/v1/{}{query}", segments.join("/"));
    let sent = SentPath(path.to_owned());
    if let Ok(uri) = filled.parse() {
        *request.uri_mut() = uri;
        request.extensions_mut().insert(sent);
    }
    request
}

async fn same_site_only(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match reject_cross_site(&parts) {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(problem) => ApiError(problem).into_response(),
    }
}

async fn within_time_limit(request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let limit = match (request.method().as_str(), path) {
        ("POST", quota_bulk::IMPORT) => quota_bulk::TIME_LIMIT,
        ("POST", rules::ALL | rules::PREVIEW | rules::CHECK | explain::PATH) => rules::TIME_LIMIT,
        _ => TIME_LIMIT,
    };
    let response = tokio::time::timeout(limit, next.run(request)).await;
    response.unwrap_or_else(|_| ApiError(database_unavailable()).into_response())
}

async fn not_found(request: Request) -> ApiError {
    let sent = request.extensions().get::<SentPath>().map(|sent| sent.0.as_str());
    ApiError(Problem::not_found(sent.unwrap_or(request.uri().path()), "GET /admin/v1/quotas"))
}

async fn method_not_allowed(path: MatchedPath) -> ApiError {
    ApiError(Problem::wrong_methods(openapi::methods(path.as_str())))
}

async fn with_strict_transport_security(mut response: Response) -> Response {
    let year = HeaderValue::from_static("max-age=31536000");
    response.headers_mut().insert(STRICT_TRANSPORT_SECURITY, year);
    response
}

/// Adds headers that keep responses out of caches, frames and other sites; a page sets its own policy.
async fn with_security_headers(mut response: Response) -> Response {
    let unauthorized = response.status() == StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    if unauthorized {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    let resources = HeaderName::from_static("cross-origin-resource-policy");
    headers.insert(resources, HeaderValue::from_static("same-origin"));
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(CONTENT_SECURITY_POLICY).or_insert(nothing);
    response
}
