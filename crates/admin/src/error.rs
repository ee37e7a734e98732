//! How a handler fails: as problem+json (RFC 9457), whose body the protocol servers share.

use crate::response;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{ALLOW, HeaderValue};
use tollgate_control::{ControlError, ValidationError};
use tollgate_http::problem::{MEDIA_TYPE, Problem};

/// What a handler returns.
pub(crate) type ApiResult = Result<Response, ApiError>;

/// A problem as a response. (The problem itself is another crate's type, which axum's trait cannot be implemented for.)
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

/// What was sent is well formed and cannot take effect.
impl From<ValidationError> for ApiError {
    fn from(wrong: ValidationError) -> Self {
        Self(unprocessable("Validation failed", wrong.detail).in_field(wrong.place))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = response::typed(self.0.status, MEDIA_TYPE, self.0.body());
        if let Some(methods) = self.0.allow
            && let Ok(value) = HeaderValue::from_str(&methods)
        {
            response.headers_mut().insert(ALLOW, value);
        }
        response
    }
}

pub(crate) fn unprocessable(title: &'static str, detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, title, detail)
}

/// An error of the control plane. The words of a database go to the log: they may name hosts.
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
            tracing::warn!(%error, "the admin API could not answer");
            database_unavailable()
        }
    }
}

pub(crate) fn database_unavailable() -> Problem {
    let detail = "the database does not answer; decisions go on by what is known. Try again";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Database unavailable", detail)
}
