//! Health endpoints: `GET /healthz`, `/readyz`, `/metrics`, as on the HTTP address, but metrics require the viewer
//! role.

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

/// Reports whether the process is running.
#[utoipa::path(get, path = "/healthz", operation_id = "GET__healthz",
    responses((status = 200, description = "The process is running.", body = String, content_type = "text/plain")),
    extensions(("x-role" = json!("anybody"))))]
async fn healthz() -> Response {
    typed(StatusCode::OK, TEXT, "ok\n")
}

/// Reports whether this node is ready for requests.
#[utoipa::path(get, path = "/readyz", operation_id = "GET__readyz",
    params(("verbose" = Option<String>, Query, description = "Include the state of rules, store and database.")),
    responses((status = 200, description = "Ready.", body = Readiness),
        (status = 503, description = "Not ready.", body = Readiness)),
    extensions(("x-role" = json!("anybody"))))]
async fn readyz(State(admin): State<Arc<AdminState>>, uri: Uri) -> Response {
    let (ready, text) = admin.status.readiness(Verbosity::from_query(uri.query().unwrap_or_default()));
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    typed(status, "application/json", text)
}

/// Returns the metrics in Prometheus or OpenMetrics text format.
#[utoipa::path(get, path = "/metrics", operation_id = "GET__metrics",
    responses((status = 200, description = "The metrics.",
        content((String = "text/plain"), (String = "application/openmetrics-text")))),
    extensions(("x-role" = json!("viewer"))))]
async fn metrics(State(admin): State<Arc<AdminState>>, _: Viewer, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (format, status) = (ExpositionFormat::accepted(accept), Arc::clone(&admin.status));
    // On a blocking thread, not on the threads that decide: with many rules, rendering takes long.
    match tokio::task::spawn_blocking(move || status.metrics_text(format)).await {
        Ok(text) => typed(StatusCode::OK, format.media_type(), text),
        Err(_) => typed(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "internal error; retry\n"),
    }
}
