//! What the gateway says on its own account, in the form of RFC 9457.

use http::StatusCode;
use tollgate_http::h1::RawResponse;

pub(crate) const MEDIA_TYPE: &str = "application/problem+json";

/// The body of a response that says what is wrong.
pub(crate) fn body(status: StatusCode, detail: &str) -> String {
    let body = serde_json::json!({
        "type": "about:blank",
        "title": status.canonical_reason().unwrap_or("error"),
        "status": status.as_u16(),
        "detail": detail,
    });
    body.to_string()
}

/// A whole response.
pub(crate) fn response(status: StatusCode, detail: &str) -> RawResponse {
    RawResponse::new(status, MEDIA_TYPE, body(status, detail))
}
