//! The paths of envoyproxy/ratelimit, with its statuses and bodies: `/healthcheck` and `/json`, by any method.

use super::request::Request;
use super::{App, rls_json};
use http::{StatusCode, header};
use tollgate_core::CounterStore;
use tollgate_engine::TraceContext;
use tollgate_http::h1::RawResponse;
use tollgate_http::headers::HeaderSink;
use tollgate_http::same_site;

const TEXT: &str = "text/plain; charset=utf-8";

pub(super) async fn handle<S: CounterStore>(
    app: &App<S>,
    request: &Request<'_>,
    trace: Option<&TraceContext>,
) -> RawResponse {
    match request.path {
        "/healthcheck" if app.status.is_ready() => RawResponse::new(StatusCode::OK, TEXT, "OK".to_owned()),
        "/healthcheck" => RawResponse::new(StatusCode::INTERNAL_SERVER_ERROR, TEXT, String::new()),
        "/json" => {
            // A page of another site must not spend a caller's limits.
            if same_site::reject_cross_site(&request.fields).is_err() {
                return error(StatusCode::FORBIDDEN, "Forbidden\n");
            }
            match rls_json::decide(app, request.body, trace).await {
                Ok((_, decision, message)) => {
                    // That service has no third status; its rules have no `overload` either.
                    let is_allowed = decision.is_allowed();
                    let status = if is_allowed { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
                    RawResponse::json(status, message)
                }
                Err(problem) => {
                    tracing::debug!("error: {}", problem.detail);
                    error(StatusCode::BAD_REQUEST, "Bad Request\n")
                }
            }
        }
        _ => error(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

/// Returns an error as Go's HTTP server writes it.
fn error(status: StatusCode, text: &str) -> RawResponse {
    let mut response = RawResponse::new(status, TEXT, text.to_owned());
    response.put(&header::X_CONTENT_TYPE_OPTIONS, b"nosniff");
    response
}
