//! `GET /healthz` (does the process run?), `/readyz` (should requests be sent here?), `/metrics`, `/v1/hot` (the keys
//! with the most traffic at this node).

use super::{Answer, request::Request, typed};
use crate::Status;
use hyper::{StatusCode, Uri};
use serde_json::json;
use tollgate_edge::h1;

/// On the admin address.
pub(crate) fn answer(status: &dyn Status, uri: &Uri) -> Answer {
    let (code, kind, text) = said(status, uri.path(), uri.query().unwrap_or(""));
    typed(code, kind, text)
}

/// On the HTTP address.
pub(super) fn told(status: &dyn Status, request: &Request<'_>) -> h1::Answer {
    let (code, kind, text) = said(status, request.path, request.query);
    h1::Answer::new(code, kind, text)
}

fn said(status: &dyn Status, path: &str, query: &str) -> (StatusCode, &'static str, String) {
    match path {
        "/healthz" => (StatusCode::OK, "text/plain; charset=utf-8", "ok\n".to_owned()),
        "/v1/hot" => (StatusCode::OK, "application/json", status.hot().to_string()),
        "/metrics" => (StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", status.metrics()),
        _ => ready(status, query),
    }
}

fn ready(status: &dyn Status, query: &str) -> (StatusCode, &'static str, String) {
    let ready = status.is_ready();
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let verbose = query.split('&').any(|word| word == "verbose" || word.starts_with("verbose="));
    let mut body = if verbose { status.details() } else { json!({}) };
    body["ready"] = ready.into();
    (code, "application/json", format!("{body:#}\n"))
}
