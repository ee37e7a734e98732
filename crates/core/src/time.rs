//! Timestamps and time deltas, in microseconds.
//!
//! Microseconds, because that is the resolution of every authority (Redis `TIME` has no more), so that memory and Redis
//! return bit-equal outcomes. A `Timestamp` fits in 52 bits (until the year 2112), which leaves 12 bits of a word for
//! the fraction of a microsecond that exact rates need, and keeps every value exact in a 53-bit float of a Lua script.
//! Rejected: nanoseconds, because they fit in neither.

use std::fmt;

/// A length of time in whole microseconds.
///
/// ```
/// use tollgate_core::TimeDelta;
/// assert_eq!(TimeDelta::from_secs(2).as_micros(), 2_000_000);
/// assert_eq!(TimeDelta::from_micros(1_000_001).ceil_secs(), 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimeDelta(u64);

impl TimeDelta {
    /// Zero length.
    pub const ZERO: Self = Self(0);
    /// The maximum length that can be represented.
    pub const MAX: Self = Self(Timestamp::MAX.0);

    /// Creates a delta of `micros` microseconds, capped at [`TimeDelta::MAX`].
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Self(micros) }
    }

    /// Creates a delta of `millis` milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis.saturating_mul(1_000))
    }

    /// Creates a delta of `secs` seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// Returns the length in microseconds.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the length in milliseconds, rounded up: waiting this long is always long enough.
    #[must_use]
    pub const fn ceil_millis(self) -> u64 {
        self.0.div_ceil(1_000)
    }

    /// Returns the length in seconds, rounded up: waiting this long is always long enough.
    #[must_use]
    pub const fn ceil_secs(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }
}

impl From<std::time::Duration> for TimeDelta {
    /// Rounds up to a whole microsecond.
    fn from(duration: std::time::Duration) -> Self {
        Self::from_micros(u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX))
    }
}

impl From<TimeDelta> for std::time::Duration {
    fn from(span: TimeDelta) -> Self {
        Self::from_micros(span.0)
    }
}

impl fmt::Display for TimeDelta {
    /// Formats with the largest unit that divides it: `90s`, `5m`, `1h`, `250ms`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 6] = [
            (86_400_000_000, "d"),
            (3_600_000_000, "h"),
            (60_000_000, "m"),
            (1_000_000, "s"),
            (1_000, "ms"),
            (1, "us"),
        ];
        if self.0 == 0 {
            return f.write_str("0s");
        }
        for (size, name) in UNITS {
            if self.0.is_multiple_of(size) {
                return write!(f, "{}{name}", self.0 / size);
            }
        }
        Ok(())
    }
}

/// A point in time: microseconds since the Unix epoch, below 2^52.
///
/// ```
/// use tollgate_core::{TimeDelta, Timestamp};
/// let t = Timestamp::from_secs(100);
/// assert_eq!((t + TimeDelta::from_secs(5)).since(t), TimeDelta::from_secs(5));
/// assert_eq!(t.since(t + TimeDelta::from_secs(5)), TimeDelta::ZERO); // never negative
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The first instant: the Unix epoch.
    pub const ZERO: Self = Self(0);
    /// The last instant, in the year 2112. Later ones are capped here, so sums of a few deltas never overflow.
    pub const MAX: Self = Self((1 << 52) - 1);

    /// Creates the instant `micros` microseconds after the epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        if micros > Self::MAX.0 { Self::MAX } else { Self(micros) }
    }

    /// Creates the instant `secs` seconds after the epoch.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_micros(secs.saturating_mul(1_000_000))
    }

    /// Returns the microseconds since the epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the whole seconds since the epoch.
    #[must_use]
    pub const fn as_secs(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Returns the time since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> TimeDelta {
        TimeDelta(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<TimeDelta> for Timestamp {
    type Output = Self;
    fn add(self, span: TimeDelta) -> Self {
        Self::from_micros(self.0 + span.0)
    }
}

impl std::ops::Sub<TimeDelta> for Timestamp {
    type Output = Self;
    /// Subtracts, saturating at the epoch.
    fn sub(self, span: TimeDelta) -> Self {
        Self(self.0.saturating_sub(span.0))
    }
}
