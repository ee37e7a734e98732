//! What was wrong with a request, as problem+json (RFC 9457): a title, the place, and what to do.

use super::{Answer, typed};
use hyper::header::{ALLOW, HeaderValue};
use hyper::{Method, StatusCode};
use serde_json::json;
use tollgate_edge::fields::PutFields;
use tollgate_edge::h1;

const KIND: &str = "application/problem+json";

/// An error that goes to the caller.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) title: &'static str,
    pub(crate) detail: String,
    /// The part of the body that is wrong, as a path such as `descriptors[0].entries[1].value`.
    pub(crate) place: Option<String>,
    /// The methods that are answered there.
    pub(crate) allow: Option<String>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, title, detail: detail.into(), place: None, allow: None }
    }

    pub(crate) fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Bad request", detail)
    }

    pub(crate) fn at(mut self, place: impl Into<String>) -> Self {
        self.place = Some(place.into());
        self
    }

    pub(crate) fn not_found(path: &str) -> Self {
        let shown: String = path.chars().take(100).collect();
        Self::new(
            StatusCode::NOT_FOUND,
            "Not found",
            format!("there is nothing at `{shown}`; try POST /v1/check"),
        )
    }

    pub(crate) fn wrong_method(allowed: &Method) -> Self {
        Self::wrong_methods(allowed.to_string())
    }

    /// The same where there are several, as `Allow` lists them.
    pub(crate) fn wrong_methods(allowed: String) -> Self {
        let mut problem =
            Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed", format!("use {allowed} here"));
        problem.allow = Some(allowed);
        problem
    }

    fn body(&self) -> String {
        let mut body = json!({
            "type": "about:blank",
            "title": self.title,
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if let Some(place) = &self.place {
            body["place"] = place.as_str().into();
        }
        body.to_string()
    }

    /// On the HTTP address.
    pub(super) fn told(self) -> h1::Answer {
        let mut answer = h1::Answer::new(self.status, KIND, self.body());
        if let Some(methods) = self.allow {
            answer.put(&ALLOW, methods.as_bytes());
        }
        answer
    }

    /// On the admin address.
    pub(crate) fn into_answer(self) -> Answer {
        let mut answer = typed(self.status, KIND, self.body());
        if let Some(methods) = self.allow
            && let Ok(value) = HeaderValue::from_str(&methods)
        {
            answer.headers_mut().insert(ALLOW, value);
        }
        answer
    }
}
