//! Why something was not done: the database's reasons, and what is wrong with what was sent.
//!
//! Both stand below every folder, so that a folder need not know another for the sake of its errors.

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The address of the database is none.
    #[error("{0}")]
    Address(String),
    /// The database cannot be reached, or did not do it.
    #[error("the database did not do it: {0}")]
    Unavailable(sqlx::Error),
    /// Nobody answers where the database should be.
    #[error("{address} does not answer: {error}")]
    Unreachable {
        /// Where that is, without a password.
        address: String,
        /// What happened instead.
        error: sqlx::Error,
    },
    /// What is kept was made by a newer program.
    #[error("the database is at version {found}, and this program knows only {known}: use a newer one")]
    TooNew {
        /// What it is at.
        found: i64,
        /// What this program knows.
        known: i64,
    },
    /// Somebody else has changed it since the caller looked.
    #[error("it has been changed since you looked: read it again")]
    Conflict,
    /// Who wrote something cannot be the second person who approves of it.
    #[error("whoever published it cannot approve of it: another person must")]
    SelfApproval,
    /// Only what has acted can be gone back to: the way forward has its checks.
    #[error(
        "revision {rev} has never acted (it is {status}), so there is no way back to it: let another person approve of it, \
         or publish its text again"
    )]
    NeverActive {
        /// Its number.
        rev: i64,
        /// What became of it.
        status: &'static str,
    },
    /// There is no such thing.
    #[error("there is no {0}")]
    NotFound(&'static str),
    /// What is kept cannot be read.
    #[error("what is kept cannot be read: {0}")]
    Corrupt(String),
}

impl From<sqlx::Error> for ControlError {
    /// Told in its words already, and so no source of them: it would be told twice.
    fn from(error: sqlx::Error) -> Self {
        Self::Unavailable(error)
    }
}

/// What is wrong with an agreement, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationError {
    /// The field.
    pub place: String,
    /// What is wrong with it, and what to write.
    pub detail: String,
}

pub(crate) fn invalid(place: &str, detail: impl Into<String>) -> ValidationError {
    ValidationError { place: place.to_owned(), detail: detail.into() }
}

/// A text of so many bytes, without control characters.
pub(crate) fn check_text(place: &str, text: &str, least: usize, most: usize) -> Result<(), ValidationError> {
    let problem = |detail: String| Err(ValidationError { place: place.to_owned(), detail });
    if text.len() < least {
        return problem("it is empty".to_owned());
    }
    if text.len() > most {
        return problem(format!("it has at most {most} bytes, not {}", text.len()));
    }
    if text.chars().any(char::is_control) {
        return problem("it has no control characters".to_owned());
    }
    Ok(())
}

/// Seconds since the epoch, rounded down; memory holds those up to the year 2106.
pub(crate) fn parse_time(place: &str, text: &str) -> Result<i64, ValidationError> {
    let problem = |detail: &str| ValidationError { place: place.to_owned(), detail: detail.to_owned() };
    let time: jiff::Timestamp =
        text.parse().map_err(|_| problem("it is no time; write one such as 2026-02-01T00:00:00Z"))?;
    match time.as_second() {
        at @ 0..4_294_967_295 => Ok(at),
        _ => Err(problem("write a time from 1970 to 2105")),
    }
}
