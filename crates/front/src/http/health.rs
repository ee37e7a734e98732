//! `GET /healthz` (does the process run?), `/readyz` (should requests be sent here?), `/metrics`, `/v1/hot` (the keys
//! with the most traffic at this node).

use super::{Answer, request::Request, typed};
use crate::Status;
use hyper::header::ACCEPT;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::json;
use tollgate_edge::fields::Fields;
use tollgate_edge::h1;
use tollgate_observe::{Format, Page};

/// On the admin address.
pub(crate) fn answer(status: &dyn Status, uri: &Uri, headers: &HeaderMap) -> Answer {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let (code, kind, text) = said(status, uri.path(), uri.query().unwrap_or(""), accept);
    typed(code, kind, text)
}

/// On the HTTP address.
pub(super) fn told(status: &dyn Status, request: &Request<'_>) -> h1::Answer {
    let accept = request.fields.all(&ACCEPT).next().and_then(|accept| std::str::from_utf8(accept).ok());
    let (code, kind, text) = said(status, request.path, request.query, accept.unwrap_or_default());
    h1::Answer::new(code, kind, text)
}

fn said(status: &dyn Status, path: &str, query: &str, accept: &str) -> (StatusCode, &'static str, String) {
    match path {
        "/healthz" => (StatusCode::OK, "text/plain; charset=utf-8", "ok\n".to_owned()),
        "/v1/hot" => (StatusCode::OK, "application/json", status.hot().to_string()),
        "/metrics" => {
            let format = Format::accepted(accept);
            let mut page = Page::new(format);
            status.metrics(&mut page);
            (StatusCode::OK, format.media_type(), page.finish())
        }
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
