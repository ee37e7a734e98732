//! Values of environment variables as Go's libraries spell them: durations (`1m30s`), booleans (`t`, `FALSE`), lists and
//! maps (`k:v,k2:v2`). What Go refuses is refused here too, because a spelling that means something else in the two
//! programs would change a deployment silently.

use std::time::Duration;

/// The longest duration: Go counts nanoseconds in 63 bits.
const MAX_SECONDS: f64 = 9_223_372_036.0;

/// Parses a duration: numbers with a unit each, such as `10s`, `1.5h` or `1m30s`; `0` needs no unit. Negative ones are
/// rejected: what is used in their place depends on the setting.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a duration; write one such as 10s, 500ms or 1m30s");
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(wrong());
    }
    let mut total = 0.0_f64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let number: f64 = rest[..digits].parse().map_err(|_| wrong())?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let seconds = match &rest[..letters] {
            "ns" => 1e-9,
            "us" | "\u{b5}s" | "\u{3bc}s" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            _ => return Err(wrong()),
        };
        rest = &rest[letters..];
        total += number * seconds;
    }
    if total > MAX_SECONDS {
        return Err(wrong());
    }
    Duration::try_from_secs_f64(total).map_err(|_| wrong())
}

/// Parses a boolean.
pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("`{text}` is not a boolean; write true or false")),
    }
}

/// Parses a whole number, which may be negative: decimal, or with the prefix `0x`, `0b`, `0o` or `0`, which is octal too.
/// Digits may be separated by single underscores.
pub(super) fn integer(text: &str) -> Result<i64, String> {
    let wrong = || format!("`{text}` is not a whole number");
    let (sign, digits) = match text.strip_prefix(['+', '-']) {
        Some(digits) => (if text.starts_with('-') { "-" } else { "" }, digits),
        None => ("", text),
    };
    let prefix = digits.get(..2).map(str::to_ascii_lowercase);
    let (radix, digits) = match prefix.as_deref() {
        Some("0x") => (16, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some(other) if other.starts_with('0') => (8, &digits[1..]),
        _ => (10, digits),
    };
    // An underscore may follow the prefix.
    let bare = digits.strip_prefix('_').filter(|_| radix != 10).unwrap_or(digits);
    let is_separated = bare.split('_').all(|group| !group.is_empty());
    let bare = if is_separated { bare.replace('_', "") } else { bare.to_owned() };
    if !bare.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err(wrong());
    }
    i64::from_str_radix(&format!("{sign}{bare}"), radix).map_err(|_| wrong())
}

/// Parses a number: decimal, hexadecimal as in `0x1p-2`, or `Inf`, `Infinity` or `NaN` in any case. Digits may be separated
/// by single underscores.
pub(super) fn float(text: &str) -> Result<f64, String> {
    let wrong = || format!("`{text}` is not a number");
    let bare = without_underscores(text).ok_or_else(wrong)?;
    let (sign, digits) = match bare.strip_prefix(['+', '-']) {
        Some(digits) => (if bare.starts_with('-') { -1.0 } else { 1.0 }, digits),
        None => (1.0, bare.as_str()),
    };
    let hexadecimal = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X"));
    let number = match hexadecimal {
        Some(digits) => hexadecimal_float(digits).map(|number| sign * number),
        None => bare.parse::<f64>().ok(),
    };
    // A number that is too large is an error, and no infinity.
    let is_word = digits.starts_with(|first: char| first.is_ascii_alphabetic());
    number.filter(|number| number.is_finite() || is_word).ok_or_else(wrong)
}

/// Parses what follows `0x`: digits, perhaps with a point, and the power of two.
fn hexadecimal_float(text: &str) -> Option<f64> {
    let (mantissa, exponent) = text.split_once(['p', 'P'])?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut number = 0.0_f64;
    for digit in whole.chars().chain(fraction.chars()) {
        number = number * 16.0 + f64::from(digit.to_digit(16)?);
    }
    let exponent = exponent.parse::<i32>().ok()?;
    let places = i32::try_from(fraction.len()).ok()?.checked_mul(4)?;
    Some(number * f64::from(exponent.checked_sub(places)?).exp2())
}

