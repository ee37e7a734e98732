//! Parsers of rates, counts and periods: `100/minute`, `10k per 30s`, `1.5M/month`, `1000/day in Europe/Zurich`.
//!
//! Case has no meaning in units, except that `M` alone is refused: it is the usual sign of both minutes and months.
//! Rejected: `m` for millions, which would make `10m/m` a limit.

use crate::reader::parse_number;
use crate::yaml::shorten;
use tollgate_core::{Calendar, CalendarUnit, Period, TimeDelta};

/// Unit names and their lengths in microseconds.
const UNITS: [(&[&str], u64); 9] = [
    (&["us", "microsecond", "microseconds"], 1),
    (&["ms", "millisecond", "milliseconds"], 1_000),
    (&["s", "sec", "secs", "second", "seconds"], 1_000_000),
    (&["m", "min", "mins", "minute", "minutes"], 60_000_000),
    (&["h", "hr", "hrs", "hour", "hours"], 3_600_000_000),
    (&["d", "day", "days"], 86_400_000_000),
    (&["w", "wk", "wks", "week", "weeks"], 7 * 86_400_000_000),
    (&["mo", "mos", "month", "months"], 30 * 86_400_000_000),
    (&["y", "yr", "yrs", "year", "years"], 365 * 86_400_000_000),
];

/// What multiplies a count: `10k`, `1.5M`.
const MULTIPLES: [(char, u32); 4] = [('k', 3), ('K', 3), ('M', 6), ('G', 9)];

/// The reason why a text is not a length of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DurationError {
    /// It is none, or is zero or too long.
    Invalid,
    /// It can be read in two ways.
    Ambiguous([String; 2]),
}

/// Parses `30s`, `2 hours`, `minute`; a unit alone means one of it.
pub(crate) fn parse_duration(text: &str) -> Result<TimeDelta, DurationError> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim();
    if unit == "M" {
        let read_as =
            |unit: &str| if number.is_empty() { unit.to_owned() } else { format!("{number} {unit}s") };
        return Err(DurationError::Ambiguous([read_as("minute"), read_as("month")]));
    }
    let micros = || {
        let number = if number.is_empty() { 1 } else { u64::try_from(parse_number(number)?).ok()? };
        let (_, length) =
            UNITS.iter().find(|(names, _)| names.iter().any(|name| name.eq_ignore_ascii_case(unit)))?;
        number.checked_mul(*length).filter(|micros| (1..=TimeDelta::MAX.as_micros()).contains(micros))
    };
    micros().map(TimeDelta::from_micros).ok_or(DurationError::Invalid)
}

/// Parses the period of an inline limit: a unit such as `minute`, or a length such as `15m` or `1500ms`, from a millisecond
/// to ten years.
///
/// ```
/// use tollgate_core::TimeDelta;
/// assert_eq!(tollgate_rules::parse_inline_period("15m"), Some(TimeDelta::from_secs(900)));
/// assert_eq!(tollgate_rules::parse_inline_period("Hour"), Some(TimeDelta::from_secs(3_600)));
/// assert_eq!(tollgate_rules::parse_inline_period("10us"), None);
/// assert_eq!(tollgate_rules::parse_inline_period("fortnight"), None);
/// ```
#[must_use]
pub fn parse_inline_period(text: &str) -> Option<TimeDelta> {
    let allowed = Period::MIN_LENGTH..=Period::MAX_LENGTH;
    parse_duration(text).ok().filter(|length| allowed.contains(length))
}

/// Parses a count as people write it.
///
/// ```
/// assert_eq!(tollgate_rules::parse_count("10k"), Ok(10_000));
/// assert_eq!(tollgate_rules::parse_count("1.5M"), Ok(1_500_000));
/// assert!(tollgate_rules::parse_count("1.5").is_err());
/// ```
///
/// # Errors
/// A description of the problem.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let is_not = |_| format!("`{}` is not a count", shorten(text));
    parse_multiple(text).and_then(|count| u64::try_from(count).map_err(is_not))
}

/// Parses a whole number, or one in multiples: `100`, `-7`, `10_000`, `10k`, `1.5M`. The error describes the problem.
pub(crate) fn parse_multiple(text: &str) -> Result<i128, String> {
    if let Some(count) = parse_number(text) {
        return Ok(count);
    }
    let is_not = || format!("`{}` is not a count", shorten(text));
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    if !whole.starts_with(|c: char| c.is_ascii_digit())
        || !are_digits(whole)
        || !are_digits(fraction)
        || number.ends_with('.')
        || number.len() > 40
    {
        return Err(is_not());
    }
    let unit = &text[number.len()..];
    let zeros = match MULTIPLES.iter().find(|(name, _)| unit.chars().eq([*name])) {
        Some((_, zeros)) => *zeros as usize,
        None if unit.is_empty() => 0,
        None if unit == "m" => {
            return Err(format!("{}: `m` is a minute; write `{number}M` for millions", is_not()));
        }
        None => {
            return Err(format!("{}: there is no multiple `{}`; use k, M or G", is_not(), shorten(unit)));
        }
    };
    let fraction: String = fraction.chars().filter(|c| *c != '_').collect();
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > zeros {
        return Err(format!("{}: it is not a whole number", is_not()));
    }
    parse_number(&format!("{whole}{fraction:0<zeros$}")).ok_or_else(is_not)
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
    let count = parse_count(count.trim())?;
    Ok((count, parse_period(period)?))
}

/// Parses `minute`, `30s`, `day in Europe/Zurich`. The error describes the problem.
pub(crate) fn parse_period(text: &str) -> Result<Period, String> {
    match text.split_once(" in ") {
        Some((unit, zone)) => calendar(unit.trim(), zone.trim()),
        None => parse_duration(text).map(Period::Rolling).map_err(|error| match error {
            DurationError::Invalid => format!(
                "`{}` is not a period (use second, minute, hour, day, or a length such as 30s)",
                shorten(text.trim())
            ),
            DurationError::Ambiguous([a, b]) => {
                format!("`{}` may mean `{a}` or `{b}`; write one of these", shorten(text.trim()))
            }
        }),
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
            ("10/min", "10 1m"),
            ("10/HR", "10 1h"),
            ("10k/day", "10000 1d"),
            ("10K per wk", "10000 7d"),
            ("1.5M/month", "1500000 30d"),
            ("1_0.2_50k/yr", "10250 365d"),
            ("2G/mo", "2000000000 30d"),
            ("0.001k / s", "1 1s"),
            ("1.0/s", "1 1s"),
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
            ("10/M", "`M` may mean `minute` or `month`; write one of these"),
            ("10 per 5M", "`5M` may mean `5 minutes` or `5 months`"),
            ("10m/day", "`m` is a minute; write `10M` for millions"),
            ("10kk/day", "there is no multiple `kk`; use k, M or G"),
            ("1.5/s", "`1.5` is not a count: it is not a whole number"),
            ("1.2345k/s", "`1.2345k` is not a count: it is not a whole number"),
            ("1.k/s", "`1.k` is not a count"),
            (".5k/s", "`.5k` is not a count"),
            ("1.2.3k/s", "`1.2.3k` is not a count"),
            ("k/s", "`k` is not a count"),
            ("-1k/s", "`-1k` is not a count"),
            ("99999999999999999999G/s", "is not a count"),
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
            assert_eq!(parse_duration(text).map(tollgate_core::TimeDelta::as_micros), Ok(micros), "{text}");
        }
    }
}
