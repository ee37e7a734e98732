//! `GET /healthz` (does the process run?), `/readyz` (should requests be sent here?), `/metrics`, `/v1/hot` (the keys
//! with the most traffic at this node).

use super::{Answer, json_answer, typed};
use crate::Status;
use hyper::{StatusCode, Uri};
use serde_json::json;

pub(crate) fn answer(status: &dyn Status, uri: &Uri) -> Answer {
    match uri.path() {
        "/healthz" => typed(StatusCode::OK, "text/plain; charset=utf-8", "ok\n"),
        "/v1/hot" => typed(StatusCode::OK, "application/json", status.hot().to_string()),
        "/metrics" => typed(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", status.metrics()),
        _ => ready(status, uri.query().unwrap_or("")),
    }
}

fn ready(status: &dyn Status, query: &str) -> Answer {
    let ready = status.is_ready();
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let verbose = query.split('&').any(|word| word == "verbose" || word.starts_with("verbose="));
    let mut body = if verbose { status.details() } else { json!({}) };
    body["ready"] = ready.into();
    json_answer(code, format!("{body:#}\n").into_bytes())
}
