//! YAML files of users, configuration and test files: read into a type, with errors that name the file, the line, the
//! key and the correction, once each.
//!
//! A file that is not YAML at all is reported as such, before any complaint about its content: the typed reader stops at
//! the first value of another kind, which in a broken file is rarely the mistake. The parser's own rendering was
//! rejected: it repeats the lines around the place, which may contain passwords, and calls every file `<input>`.

use anyhow::Context;
use serde::de::{self, DeserializeOwned, Deserializer, IgnoredAny, Visitor};
use serde_saphyr::{Error, UserMessageFormatter};
use std::fmt;
use std::path::Path;

/// Reads a file. `former` are deprecated keys with their present names; errors do not list them as valid.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, former: &[(&str, &str)]) -> anyhow::Result<(T, String)> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let value = parse(&path.display().to_string(), &text, former).map_err(anyhow::Error::msg)?;
    Ok((value, text))
}

/// Parses the text of the file `name`.
fn parse<T: DeserializeOwned>(name: &str, text: &str, former: &[(&str, &str)]) -> Result<T, String> {
    let error = match serde_saphyr::from_str::<T>(text) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    let is_repeated = matches!(error.without_snippet(), Error::DuplicateMappingKey { .. });
    if let (false, Err(broken)) = (is_repeated, serde_saphyr::from_str::<IgnoredAny>(text)) {
        let what = broken.without_snippet().render_with_formatter(&UserMessageFormatter);
        return Err(format!("{}: invalid YAML: {}", place(name, &broken), plain(&what)));
    }
    Err(format!("{}: {}", place(name, &error), explain(&error, text, former)))
}

/// Returns `FILE:LINE:COLUMN`, as far as it is known.
fn place(name: &str, error: &Error) -> String {
    match error.location() {
        Some(at) => format!("{name}:{}:{}", at.line(), at.column()),
        None => name.to_owned(),
    }
}

/// Returns what is wrong and what to write instead.
fn explain(error: &Error, text: &str, former: &[(&str, &str)]) -> String {
    match error.without_snippet() {
        Error::SerdeUnknownField { field, expected, .. } => {
            let valid: Vec<&str> =
                expected.iter().copied().filter(|key| !is_former(key, expected, former)).collect();
            format!("unknown key `{field}`; {}", correction(field, &valid))
        }
        Error::SerdeUnknownVariant { variant, expected, .. } => {
            format!("{}unknown value `{variant}`; {}", key_prefix(error, text), correction(variant, expected))
        }
        Error::SerdeMissingField { field, .. } => format!("missing key `{field}`"),
        Error::DuplicateMappingKey { key: Some(key), .. } => format!("duplicate key `{key}`; remove one"),
        Error::InvalidScalar { ty, .. } => {
            let key = key_prefix(error, text);
            let unit = if key.ends_with("_ms`: ") { " of milliseconds" } else { "" };
            format!("{key}expected {}{unit}", kind(ty))
        }
        Error::SerdeInvalidType { unexpected, expected, .. } => {
            format!("{}expected {expected}, got {unexpected}", key_prefix(error, text))
        }
        Error::Message { msg, .. } => format!("{}{}", key_prefix(error, text), plain(msg)),
        other => {
            let what = other.render_with_formatter(&UserMessageFormatter);
            format!("{}{}", key_prefix(error, text), plain(&what))
        }
    }
}

/// Returns whether `key` is deprecated where these keys are valid: its present name is among them.
fn is_former(key: &str, valid: &[&str], former: &[(&str, &str)]) -> bool {
    let leaf = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    former.iter().any(|(old, new)| leaf(old) == key && valid.contains(&leaf(new).as_str()))
}

/// Returns the nearest valid word, else all of them.
fn correction(written: &str, valid: &[&str]) -> String {
    match tollgate_rules::closest(written, valid) {
        Some(near) => format!("did you mean `{near}`?"),
        None => {
            let all: Vec<String> = valid.iter().map(|word| format!("`{word}`")).collect();
            format!("use one of {}", all.join(", "))
        }
    }
}

/// Returns the type of a scalar in words.
fn kind(ty: &str) -> &str {
    match ty {
        "f32" | "f64" | "float" => "a number",
        "bool" | "boolean" => "true or false",
        ty if ty.starts_with(['i', 'u']) => "a whole number",
        ty => ty,
    }
}

