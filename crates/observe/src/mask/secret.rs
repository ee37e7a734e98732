//! Recognising a secret under other names: as it is, with more around it, a part of it, or spelled as addresses spell it.

use super::is_truncated;
use std::borrow::Cow;

/// Nothing shorter is looked for as a secret under other names: it would be found everywhere.
pub(super) const MIN_SECRET: usize = 4;
/// No shorter part of a secret counts as one.
const MIN_SECRET_PREFIX: usize = 8;
/// How many times over a value may be escaped.
const MAX_LAYERS: usize = 4;

/// A text, and what it is without escapes, where it has any.
pub(super) struct DecodedValue<'p> {
    sent: &'p str,
    plain: Option<String>,
}

impl<'p> DecodedValue<'p> {
    pub(super) fn new(sent: &'p str) -> Self {
        let plain = sent.contains('%').then(|| unescaped(sent));
        Self { sent, plain }
    }

    /// A hidden value without the word that says of what kind it is; nothing, where it is too short to be recognised.
    pub(super) fn secret(value: &'p str) -> Option<Self> {
        let is_scheme = |word: &str| ["bearer", "basic"].iter().any(|known| word.eq_ignore_ascii_case(known));
        let value = match value.trim_start().split_once(' ') {
            Some((scheme, rest)) if is_scheme(scheme) => rest.trim(),
            _ => value,
        };
        (value.len() >= MIN_SECRET).then(|| Self::new(value))
    }

    fn plain(&self) -> &str {
        self.plain.as_deref().unwrap_or(self.sent)
    }

    /// Whether whoever reads it knows of this secret.
    pub(super) fn reveals(&self, secret: &Self) -> bool {
        let tells = |value: &str, secret: &str| {
            secret.len() >= MIN_SECRET && value.contains(secret)
                || value.len() >= MIN_SECRET_PREFIX && secret.contains(value)
                || is_truncated(self.sent) && ends_with_prefix_of(value, secret)
        };
        let is_escaped = self.plain.is_some() || secret.plain.is_some();
        tells(self.sent, secret.sent) || is_escaped && tells(self.plain(), secret.plain())
    }
}

/// Without `%` and two digits, however often over; one that was cut off is left out.
fn unescaped(text: &str) -> String {
    let mut bytes = Cow::Borrowed(text.as_bytes());
    for _ in 0..MAX_LAYERS {
        if bytes.contains(&b'%') {
            bytes = Cow::Owned(once_unescaped(&bytes));
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn once_unescaped(text: &[u8]) -> Vec<u8> {
    let digit = |at: usize| text.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let (mut plain, mut at) = (Vec::with_capacity(text.len()), 0);
    while at < text.len() {
        let escaped = (text[at] == b'%').then(|| digit(at + 1).zip(digit(at + 2))).flatten();
        match escaped.and_then(|(high, low)| u8::try_from(high * 16 + low).ok()) {
            Some(byte) => {
                plain.push(byte);
                at += 3;
            }
            None if text[at] == b'%' && at + 3 > text.len() => break,
            None => {
                plain.push(text[at]);
                at += 1;
            }
        }
    }
    plain
}

/// Whether the end of a value is the beginning of a secret that did not fit.
fn ends_with_prefix_of(value: &str, secret: &str) -> bool {
    let (value, secret) = (value.as_bytes(), secret.as_bytes());
    (MIN_SECRET..=secret.len().min(value.len())).any(|length| value.ends_with(&secret[..length]))
}
