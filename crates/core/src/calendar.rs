//! Calendar periods: days and months in a time zone.
//!
//! A day in a zone with daylight saving time has 23, 24 or 25 hours, so its bounds come from the zone's rules, not from
//! a division. The last bounds are cached in one atomic word: the usual check costs a load and two comparisons.

use crate::time::{TimeDelta, Timestamp};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A unit of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CalendarUnit {
    /// From midnight to midnight.
    Day,
    /// From the first of a month to the first of the next.
    Month,
}

/// A calendar period in a time zone.
///
/// ```
/// use tollgate_core::{Calendar, CalendarUnit, Timestamp};
/// let days = Calendar::new(CalendarUnit::Day, "Europe/Zurich")?;
/// let (start, end) = days.window(Timestamp::from_secs(1_711_846_800)); // 2024-03-31 01:00 UTC, clocks go forward
/// assert_eq!(end.since(start).as_micros(), 23 * 3_600 * 1_000_000);
/// # Ok::<(), tollgate_core::UnknownZone>(())
/// ```
pub struct Calendar {
    unit: CalendarUnit,
    zone: TimeZone,
    name: String,
    /// Most recent window, as two 32-bit Unix seconds.
    latest: AtomicU64,
}

/// Error for a time zone that is missing from the zone database.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no time zone `{0}`; write a name such as `UTC` or `Europe/Zurich`")]
pub struct UnknownZone(pub String);

impl Calendar {
    /// Creates days or months in the zone with this IANA name.
    ///
    /// # Errors
    /// [`UnknownZone`] if the database has no zone of that name.
    pub fn new(unit: CalendarUnit, zone: &str) -> Result<Self, UnknownZone> {
        let found = TimeZone::get(zone).map_err(|_| UnknownZone(zone.to_owned()))?;
        Ok(Self { unit, zone: found, name: zone.to_owned(), latest: AtomicU64::new(0) })
    }

    /// Returns the calendar unit: days or months.
    #[must_use]
    pub const fn unit(&self) -> CalendarUnit {
        self.unit
    }

    /// Returns the zone's name.
    #[must_use]
    pub fn zone(&self) -> &str {
        &self.name
    }

    /// The maximum clock shift of any zone within one day: usually one hour, two at Troll, three at Casey.
    const MAX_SHIFT: u64 = 3 * 3_600;

    /// Returns the maximum length of this period.
    #[must_use]
    pub const fn max_length(&self) -> TimeDelta {
        match self.unit {
            CalendarUnit::Day => TimeDelta::from_secs(86_400 + Self::MAX_SHIFT),
            CalendarUnit::Month => TimeDelta::from_secs(31 * 86_400 + Self::MAX_SHIFT),
        }
    }

    /// Returns the minimum length of this period.
    #[must_use]
    pub const fn min_length(&self) -> TimeDelta {
        match self.unit {
            CalendarUnit::Day => TimeDelta::from_secs(86_400 - Self::MAX_SHIFT),
            CalendarUnit::Month => TimeDelta::from_secs(28 * 86_400 - Self::MAX_SHIFT),
        }
    }

    /// Returns the period that contains `now`: its first instant, and the first instant after it.
    #[must_use]
    pub fn window(&self, now: Timestamp) -> (Timestamp, Timestamp) {
        let latest = self.latest.load(Ordering::Relaxed);
        let (start, end) = (latest >> 32, latest & 0xffff_ffff);
        if (start..end).contains(&now.as_secs()) {
            return (Timestamp::from_secs(start), Timestamp::from_secs(end));
        }
        let (start, end) = self.find(now);
        if end.as_secs() <= u64::from(u32::MAX) {
            self.latest.store(start.as_secs() << 32 | end.as_secs(), Ordering::Relaxed);
        }
        (start, end)
    }

    fn find(&self, now: Timestamp) -> (Timestamp, Timestamp) {
        let instant = jiff::Timestamp::from_second(i64::try_from(now.as_secs()).unwrap_or(i64::MAX))
            .unwrap_or(jiff::Timestamp::UNIX_EPOCH);
        let date = self.zone.to_datetime(instant).date();
        let first = match self.unit {
            CalendarUnit::Day => date,
            CalendarUnit::Month => date.first_of_month(),
        };
        let (start, next) = (self.midnight(first), self.after(first));
        let end = self.midnight(next);
        // Clocks that go back just after midnight show the old date again, but the new period has already begun.
        if end <= now { (end, self.midnight(self.after(next))) } else { (start, end) }
    }

    /// Returns the first date of the period after the one that starts with `first`.
    fn after(&self, first: Date) -> Date {
        let next = match self.unit {
            CalendarUnit::Day => first.tomorrow(),
            CalendarUnit::Month => first.last_of_month().tomorrow(),
        };
        next.unwrap_or(Date::MAX)
    }

    /// Returns the first instant of a date; where midnight is skipped or doubled, the zone rules choose.
    fn midnight(&self, date: Date) -> Timestamp {
        let instant = self
            .zone
            .to_ambiguous_zoned(date.at(0, 0, 0, 0))
            .compatible()
            .map_or(0, |zoned| zoned.timestamp().as_second());
        Timestamp::from_secs(u64::try_from(instant).unwrap_or(0))
    }
}

impl Clone for Calendar {
    fn clone(&self) -> Self {
        Self { unit: self.unit, zone: self.zone.clone(), name: self.name.clone(), latest: AtomicU64::new(0) }
    }
}

impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        self.unit == other.unit && self.name == other.name
    }
}

impl Eq for Calendar {}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calendar({self})")
    }
}

impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            CalendarUnit::Day => "day",
            CalendarUnit::Month => "month",
        };
        write!(f, "calendar {unit} in {}", self.name)
    }
}
