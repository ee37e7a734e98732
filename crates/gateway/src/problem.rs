//! Error responses of the gateway itself, as RFC 9457 problem details.

use http::StatusCode;
use tollgate_http::h1::RawResponse;

pub(crate) const MEDIA_TYPE: &str = "application/problem+json";

/// Returns the body of a problem response.
pub(crate) fn body(status: StatusCode, detail: &str) -> String {
    let body = serde_json::json!({
        "type": "about:blank",
        "title": status.canonical_reason().unwrap_or("error"),
        "status": status.as_u16(),
        "detail": detail,
    });
    body.to_string()
}

/// Returns a complete problem response.
pub(crate) fn response(status: StatusCode, detail: &str) -> RawResponse {
    RawResponse::new(status, MEDIA_TYPE, body(status, detail))
}
