//! Typed readers of YAML nodes: each returns the value, or reports the actual and the expected type.

use crate::Source;
use crate::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::period::{self, DurationError};
use crate::suggest::closest;
use crate::yaml::{Position, YamlNode, YamlValue, shorten};
use tollgate_core::TimeDelta;

/// A value and its position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spanned<T> {
    pub(crate) at: Position,
    pub(crate) value: T,
}

/// Reads one file and collects its errors.
pub(crate) struct Reader<'s> {
    pub(crate) source: &'s Source,
    pub(crate) errors: &'s mut Diagnostics,
    pub(crate) warnings: &'s mut Vec<Diagnostic>,
    /// Whether the file was written for envoyproxy/ratelimit.
    pub(crate) is_ratelimit_file: bool,
}

/// The keys that envoyproxy/ratelimit accepts at every level of a file.
const RATELIMIT_KEYS: [&str; 16] = [
    "domain",
    "key",
    "value",
    "descriptors",
    "rate_limit",
    "unit",
    "requests_per_unit",
    "unlimited",
    "shadow_mode",
    "quota_mode",
    "name",
    "replaces",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
];

/// The maximum length of a text; longer ones are rejected, because keys, values and names become part of counter keys
/// and metrics.
const MAX_TEXT: usize = 4_096;

impl<'s> Reader<'s> {
    /// Creates the reader of a file.
    pub(crate) const fn new(
        source: &'s Source,
        errors: &'s mut Diagnostics,
        warnings: &'s mut Vec<Diagnostic>,
    ) -> Self {
        Self { source, errors, warnings, is_ratelimit_file: false }
    }
}

