//! Times as rows have them, as seconds or milliseconds since the epoch, and as people and the limiter read them.

use tollgate_core::Timestamp;

/// A time as it is told.
pub(crate) fn format_time(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).map(|at| at.to_string()).unwrap_or_default()
}

/// The same, of milliseconds.
pub(crate) fn format_millis(millis: i64) -> String {
    jiff::Timestamp::from_millisecond(millis).map(|at| at.to_string()).unwrap_or_default()
}

/// A time as it is told, in RFC 3339.
#[must_use]
pub fn rfc3339(at: Timestamp) -> String {
    format_millis(i64::try_from(at.as_micros() / 1_000).unwrap_or(i64::MAX))
}

/// Milliseconds as the limiter's clock has them.
pub(crate) fn timestamp(millis: i64) -> Timestamp {
    Timestamp::from_micros(u64::try_from(millis).unwrap_or(0).saturating_mul(1_000))
}
