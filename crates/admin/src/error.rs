//! Handler errors, sent as problem+json (RFC 9457) with the same body as the protocol servers use.

use crate::response;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{ALLOW, HeaderValue, RETRY_AFTER};
use tollgate_control::{ControlError, ValidationError};
use tollgate_http::problem::{MEDIA_TYPE, Problem};
use tollgate_observe::escape;

/// Result of a handler.
pub(crate) type ApiResult = Result<Response, ApiError>;

/// A problem as a response: a newtype, because axum's trait cannot be implemented for another crate's type.
#[derive(Debug)]
pub(crate) struct ApiError(pub(crate) Problem);

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl From<ControlError> for ApiError {
    fn from(error: ControlError) -> Self {
        Self(control_problem(error))
    }
}

/// The request is well formed but invalid.
impl From<ValidationError> for ApiError {
    fn from(error: ValidationError) -> Self {
        Self(unprocessable("Validation failed", error.detail).in_field(error.place))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response =
            response::typed(self.0.status, MEDIA_TYPE, escape::json(&self.0.body()).into_owned());
        if let Some(methods) = self.0.allow
            && let Ok(value) = HeaderValue::from_str(&methods)
        {
            response.headers_mut().insert(ALLOW, value);
        }
        if self.0.status == StatusCode::SERVICE_UNAVAILABLE {
            // What is unavailable is tried again every second.
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

pub(crate) fn unprocessable(title: &'static str, detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, title, detail)
}

/// Converts a control-plane error. Messages of the database go only to the log: they may contain host names.
pub(crate) fn control_problem(error: ControlError) -> Problem {
    match error {
        ControlError::Conflict => {
            Problem::new(StatusCode::PRECONDITION_FAILED, "Precondition failed", error.to_string())
        }
        ControlError::NeverActive { .. } => {
            Problem::new(StatusCode::CONFLICT, "Revision was never active", error.to_string())
        }
        ControlError::NotFound(_) => Problem::new(StatusCode::NOT_FOUND, "Not found", error.to_string()),
        error => {
            tracing::warn!(%error, "admin request failed");
            database_unavailable()
        }
    }
}

pub(crate) fn database_unavailable() -> Problem {
    let detail = "the database is unavailable, and decisions continue with the last known state; retry later";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Database unavailable", detail)
}
