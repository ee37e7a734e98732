//! Rate: a count of units per period.

use crate::calendar::Calendar;
use crate::time::TimeDelta;
use std::fmt;
use std::num::NonZeroU64;

/// The period of a rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Period {
    /// A fixed length, counted from the Unix epoch where windows are aligned.
    Rolling(TimeDelta),
    /// A day or a month of the calendar in a time zone.
    Calendar(Calendar),
}

impl Period {
    /// The shortest period: one millisecond.
    pub const MIN_LENGTH: TimeDelta = TimeDelta::from_millis(1);
    /// The longest period: ten years of 365 days.
    pub const MAX_LENGTH: TimeDelta = TimeDelta::from_secs(10 * 365 * 86_400);

    /// Returns its length; for a calendar period, the maximum.
    #[must_use]
    pub fn length(&self) -> TimeDelta {
        match self {
            Self::Rolling(span) => *span,
            Self::Calendar(calendar) => calendar.max_length(),
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
/// use tollgate_core::{Rate, TimeDelta, nonzero};
/// assert_eq!(Rate::per_minute(nonzero!(100)).to_string(), "100/1m");
/// assert_eq!(Rate::per(5, TimeDelta::from_secs(30)).to_string(), "5/30s");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units per period. Zero blocks all.
    pub count: u64,
    /// The period.
    pub period: Period,
}

impl Rate {
    /// The maximum count of a rate: 2^40, about 10^12.
    pub const MAX_COUNT: u64 = 1 << 40;

    /// Creates a rate of `count` units per `length`.
    #[must_use]
    pub const fn per(count: u64, length: TimeDelta) -> Self {
        Self { count, period: Period::Rolling(length) }
    }

    /// Creates a rate of `count` units per second.
    #[must_use]
    pub const fn per_second(count: NonZeroU64) -> Self {
        Self::per(count.get(), TimeDelta::from_secs(1))
    }

    /// Creates a rate of `count` units per minute.
    #[must_use]
    pub const fn per_minute(count: NonZeroU64) -> Self {
        Self::per(count.get(), TimeDelta::from_secs(60))
    }

    /// Creates a rate of `count` units per hour.
    #[must_use]
    pub const fn per_hour(count: NonZeroU64) -> Self {
        Self::per(count.get(), TimeDelta::from_secs(3_600))
    }

    /// Creates a rate of `count` units per day of 24 hours.
    #[must_use]
    pub const fn per_day(count: NonZeroU64) -> Self {
        Self::per(count.get(), TimeDelta::from_secs(86_400))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.count, self.period)
    }
}

/// A nonzero number, checked at compile time.
///
/// ```
/// use std::num::NonZeroU32;
/// let fifty: NonZeroU32 = tollgate_core::nonzero!(50);
/// assert_eq!(fifty.get(), 50);
/// ```
///
/// ```compile_fail
/// let none: std::num::NonZeroU32 = tollgate_core::nonzero!(0);
/// ```
#[macro_export]
macro_rules! nonzero {
    ($number:expr) => {
        const {
            match ::core::num::NonZero::new($number) {
                Some(number) => number,
                None => panic!("the number must not be zero"),
            }
        }
    };
}
