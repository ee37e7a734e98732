//! Errors of the control plane: database errors, and validation errors of what clients send.
//!
//! This module imports from no folder, so that no folder depends on another for its errors.

/// An error of a control-plane operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The database address is invalid.
    #[error("{0}")]
    Address(String),
    /// The database failed or became unavailable.
    #[error("database error: {0}")]
    Unavailable(sqlx::Error),
    /// The database cannot be reached.
    #[error("cannot reach {address}: {error}")]
    Unreachable {
        /// The address, without a password.
        address: String,
        /// The cause.
        error: sqlx::Error,
    },
    /// The schema was created by a newer version.
    #[error(
        "the database's schema version {found} is newer than this binary supports ({known}); upgrade Tollgate"
    )]
    TooNew {
        /// Schema version of the database.
        found: i64,
        /// Newest schema version that this binary supports.
        known: i64,
    },
    /// The object was modified since the client read it.
    #[error("modified since it was read; fetch it and retry")]
    Conflict,
    /// The author of a revision cannot approve it.
    #[error("the author cannot approve their own revision; another operator must")]
    SelfApproval,
    /// Rollback to a revision that was never active, and so never passed the checks of publishing.
    #[error(
        "revision {rev} was never active (it is {status}); have another operator approve it, \
         or publish its text again"
    )]
    NeverActive {
        /// The revision's number.
        rev: i64,
        /// The revision's status.
        status: &'static str,
    },
    /// The object does not exist.
    #[error("no {0}")]
    NotFound(&'static str),
    /// Stored data cannot be read.
    #[error("stored data is invalid: {0}")]
    Corrupt(String),
}

impl From<sqlx::Error> for ControlError {
    /// Not marked as the source: the message already contains it, and reports would print it twice.
    fn from(error: sqlx::Error) -> Self {
        Self::Unavailable(error)
    }
}

/// An invalid field of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationError {
    /// The field.
    pub place: String,
    /// What is wrong with it, and how to fix it.
    pub detail: String,
}

pub(crate) fn invalid(place: &str, detail: impl Into<String>) -> ValidationError {
    ValidationError { place: place.to_owned(), detail: detail.into() }
}

/// Checks that a text has between `min` and `max` bytes and no control characters.
pub(crate) fn check_text(place: &str, text: &str, min: usize, max: usize) -> Result<(), ValidationError> {
    let problem = |detail: String| Err(ValidationError { place: place.to_owned(), detail });
    if text.len() < min {
        return problem("must not be empty".to_owned());
    }
    if text.len() > max {
        return problem(format!("must have at most {max} bytes, got {}", text.len()));
    }
    if text.chars().any(char::is_control) {
        return problem("must not contain control characters".to_owned());
    }
    Ok(())
}

/// Parses a time to seconds since the epoch, rounded down. The quota table stores times up to the year 2106.
pub(crate) fn parse_time(place: &str, text: &str) -> Result<i64, ValidationError> {
    let problem = |detail: &str| ValidationError { place: place.to_owned(), detail: detail.to_owned() };
    let time: jiff::Timestamp =
        text.parse().map_err(|_| problem("not a valid time; use the form 2026-02-01T00:00:00Z"))?;
    match time.as_second() {
        at @ 0..4_294_967_295 => Ok(at),
        _ => Err(problem("must be between the years 1970 and 2105")),
    }
}
