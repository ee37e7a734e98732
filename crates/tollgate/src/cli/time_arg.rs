//! Time arguments: a time from now (`2d`), a date (`2026-12-31`) or an instant (RFC 3339), parsed alike for all flags.

use anyhow::Context;
use jiff::{SignedDuration, Timestamp};
use std::fmt;
use std::str::FromStr;
use tollgate_core::{Clock, SystemClock};

/// Point in time, with the text of the argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TimeArg {
    text: String,
    value: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    /// Seconds from now.
    FromNow(u64),
    At(Timestamp),
}

impl FromStr for TimeArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let value = match parse_duration(text) {
            Ok(seconds) => Value::FromNow(seconds),
            Err(_) => Value::At(instant(text).ok_or_else(|| {
                format!("`{text}` is not a time; use 2d, 2026-12-31 or 2026-12-31T18:00:00Z")
            })?),
        };
        Ok(Self { text: text.to_owned(), value })
    }
}

impl fmt::Display for TimeArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TimeArg {
    /// Returns the instant in RFC 3339.
    pub(crate) fn to_rfc3339(&self, now: Timestamp) -> anyhow::Result<String> {
        Ok(self.instant(now)?.to_string())
    }

    /// Returns the whole seconds from now until then; at least one.
    pub(crate) fn seconds_from(&self, now: Timestamp) -> anyhow::Result<u64> {
        let left = self.instant(now)?.duration_since(now).as_millis_f64() / 1_000.0;
        anyhow::ensure!(left > 0.0, "--until {self}: this is in the past");
        Ok(left.ceil() as u64)
    }

    fn instant(&self, now: Timestamp) -> anyhow::Result<Timestamp> {
        match self.value {
            Value::At(at) => Ok(at),
            Value::FromNow(seconds) => {
                let span = i64::try_from(seconds).ok().map(SignedDuration::from_secs);
                let at = span.and_then(|span| now.checked_add(span).ok());
                at.with_context(|| format!("{self} from now is out of range"))
            }
        }
    }
}

/// Returns the current time.
pub(crate) fn now() -> anyhow::Result<Timestamp> {
    Ok(Timestamp::from_microsecond(i64::try_from(SystemClock::new().now().as_micros())?)?)
}

/// Parses `90s`, `30m`, `2h`, `2d`, `1w` and sequences of them such as `1d12h` into seconds.
pub(crate) fn parse_duration(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a duration; use one such as 90s, 30m, 2h or 2d");
    let (mut total, mut rest) = (0_u64, text);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..end].parse().map_err(|_| wrong())?;
        let scale = match rest.as_bytes()[end] {
            b's' => 1,
            b'm' => 60,
            b'h' => 3_600,
            b'd' => 86_400,
            b'w' => 604_800,
            _ => return Err(wrong()),
        };
        total = number.checked_mul(scale).and_then(|part| total.checked_add(part)).ok_or_else(wrong)?;
        rest = &rest[end + 1..];
    }
    if text.is_empty() { Err(wrong()) } else { Ok(total) }
}

/// Parses a date or an instant, and returns it in RFC 3339.
pub(crate) fn parse_instant(text: &str) -> Result<String, String> {
    let wrong = || format!("`{text}` is not a time; use 2026-12-31 or 2026-12-31T18:00:00Z");
    instant(text).map(|at| at.to_string()).ok_or_else(wrong)
}

/// Parses a date (its first instant) or an instant; in UTC unless it has an offset.
fn instant(text: &str) -> Option<Timestamp> {
    // A parser that needs no offset accepts the name of a zone and ignores it.
    let is_plain = text.chars().all(|c| c.is_ascii_digit() || ":.+-TtZz ".contains(c));
    let read = |text: &str| text.parse::<Timestamp>().ok();
    if text.len() == "2026-12-31".len() {
        return read(&format!("{text}T00:00:00Z")).filter(|_| is_plain);
    }
    read(text).or_else(|| read(&format!("{text}Z")).filter(|_| is_plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Option<String> {
        let now = "2026-11-16T08:30:00Z".parse().expect("a time");
        text.parse::<TimeArg>().ok()?.to_rfc3339(now).ok()
    }

    #[test]
    fn durations_dates_and_instants_are_times() {
        for (text, meant) in [
            ("2d", "2026-11-18T08:30:00Z"),
            ("1d12h", "2026-11-17T20:30:00Z"),
            ("90s", "2026-11-16T08:31:30Z"),
            ("1w", "2026-11-23T08:30:00Z"),
            ("2026-12-31", "2026-12-31T00:00:00Z"),
            ("2026-12-31T18:00:00Z", "2026-12-31T18:00:00Z"),
            ("2026-12-31T18:00:00+02:00", "2026-12-31T16:00:00Z"),
            ("2026-12-31T18:00", "2026-12-31T18:00:00Z"),
            ("2026-12-31 18:00:00", "2026-12-31T18:00:00Z"),
        ] {
            assert_eq!(at(text).as_deref(), Some(meant), "{text}");
        }
        for wrong in [
            "",
            "2",
            "d",
            "2 d",
            "-2d",
            "soon",
            "2026-13-01",
            "2026-12-32",
            "31.12.2026",
            "2026-12-31T18:00[Asia/Tokyo]",
        ] {
            assert_eq!(at(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn durations_are_read_as_people_write_them() {
        let seconds = ["90s", "30m", "2h", "2d", "1h30m"].map(parse_duration);
        assert_eq!(seconds, [Ok(90), Ok(1_800), Ok(7_200), Ok(172_800), Ok(5_400)]);
        for wrong in ["", "h", "5", "-1m", "1.5h", "5 m", "99999999999999999999h", "5µ"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_past_time_has_no_seconds_left() {
        let now = "2026-11-16T08:30:00.5Z".parse().expect("a time");
        let left = |text: &str| text.parse::<TimeArg>().expect("a time").seconds_from(now);
        assert_eq!(left("2026-11-16T08:31:00Z").ok(), Some(60), "rounded up");
        assert!(left("2026-11-16").is_err() && left("0s").is_err());
    }
}