impl Reader<'_> {
    /// Reports an error.
    pub(crate) fn error(&mut self, at: Position, message: impl Into<String>) {
        let source = self.source;
        self.errors.push(|| Diagnostic::new(Severity::Error, source, at, message.into()));
    }

    /// Reports an error with a suggested fix.
    pub(crate) fn error_help(&mut self, at: Position, message: impl Into<String>, help: impl Into<String>) {
        let source = self.source;
        self.errors.push(|| Diagnostic::new(Severity::Error, source, at, message.into()).help(help));
    }

    /// Reports a warning: valid, but probably unintended.
    pub(crate) fn warning(&mut self, at: Position, message: impl Into<String>, help: impl Into<String>) {
        self.warn(Severity::Warning, at, message, help);
    }

    /// Reports a warning, or a note.
    pub(crate) fn warn(
        &mut self,
        severity: Severity,
        at: Position,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        if self.warnings.len() < Diagnostics::MAX {
            self.warnings.push(Diagnostic::new(severity, self.source, at, message.into()).help(help));
        }
    }

    /// Reports a node of the wrong type.
    fn unexpected(&mut self, node: &YamlNode<'_>, name: &str, wanted: &str, example: &str) {
        let found = match &node.value {
            YamlValue::Scalar { text, plain: true } => format!("`{}`", shorten(text)),
            YamlValue::Scalar { text, plain: false } => format!("the text \"{}\"", shorten(text)),
            _ => node.kind().to_owned(),
        };
        // Keys are quoted; descriptions are not.
        let (name, help) = if name.contains(' ') {
            (name.to_owned(), format!("write it as in `{example}`"))
        } else {
            (format!("`{name}`"), format!("write it as in `{name}: {example}`"))
        };
        self.error_help(node.at, format!("{name} must be {wanted}, not {found}"), help);
    }

    /// Reports a key that has no meaning at its position.
    pub(crate) fn unknown_key(&mut self, key: &YamlNode<'_>, place: &str, known: &[&str]) {
        let text = shorten(scalar(key));
        if self.is_ratelimit_file && RATELIMIT_KEYS.contains(&text.as_str()) {
            self.warning(
                key.at,
                format!("`{text}` has no effect in {place}"),
                "leave it out, or put it where it belongs: envoyproxy/ratelimit ignores it here without a word",
            );
            return;
        }
        let help = match closest(&text, known) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("{place} may have: {}", known.join(", ")),
        };
        self.error_help(key.at, format!("unknown key `{text}` in {place}"), help);
        self.errors.envoy_reason(format!("config error, unknown key '{text}'"));
    }

    /// Reports a value that is not one of those allowed.
    pub(crate) fn unknown_value(&mut self, at: Position, name: &str, found: &str, known: &[&str]) {
        let found = shorten(found);
        let help = match closest(&found, known) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("write one of: {}", known.join(", ")),
        };
        self.error_help(at, format!("unknown {name} `{found}`"), help);
    }

    /// Returns the pairs of a mapping, without those that have a null value.
    pub(crate) fn mapping<'n, 't>(
        &mut self,
        node: &'n YamlNode<'t>,
        name: &str,
        example: &str,
    ) -> Option<impl Iterator<Item = (&'n YamlNode<'t>, &'n YamlNode<'t>)> + use<'n, 't>> {
        let YamlValue::Mapping(pairs) = &node.value else {
            self.unexpected(node, name, "a mapping", example);
            return None;
        };
        Some(pairs.iter().map(|(key, value)| (key, value)).filter(|(_, value)| !value.is_null()))
    }

    /// Returns the items of a list.
    pub(crate) fn sequence<'n, 't>(
        &mut self,
        node: &'n YamlNode<'t>,
        name: &str,
        example: &str,
    ) -> Option<&'n [YamlNode<'t>]> {
        match &node.value {
            YamlValue::Sequence(items) => Some(items),
            _ => {
                self.unexpected(node, name, "a list", example);
                None
            }
        }
    }

    /// Returns any scalar as text: `value: 404` is the text 404, as in the Envoy service.
    pub(crate) fn text(&mut self, node: &YamlNode<'_>, name: &str, example: &str) -> Option<Spanned<String>> {
        match &node.value {
            YamlValue::Scalar { text, .. } if text.len() > MAX_TEXT => {
                self.error(node.at, format!("`{name}` is longer than {MAX_TEXT} bytes"));
                None
            }
            YamlValue::Scalar { text, .. } => Some(Spanned { at: node.at, value: text.clone().into_owned() }),
            _ => {
                self.unexpected(node, name, "text", example);
                None
            }
        }
    }

    /// Returns a whole number from `least` to `most`; also in multiples, as in `10k`.
    pub(crate) fn number(
        &mut self,
        node: &YamlNode<'_>,
        name: &str,
        (least, most): (i64, i64),
        example: &str,
    ) -> Option<Spanned<i64>> {
        let number = match &node.value {
            YamlValue::Scalar { text, plain: true } => {
                let octal = if self.is_ratelimit_file { parse_octal(text) } else { None };
                octal.or_else(|| period::parse_multiple(text).ok())
            }
            _ => None,
        };
        match number {
            Some(n) if (i128::from(least)..=i128::from(most)).contains(&n) => {
                Some(Spanned { at: node.at, value: i64::try_from(n).unwrap_or(i64::MAX) })
            }
            Some(n) => {
                self.error(node.at, format!("`{name}` must be from {least} to {most}, not {n}"));
                None
            }
            None => {
                let quoted = matches!(&node.value, YamlValue::Scalar { text, plain: false } if parse_number(text).is_some());
                let wanted = if quoted { "a number without quotes" } else { "a whole number" };
                self.unexpected(node, name, wanted, example);
                None
            }
        }
    }

    /// Returns a whole number that cannot be negative.
    pub(crate) fn count(&mut self, node: &YamlNode<'_>, name: &str, most: u64) -> Option<Spanned<u64>> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let Spanned { at, value } = self.number(node, name, (0, most), "100")?;
        Some(Spanned { at, value: value.unsigned_abs() })
    }

    /// Returns a boolean, including YAML 1.1 spellings, because the Envoy service accepts them.
    pub(crate) fn boolean(&mut self, node: &YamlNode<'_>, name: &str) -> Option<Spanned<bool>> {
        let value = match &node.value {
            YamlValue::Scalar { text, plain: true } => match text.to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" => Some(true),
                "false" | "no" | "off" => Some(false),
                _ => None,
            },
            _ => None,
        };
        match value {
            Some(value) => Some(Spanned { at: node.at, value }),
            None => {
                self.unexpected(node, name, "true or false", "true");
                None
            }
        }
    }

    /// Returns a length of time: `30s`, `250ms`, `minute`.
    pub(crate) fn duration(&mut self, node: &YamlNode<'_>, name: &str) -> Option<Spanned<TimeDelta>> {
        let text = match &node.value {
            YamlValue::Scalar { text, .. } => text,
            _ => "",
        };
        match period::parse_duration(text) {
            Ok(value) => return Some(Spanned { at: node.at, value }),
            Err(DurationError::Invalid) => self.unexpected(node, name, "a length of time", "30s"),
            Err(DurationError::Ambiguous([a, b])) => self.error_help(
                node.at,
                format!("`{name}: {}` may mean `{a}` or `{b}`", shorten(text)),
                "write one of these",
            ),
        }
        None
    }
}

/// Parses `010` as the 8 that it is to Go's reader of YAML; `None` if it is another number.
fn parse_octal(text: &str) -> Option<i128> {
    let digits = text.strip_prefix('0').filter(|digits| digits.starts_with(|c: char| c.is_ascii_digit()))?;
    i128::from_str_radix(&digits.replace('_', ""), 8).ok()
}

/// Returns the text of a scalar; keys of mappings always are scalars.
pub(crate) fn scalar<'n>(node: &'n YamlNode<'_>) -> &'n str {
    match &node.value {
        YamlValue::Scalar { text, .. } => text,
        _ => "",
    }
}

/// Parses whole numbers as YAML writes them: decimal with `_` between digits, `0x`, `0o`, `0b`.
pub(crate) fn parse_number(text: &str) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if !digits.starts_with(|c: char| c.is_ascii_digit()) || digits.len() > 40 {
        return None;
    }
    let (radix, digits) = match digits.get(..2) {
        Some("0x") => (16, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        _ => (10, digits),
    };
    let digits: String = digits.chars().filter(|c| *c != '_').collect();
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let number = i128::from_str_radix(&digits, radix).ok()?;
    Some(if negative { -number } else { number })
}