/// Removes underscores between digits; `None` if there is one elsewhere.
fn without_underscores(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_hexdigit);
    // One may follow the prefix of a base.
    let follows = |at: usize| is_digit(at - 1) || matches!(bytes[at - 1], b'x' | b'X');
    let mut marks = (0..bytes.len()).filter(|at| bytes[*at] == b'_');
    marks.all(|at| at > 0 && follows(at) && is_digit(at + 1)).then(|| text.replace('_', ""))
}

/// Parses a map: `k:v,k2:v2`, with one colon in each pair. Errors repeat no value, which may be secret.
pub(super) fn map(text: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |pair: &str| match pair.split_once(':') {
        Some((key, value)) if !value.contains(':') => Ok((key.to_owned(), value.to_owned())),
        _ => Err("not a list of pairs; write k:v,k2:v2, with one colon in each".to_owned()),
    };
    if text.trim().is_empty() { Ok(Vec::new()) } else { text.split(',').map(pair).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        for (text, millis) in [
            ("10s", 10_000),
            ("500ms", 500),
            ("1m30s", 90_000),
            ("1.5h", 5_400_000),
            ("0", 0),
            ("24h", 86_400_000),
            ("1h2m3s4ms", 3_723_004),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(duration("150us"), Ok(Duration::from_micros(150)));
        for wrong in ["", "10", "10 s", "s", "1d", "-1s", "1..5s", "ten", "1e300h", "3000000h"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn booleans_are_read_as_go_reads_them() {
        assert!(["1", "t", "T", "true", "TRUE", "True"].iter().all(|text| boolean(text) == Ok(true)));
        assert!(["0", "f", "F", "false", "FALSE", "False"].iter().all(|text| boolean(text) == Ok(false)));
        assert!(["", "yes", "on", "tRue", "2"].iter().all(|text| boolean(text).is_err()));
    }

    #[test]
    fn integers_are_read_as_go_reads_them() {
        for (text, number) in [
            ("8080", 8080),
            ("-1", -1),
            ("+7", 7),
            ("0", 0),
            ("0x1F_90", 8080),
            ("0b11", 3),
            ("0o17", 15),
            ("010", 8),
            ("0_10", 8),
            ("1_000", 1_000),
            ("-1_0", -10),
        ] {
            assert_eq!(integer(text), Ok(number), "{text}");
        }
        for wrong in ["", "-", "1__0", "_1", "1_", "08", "0x", "0x__1", "1.0", "ten", "--1", "0x-1", " 1"] {
            assert!(integer(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_are_read_as_go_reads_them() {
        for (text, number) in [
            ("0.8", 0.8),
            ("-1", -1.0),
            ("+2.5e-1", 0.25),
            ("1_0.5", 10.5),
            ("0x1p-2", 0.25),
            ("-0X1.8P+1", -3.0),
            ("0x_1F.8p0", 31.5),
            ("Inf", f64::INFINITY),
            ("-infinity", f64::NEG_INFINITY),
        ] {
            assert_eq!(float(text), Ok(number), "{text}");
        }
        assert!(float("NaN").is_ok_and(f64::is_nan));
        for wrong in [
            "",
            "x",
            "1e400",
            "0x1",
            "0xp1",
            "0x1p",
            "0x1p+-1",
            "0x1p99999",
            "_1",
            "1_",
            "1__0",
            "1 ",
            "half",
        ] {
            assert!(float(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn maps_have_pairs() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(map("k:v,k2:"), Ok(vec![pair("k", "v"), pair("k2", "")]));
        assert_eq!(map(""), Ok(Vec::new()));
        assert!(["k", "k:v,", "k:a:b"].iter().all(|wrong| map(wrong).is_err()));
    }
}
