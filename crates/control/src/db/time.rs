//! Times in rows, as seconds or milliseconds since the epoch, and their conversion for display and for the limiter.

use tollgate_core::Timestamp;

/// Formats seconds since the epoch in RFC 3339.
pub(crate) fn format_time(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).map(|at| at.to_string()).unwrap_or_default()
}

/// Formats milliseconds since the epoch in RFC 3339.
pub(crate) fn format_millis(millis: i64) -> String {
    jiff::Timestamp::from_millisecond(millis).map(|at| at.to_string()).unwrap_or_default()
}

/// Formats a timestamp in RFC 3339.
#[must_use]
pub fn rfc3339(at: Timestamp) -> String {
    format_millis(i64::try_from(at.as_micros() / 1_000).unwrap_or(i64::MAX))
}
