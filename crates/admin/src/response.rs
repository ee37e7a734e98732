//! Responses of the admin API.

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue};
use serde::Serialize;
use serde_json::json;
use tollgate_observe::escape;

/// Returns indented JSON, readable for people too.
pub(crate) fn json_response(status: StatusCode, body: &impl Serialize) -> Response {
    typed(status, "application/json", escape::json(&format!("{:#}\n", json!(body))).into_owned())
}

/// Returns compact JSON, for programs and large bodies.
pub(crate) fn compact_json(body: &impl Serialize) -> Response {
    typed(StatusCode::OK, "application/json", escape::json(&format!("{}\n", json!(body))).into_owned())
}

/// Returns a response with this media type.
pub(crate) fn typed(status: StatusCode, media_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// Returns an empty success response.
pub(crate) fn no_content() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}
