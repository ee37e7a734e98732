//! Units of Envoy rule files, with the Envoy service's lengths.

use tollgate_core::TimeDelta;

/// A unit of time as named in Envoy files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// 1 s.
    Second,
    /// 60 s.
    Minute,
    /// 3600 s.
    Hour,
    /// 24 h.
    Day,
    /// 7 d, starting on Thursdays, because the epoch was one.
    Week,
    /// 30 d.
    Month,
    /// 365 d.
    Year,
}

impl Unit {
    /// All units, shortest first.
    pub const ALL: [Self; 7] =
        [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// Returns the length of the unit.
    #[must_use]
    pub const fn length(self) -> TimeDelta {
        TimeDelta::from_secs(match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
            Self::Week => 7 * 86_400,
            Self::Month => 30 * 86_400,
            Self::Year => 365 * 86_400,
        })
    }

    /// Returns the name in capitals, as in the protocol's JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "SECOND",
            Self::Minute => "MINUTE",
            Self::Hour => "HOUR",
            Self::Day => "DAY",
            Self::Week => "WEEK",
            Self::Month => "MONTH",
            Self::Year => "YEAR",
        }
    }

    /// Returns the unit with this name, ignoring case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// Returns the unit with this length.
    #[must_use]
    pub fn from_length(length: TimeDelta) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.length() == length)
    }
}
