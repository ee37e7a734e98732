//! What was wrong with a request, as problem+json (RFC 9457): a title, the place, and what to do.

use crate::h1;
use crate::headers::HeaderSink;
use http::header::ALLOW;
use http::{Method, StatusCode};
use serde_json::json;

/// The problem type of a path that this version does not have; clients tell it from a missing record by that.
pub const NO_SUCH_PATH: &str = "urn:tollgate:problem:no-such-path";

/// The media type of [`Problem::body`].
pub const MEDIA_TYPE: &str = "application/problem+json";

/// An error that goes to the client.
#[derive(Debug)]
pub struct Problem {
    /// The status of the response.
    pub status: StatusCode,
    /// The problem type, a URI; `about:blank` where the status says it all.
    pub kind: &'static str,
    /// What kind of error it is, in a few words.
    pub title: &'static str,
    /// What is wrong with this request, and what to do.
    pub detail: String,
    /// The part of the body that is wrong, as a path such as `descriptors[0].entries[1].value`.
    pub place: Option<String>,
    /// The methods that the path supports, as the header `Allow` lists them.
    pub allow: Option<String>,
}

impl Problem {
    /// A problem without a place.
    pub fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, kind: "about:blank", title, detail: detail.into(), place: None, allow: None }
    }

    /// A request that is malformed.
    pub fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Bad request", detail)
    }

    /// The same with the part of the request that is wrong.
    #[must_use]
    pub fn in_field(mut self, place: impl Into<String>) -> Self {
        self.place = Some(place.into());
        self
    }

    /// No such path; `try_instead` names one that exists.
    #[must_use]
    pub fn not_found(path: &str, try_instead: &str) -> Self {
        let shown: String = path.chars().take(100).collect();
        let detail = format!("there is nothing at `{shown}`; try {try_instead}");
        Self { kind: NO_SUCH_PATH, ..Self::new(StatusCode::NOT_FOUND, "Not found", detail) }
    }

    /// The path supports one method, and the request has another.
    #[must_use]
    pub fn wrong_method(allowed: &Method) -> Self {
        Self::wrong_methods(allowed.to_string())
    }

    /// The same where there are several, as `Allow` lists them.
    #[must_use]
    pub fn wrong_methods(allowed: String) -> Self {
        let mut problem =
            Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed", format!("use {allowed} here"));
        problem.allow = Some(allowed);
        problem
    }

    /// The body of the response.
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

    /// The response, for the HTTP/1 server of this crate.
    #[must_use]
    pub fn response(self) -> h1::RawResponse {
        let mut answer = h1::RawResponse::new(self.status, MEDIA_TYPE, self.body());
        if let Some(methods) = self.allow {
            answer.put(&ALLOW, methods.as_bytes());
        }
        answer
    }
}
