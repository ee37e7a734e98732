//! Detection of a secret in other values: verbatim, embedded, partial or percent-encoded.

use super::is_truncated;
use std::borrow::Cow;

/// Minimum length of a secret to search for: shorter ones would match everywhere.
pub(super) const MIN_SECRET: usize = 4;
/// Minimum length of a part of a secret that counts as revealing it.
const MIN_SECRET_PREFIX: usize = 8;
/// Maximum number of percent-encoding layers that are decoded.
const MAX_LAYERS: usize = 4;

/// A value as sent, and percent-decoded if it has escapes.
pub(super) struct DecodedValue<'p> {
    sent: &'p str,
    plain: Option<String>,
}

impl<'p> DecodedValue<'p> {
    pub(super) fn new(sent: &'p str) -> Self {
        let plain = sent.contains('%').then(|| unescaped(sent));
        Self { sent, plain }
    }

    /// Returns a masked value without its authentication scheme; `None` if it is too short to search for.
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

    /// Returns whether this value reveals `secret` or a usable part of it.
    pub(super) fn reveals(&self, secret: &Self) -> bool {
        let matches = |value: &str, secret: &str| {
            secret.len() >= MIN_SECRET && value.contains(secret)
                || value.len() >= MIN_SECRET_PREFIX && secret.contains(value)
                || is_truncated(self.sent) && ends_with_prefix_of(value, secret)
        };
        let is_escaped = self.plain.is_some() || secret.plain.is_some();
        matches(self.sent, secret.sent) || is_escaped && matches(self.plain(), secret.plain())
    }
}

/// Decodes all layers of percent-encoding; a truncated escape is dropped.
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

/// Returns whether the value ends with a prefix of the secret, as a truncated value may.
fn ends_with_prefix_of(value: &str, secret: &str) -> bool {
    let (value, secret) = (value.as_bytes(), secret.as_bytes());
    (MIN_SECRET..=secret.len().min(value.len())).any(|length| value.ends_with(&secret[..length]))
}
