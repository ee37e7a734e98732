//! A quota: how many units in which period.

use crate::calendar::Calendar;
use crate::time::Span;
use std::fmt;

/// The period of a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Period {
    /// A fixed length, counted from the Unix epoch where windows are aligned.
    Rolling(Span),
    /// A day or a month of the calendar in a time zone.
    Calendar(Calendar),
}

impl Period {
    /// The shortest period: one millisecond.
    pub const SHORTEST: Span = Span::from_millis(1);
    /// The longest period: ten years of 365 days.
    pub const LONGEST: Span = Span::from_secs(10 * 365 * 86_400);

    /// Its length; the longest it can have, for a calendar period.
    #[must_use]
    pub fn length(&self) -> Span {
        match self {
            Self::Rolling(span) => *span,
            Self::Calendar(calendar) => calendar.longest(),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rolling(span) => span.fmt(f),
            Self::Calendar(calendar) => calendar.fmt(f),
        }
    }
}

/// `count` units in each `period`.
///
/// ```
/// use tollgate_core::{Quota, Span};
/// assert_eq!(Quota::per_minute(100).to_string(), "100/1m");
/// assert_eq!(Quota::per(5, Span::from_secs(30)).to_string(), "5/30s");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Units a period. Zero blocks.
    pub count: u64,
    /// The period.
    pub period: Period,
}

impl Quota {
    /// The largest count a quota can have: 2^40, about a million million.
    pub const LARGEST: u64 = 1 << 40;

    /// `count` units in each span of `length`.
    #[must_use]
    pub const fn per(count: u64, length: Span) -> Self {
        Self { count, period: Period::Rolling(length) }
    }

    /// `count` units a second.
    #[must_use]
    pub const fn per_second(count: u64) -> Self {
        Self::per(count, Span::from_secs(1))
    }

    /// `count` units a minute.
    #[must_use]
    pub const fn per_minute(count: u64) -> Self {
        Self::per(count, Span::from_secs(60))
    }

    /// `count` units an hour.
    #[must_use]
    pub const fn per_hour(count: u64) -> Self {
        Self::per(count, Span::from_secs(3_600))
    }

    /// `count` units a day of 24 hours.
    #[must_use]
    pub const fn per_day(count: u64) -> Self {
        Self::per(count, Span::from_secs(86_400))
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.count, self.period)
    }
}