/// Returns `` `key`: `` for the key on the line of the error.
fn key_prefix(error: &Error, text: &str) -> String {
    let Some(at) = error.location() else { return String::new() };
    let line = usize::try_from(at.line()).ok().and_then(|line| text.lines().nth(line.checked_sub(1)?));
    let column = usize::try_from(at.column()).unwrap_or(1).saturating_sub(1);
    let before: String = line.unwrap_or_default().chars().take(column).collect();
    let Some(before) = before.trim_end().strip_suffix(':') else { return String::new() };
    let key = before.rsplit(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap_or_default();
    if key.is_empty() { String::new() } else { format!("`{key}`: ") }
}

/// Returns a message without the position that the parser appends, and on one line.
fn plain(message: &str) -> String {
    let message = message.split(" at line ").next().unwrap_or(message);
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A whole number of a configuration file, between `MIN` and `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whole<const MIN: u64, const MAX: u64>(pub(crate) u64);

/// A time of a configuration file, in whole milliseconds up to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Millis<const MAX: u64>(pub(crate) u64);

/// Reads a whole number within bounds; `unit` follows the bounds in messages.
struct WholeVisitor {
    bounds: std::ops::RangeInclusive<u64>,
    unit: &'static str,
}

impl fmt::Display for WholeVisitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (min, max) = (self.bounds.start(), self.bounds.end());
        write!(f, "must be a whole number{} between {min} and {max}", self.unit)
    }
}

impl Visitor<'_> for WholeVisitor {
    type Value = u64;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (min, max) = (self.bounds.start(), self.bounds.end());
        write!(f, "a whole number{} between {min} and {max}", self.unit)
    }
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        if self.bounds.contains(&number) {
            Ok(number)
        } else {
            Err(E::custom(format!("{self}, got {number}")))
        }
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<u64, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::custom(format!("{self}, got {number}"))),
        }
    }
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<u64, E> {
        Err(E::custom(format!("{self}, got {number}")))
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
        Err(E::custom(format!("{self}, got `{text}`")))
    }
}

impl<'de, const MIN: u64, const MAX: u64> de::Deserialize<'de> for Whole<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(WholeVisitor { bounds: MIN..=MAX, unit: "" }).map(Self)
    }
}

impl<'de, const MAX: u64> de::Deserialize<'de> for Millis<MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(WholeVisitor { bounds: 1..=MAX, unit: " of milliseconds" }).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[serde(default)]
        #[allow(dead_code, reason = "only read")]
        http: Option<String>,
        #[serde(default, alias = "who")]
        #[allow(dead_code, reason = "only read")]
        identity: Option<bool>,
        wait_ms: Option<Millis<500>>,
        keys: Option<Whole<0, 9>>,
    }

    fn wrong(text: &str) -> String {
        parse::<Sample>("a.yml", text, &[("who", "identity")]).expect_err(text)
    }

    /// Each message names the file and the place once, and the correction.
    #[test]
    fn errors_name_place_key_and_correction_once() {
        for (text, message) in [
            ("http: x\nidentiy: true\n", "a.yml:2:1: unknown key `identiy`; did you mean `identity`?"),
            ("zzz: 1\n", "a.yml:1:1: unknown key `zzz`; use one of `http`, `identity`, `wait_ms`, `keys`"),
            (
                "wait_ms: 10ms\n",
                "a.yml:1:10: `wait_ms`: must be a whole number of milliseconds between 1 and 500, got `10ms`",
            ),
            (
                "wait_ms: 0\n",
                "a.yml:1:10: `wait_ms`: must be a whole number of milliseconds between 1 and 500, got 0",
            ),
            ("keys: -1\n", "a.yml:1:7: `keys`: must be a whole number between 0 and 9, got -1"),
            ("keys: 1.5\n", "a.yml:1:7: `keys`: must be a whole number between 0 and 9, got 1.5"),
            ("identity: maybe\n", "a.yml:1:11: `identity`: expected true or false"),
            ("http: a\nhttp: b\n", "a.yml:2:1: duplicate key `http`; remove one"),
        ] {
            assert_eq!(wrong(text), message, "{text}");
        }
    }

    /// `http: [` is a mistake of the file, not of the kind of value.
    #[test]
    fn a_broken_file_is_reported_as_one() {
        for text in ["http: [\n", "http: {a: b\n", "a: b: c\n", "http: \"x\n"] {
            let error = wrong(text);
            assert!(error.starts_with("a.yml:") && error.contains(": invalid YAML: "), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    /// The lines around a mistake may contain passwords.
    #[test]
    fn errors_do_not_repeat_other_lines() {
        let error = wrong("http: postgres://u:geheim@h/d\nkeyz: 3\n");
        assert!(!error.contains("geheim"), "{error}");
    }

    #[test]
    fn numbers_within_bounds_are_read() {
        let sample: Sample = parse("a.yml", "wait_ms: 500\nkeys: 0\n", &[]).expect("valid");
        assert_eq!((sample.wait_ms, sample.keys), (Some(Millis(500)), Some(Whole(0))));
    }
}
