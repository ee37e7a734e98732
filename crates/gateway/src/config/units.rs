//! Durations and sizes in configuration files.

use serde::Deserialize;
use std::time::Duration;

/// A duration: `500ms`, `30s`, `5m`, `1h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Time(pub Duration);

impl Time {
    pub(super) const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

impl TryFrom<String> for Time {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("invalid duration `{text}`; use one such as 500ms, 30s or 5m");
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        let milliseconds = match &text[digits.len()..] {
            "ms" => Some(number),
            "s" => number.checked_mul(1_000),
            "m" => number.checked_mul(60_000),
            "h" => number.checked_mul(3_600_000),
            _ => None,
        };
        match milliseconds {
            Some(0) => Err(format!("duration `{text}` must not be zero; use one such as 500ms")),
            Some(milliseconds) if milliseconds <= 30 * 86_400_000 => {
                Ok(Self(Duration::from_millis(milliseconds)))
            }
            Some(_) => Err(format!("duration `{text}` is too long; use at most 720h")),
            None => Err(wrong()),
        }
    }
}

/// A size: `10MiB`, `64KB`, `1048576B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);

impl TryFrom<String> for Size {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("invalid size `{text}`; use one such as 64KiB or 10MiB");
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        let scale: u64 = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            _ => return Err(wrong()),
        };
        number.checked_mul(scale).filter(|size| *size < 1 << 60).map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_are_read_as_people_write_them() {
        let time = |text: &str| Time::try_from(text.to_owned()).map(|time| time.0.as_millis());
        assert_eq!((time("500ms"), time("30s"), time("5m")), (Ok(500), Ok(30_000), Ok(300_000)));
        for wrong in ["", "5", "s", "0s", "-1s", "1.5s", "5 parsecs", "99999999999999999999s", "9999h"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
        let size = |text: &str| Size::try_from(text.to_owned()).map(|size| size.0);
        assert_eq!((size("64KiB"), size("10MB"), size("0")), (Ok(65_536), Ok(10_000_000), Ok(0)));
        for wrong in ["", "MiB", "-1", "5 parsecs", "99999999999GiB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
