//! Problem details (RFC 9457) for rejected requests: a title, the field that is wrong, and how to fix it.

use crate::h1;
use crate::headers::HeaderSink;
use crate::identity::AmbiguousIdentity;
use http::header::{ALLOW, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Method, StatusCode};
use serde_json::json;

/// The problem type of a path that this version does not have; it distinguishes that 404 from a missing record.
pub const NO_SUCH_PATH: &str = "urn:tollgate:problem:no-such-path";

/// The media type of [`Problem::body`].
pub const MEDIA_TYPE: &str = "application/problem+json";

/// An error response for the client.
#[derive(Debug)]
pub struct Problem {
    /// The status of the response.
    pub status: StatusCode,
    /// The problem type, a URI; `about:blank` if the status is sufficient.
    pub kind: &'static str,
    /// The kind of error, in a few words.
    pub title: &'static str,
    /// What is wrong with this request, and what to do.
    pub detail: String,
    /// The part of the body that is wrong, as a path such as `descriptors[0].entries[1].value`.
    pub place: Option<String>,
    /// The methods that the path supports, as the header `Allow` lists them.
    pub allow: Option<String>,
}

impl Problem {
    /// Creates a problem that names no field.
    pub fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, kind: "about:blank", title, detail: detail.into(), place: None, allow: None }
    }

    /// Creates the problem for a malformed request (400).
    pub fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Bad request", detail)
    }

    /// Creates the problem for a request that servers would read differently (400), or whose credential cannot be read
    /// or is not known (401).
    #[must_use]
    pub fn identity(error: &AmbiguousIdentity) -> Self {
        match error.status() {
            StatusCode::UNAUTHORIZED => {
                let title = match error {
                    AmbiguousIdentity::UnknownKey => "Unknown credential",
                    _ => "Unreadable credential",
                };
                Self::new(StatusCode::UNAUTHORIZED, title, error.to_string())
            }
            status => Self::new(status, "Ambiguous request", error.to_string()),
        }
    }

    /// Sets the path of the field that is wrong.
    #[must_use]
    pub fn in_field(mut self, field: impl Into<String>) -> Self {
        self.place = Some(field.into());
        self
    }

    /// Creates the problem for an unknown path (404); `try_instead` names one that exists.
    #[must_use]
    pub fn not_found(path: &str, try_instead: &str) -> Self {
        let shown: String = path.chars().take(100).collect();
        let detail = format!("there is nothing at `{shown}`; try {try_instead}");
        Self { kind: NO_SUCH_PATH, ..Self::new(StatusCode::NOT_FOUND, "Not found", detail) }
    }

    /// Creates the problem for a method that the path does not support (405); `allowed` is the one that it does.
    #[must_use]
    pub fn wrong_method(allowed: &Method) -> Self {
        Self::wrong_methods(allowed.to_string())
    }

    /// Creates the same problem for several allowed methods, in the format of `Allow`.
    #[must_use]
    pub fn wrong_methods(allowed: String) -> Self {
        let mut problem =
            Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed", format!("use {allowed} here"));
        problem.allow = Some(allowed);
        problem
    }

    /// Returns the JSON body of the response.
    #[must_use]
    pub fn body(&self) -> String {
        let mut body = json!({
            "type": self.kind,
            "title": self.title,
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if let Some(place) = &self.place {
            body["field"] = place.as_str().into();
        }
        body.to_string()
    }

    /// Converts the problem to a response of this crate's HTTP/1 server.
    #[must_use]
    pub fn response(self) -> h1::RawResponse {
        let mut response = h1::RawResponse::new(self.status, MEDIA_TYPE, self.body());
        if let Some(methods) = self.allow {
            response.put(&ALLOW, methods.as_bytes());
        }
        if response.status == StatusCode::UNAUTHORIZED {
            response.put(&WWW_AUTHENTICATE, b"Bearer");
        }
        if response.status == StatusCode::SERVICE_UNAVAILABLE {
            // What is unavailable is probed every second or two.
            response.put(&RETRY_AFTER, b"1");
        }
        response
    }
}
