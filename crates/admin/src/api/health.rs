//! `GET /healthz`, `/readyz`, `/metrics`: as on the HTTP address, but figures are for those who may read.

use super::schemas::Readiness;
use crate::AdminState;
use crate::auth::Viewer;
use crate::response::typed;
use axum::extract::State;
use axum::response::Response;
use http::header::ACCEPT;
use http::{HeaderMap, StatusCode, Uri};
use std::sync::Arc;
use tollgate_observe::{ExpositionFormat, Verbosity};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const TEXT: &str = "text/plain; charset=utf-8";

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(healthz)).routes(routes!(readyz)).routes(routes!(metrics))
}

/// Does the process run?
#[utoipa::path(get, path = "/healthz", operation_id = "GET__healthz",
    responses((status = 200, description = "It does.", body = String, content_type = "text/plain")),
    extensions(("x-role" = json!("anybody"))))]
async fn healthz() -> Response {
    typed(StatusCode::OK, TEXT, "ok\n")
}

/// Should requests be sent here?
#[utoipa::path(get, path = "/readyz", operation_id = "GET__readyz",
    params(("verbose" = Option<String>, Query, description = "With the state of rules, store and database.")),
    responses((status = 200, description = "They should.", body = Readiness),
        (status = 503, description = "They should not.", body = Readiness)),
    extensions(("x-role" = json!("anybody"))))]
async fn readyz(State(admin): State<Arc<AdminState>>, uri: Uri) -> Response {
    let (ready, text) = admin.status.readiness(Verbosity::from_query(uri.query().unwrap_or_default()));
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    typed(status, "application/json", text)
}

/// The figures of the process, as Prometheus reads them.
#[utoipa::path(get, path = "/metrics", operation_id = "GET__metrics",
    responses((status = 200, description = "Figures.",
        content((String = "text/plain"), (String = "application/openmetrics-text")))),
    extensions(("x-role" = json!("viewer"))))]
async fn metrics(State(admin): State<Arc<AdminState>>, _: Viewer, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (format, status) = (ExpositionFormat::accepted(accept), Arc::clone(&admin.status));
    // Beside the threads that decide: where there are many rules, figures take long.
    match tokio::task::spawn_blocking(move || status.metrics_text(format)).await {
        Ok(text) => typed(StatusCode::OK, format.media_type(), text),
        Err(_) => typed(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "not found out; try again\n"),
    }
}
