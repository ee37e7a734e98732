//! Parsers of rates and periods: `100/minute`, `100 per 30s`, `5/250ms`, `1000/day in Europe/Zurich`.

use crate::reader::parse_number;
use crate::yaml::shorten;
use tollgate_core::{Calendar, CalendarUnit, Period, TimeDelta};

/// Unit names and their lengths in microseconds.
const UNITS: [(&[&str], u64); 9] = [
    (&["us", "microsecond", "microseconds"], 1),
    (&["ms", "millisecond", "milliseconds"], 1_000),
    (&["s", "sec", "secs", "second", "seconds"], 1_000_000),
    (&["m", "min", "mins", "minute", "minutes"], 60_000_000),
    (&["h", "hour", "hours"], 3_600_000_000),
    (&["d", "day", "days"], 86_400_000_000),
    (&["w", "week", "weeks"], 7 * 86_400_000_000),
    (&["month", "months"], 30 * 86_400_000_000),
    (&["y", "year", "years"], 365 * 86_400_000_000),
];

/// Parses `30s`, `2 hours`, `minute`; a unit alone means one of it. Returns `None` if the text is not a length of time,
/// or is zero.
pub(crate) fn parse_duration(text: &str) -> Option<TimeDelta> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
    let (number, unit) = text.split_at(digits);
    let number = if number.is_empty() { 1 } else { u64::try_from(parse_number(number)?).ok()? };
    let unit = unit.trim();
    let (_, length) =
        UNITS.iter().find(|(names, _)| names.iter().any(|name| name.eq_ignore_ascii_case(unit)))?;
    let micros = number.checked_mul(*length)?;
    (micros > 0 && micros <= TimeDelta::MAX.as_micros()).then(|| TimeDelta::from_micros(micros))
}

/// Parses `COUNT/PERIOD`, `COUNT per PERIOD`, and either with `in ZONE` after a day or a month.
///
/// The error describes the problem.
pub(crate) fn parse_rate(text: &str) -> Result<(u64, Period), String> {
    let text = text.trim();
    let (count, period) = match text.split_once('/') {
        Some((count, period)) if !count.contains(" per ") => (count, period),
        _ => text.split_once(" per ").ok_or("it has no period")?,
    };
    let count = parse_number(count.trim())
        .and_then(|count| u64::try_from(count).ok())
        .ok_or_else(|| format!("`{}` is not a count", count.trim()))?;
    Ok((count, parse_period(period)?))
}

/// Parses `minute`, `30s`, `day in Europe/Zurich`. The error describes the problem.
pub(crate) fn parse_period(text: &str) -> Result<Period, String> {
    match text.split_once(" in ") {
        Some((unit, zone)) => calendar(unit.trim(), zone.trim()),
        None => {
            let length = parse_duration(text);
            length.map(Period::Rolling).ok_or_else(|| {
                format!(
                    "`{}` is not a period (use second, minute, hour, day, or a length such as 30s)",
                    shorten(text.trim())
                )
            })
        }
    }
}

/// Parses a calendar period in a zone.
pub(crate) fn calendar(unit: &str, zone: &str) -> Result<Period, String> {
    let unit = match unit {
        "day" => CalendarUnit::Day,
        "month" => CalendarUnit::Month,
        _ => return Err(format!("a calendar period is a `day` or a `month`, not `{unit}`")),
    };
    Calendar::new(unit, zone).map(Period::Calendar).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::{parse_duration, parse_rate};

    #[test]
    fn rates_are_parsed() {
        for (text, meaning) in [
            ("100/minute", "100 1m"),
            ("100 per 30s", "100 30s"),
            ("5/250ms", "5 250ms"),
            ("10_000 / 2 hours", "10000 2h"),
            ("7/week", "7 7d"),
            ("0/s", "0 1s"),
            ("1000/day in Europe/Zurich", "1000 calendar day in Europe/Zurich"),
            ("9 per month in UTC", "9 calendar month in UTC"),
        ] {
            let (count, period) = parse_rate(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(format!("{count} {period}"), meaning, "{text}");
        }
    }

    #[test]
    fn invalid_rates_are_explained() {
        for (text, why) in [
            ("100", "it has no period"),
            ("x/minute", "`x` is not a count"),
            ("-1/minute", "`-1` is not a count"),
            ("1/fortnight", "`fortnight` is not a period"),
            ("1/0s", "`0s` is not a period"),
            ("1/99999999999999999999s", "is not a period"),
            ("1/hour in UTC", "a calendar period is a `day` or a `month`"),
            ("1/day in Nowhere/Town", "there is no time zone `Nowhere/Town`"),
        ] {
            let error = parse_rate(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn durations_have_many_spellings() {
        for (text, micros) in
            [("30s", 30_000_000), ("Minute", 60_000_000), ("1_5 ms", 15_000), ("2h", 7_200_000_000)]
        {
            assert_eq!(parse_duration(text).map(tollgate_core::TimeDelta::as_micros), Some(micros), "{text}");
        }
    }
}
