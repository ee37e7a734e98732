//! Typed readers of YAML nodes: each returns the value, or reports what is there and what is expected.

use crate::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::suggest::closest;
use crate::yaml::{Position, YamlNode, YamlValue, shorten};
use crate::{Source, period};
use tollgate_core::TimeDelta;

/// A value and where it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spanned<T> {
    pub(crate) at: Position,
    pub(crate) value: T,
}

/// Reads one file and collects what is wrong with it.
pub(crate) struct Reader<'s> {
    pub(crate) source: &'s Source,
    pub(crate) errors: &'s mut Diagnostics,
    pub(crate) warnings: &'s mut Vec<Diagnostic>,
}

/// Longer texts are refused: keys, values and names end up in counters' names and on metrics' pages.
const MAX_TEXT: usize = 4_096;

impl Reader<'_> {
    /// Reports an error.
    pub(crate) fn error(&mut self, at: Position, message: impl Into<String>) {
        let source = self.source;
        self.errors.push(|| Diagnostic::new(Severity::Error, source, at, message.into()));
    }

    /// Reports an error, with what to write instead.
    pub(crate) fn error_help(&mut self, at: Position, message: impl Into<String>, help: impl Into<String>) {
        let source = self.source;
        self.errors.push(|| Diagnostic::new(Severity::Error, source, at, message.into()).help(help));
    }

    /// Reports what loads and is hardly meant.
    pub(crate) fn warning(&mut self, at: Position, message: impl Into<String>, help: impl Into<String>) {
        if self.warnings.len() < Diagnostics::MAX {
            self.warnings
                .push(Diagnostic::new(Severity::Warning, self.source, at, message.into()).help(help));
        }
    }

    /// Reports a node of the wrong type.
    fn unexpected(&mut self, node: &YamlNode<'_>, name: &str, wanted: &str, example: &str) {
        let found = match &node.value {
            YamlValue::Scalar { text, plain: true } => format!("`{}`", shorten(text)),
            YamlValue::Scalar { text, plain: false } => format!("the text \"{}\"", shorten(text)),
            _ => node.kind().to_owned(),
        };
        // A key is quoted; what is described in words is not.
        let (name, help) = if name.contains(' ') {
            (name.to_owned(), format!("write it as in `{example}`"))
        } else {
            (format!("`{name}`"), format!("write it as in `{name}: {example}`"))
        };
        self.error_help(node.at, format!("{name} must be {wanted}, not {found}"), help);
    }

    /// Reports a key that means nothing where it stands.
    pub(crate) fn unknown_key(&mut self, key: &YamlNode<'_>, place: &str, known: &[&str]) {
        let text = shorten(scalar(key));
        let help = match closest(&text, known) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("{place} may have: {}", known.join(", ")),
        };
        self.error_help(key.at, format!("unknown key `{text}` in {place}"), help);
    }

    /// Reports a word that is none of those allowed.
    pub(crate) fn unknown_value(&mut self, at: Position, name: &str, found: &str, known: &[&str]) {
        let found = shorten(found);
        let help = match closest(&found, known) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("write one of: {}", known.join(", ")),
        };
        self.error_help(at, format!("unknown {name} `{found}`"), help);
    }

    /// The pairs of a mapping, those with a null value left out.
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

    /// The items of a list.
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

    /// Any scalar as text: `value: 404` is the text 404, as it is to the Envoy service.
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

    /// A whole number from `least` to `most`.
    pub(crate) fn number(
        &mut self,
        node: &YamlNode<'_>,
        name: &str,
        (least, most): (i64, i64),
        example: &str,
    ) -> Option<Spanned<i64>> {
        let number = match &node.value {
            YamlValue::Scalar { text, plain: true } => parse_number(text),
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

    /// The same for what cannot be negative.
    pub(crate) fn count(&mut self, node: &YamlNode<'_>, name: &str, most: u64) -> Option<Spanned<u64>> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let Spanned { at, value } = self.number(node, name, (0, most), "100")?;
        Some(Spanned { at, value: value.unsigned_abs() })
    }

    /// A boolean, in the words of YAML 1.1 as well, since the Envoy service takes them.
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

    /// A length of time: `30s`, `250ms`, `minute`.
    pub(crate) fn duration(&mut self, node: &YamlNode<'_>, name: &str) -> Option<Spanned<TimeDelta>> {
        match &node.value {
            YamlValue::Scalar { text, .. } if period::parse_duration(text).is_some() => {
                period::parse_duration(text).map(|value| Spanned { at: node.at, value })
            }
            _ => {
                self.unexpected(node, name, "a length of time", "30s");
                None
            }
        }
    }
}

/// The text of a scalar; keys of mappings always are.
pub(crate) fn scalar<'n>(node: &'n YamlNode<'_>) -> &'n str {
    match &node.value {
        YamlValue::Scalar { text, .. } => text,
        _ => "",
    }
}

/// Whole numbers as YAML writes them: decimal with `_` between digits, `0x`, `0o`, `0b`.
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
