//! What the gateway says on its own account, in the form of RFC 9457.

use crate::body::Outgoing;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};

/// An answer that says what is wrong.
pub(crate) fn answer(status: StatusCode, detail: &str) -> Response<Outgoing> {
    let body = serde_json::json!({
        "type": "about:blank",
        "title": status.canonical_reason().unwrap_or("error"),
        "status": status.as_u16(),
        "detail": detail,
    });
    let mut answer = Response::new(Outgoing::here(Bytes::from(body.to_string())));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    answer
}
