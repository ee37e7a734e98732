//! Recognising a secret under other names: as it is, with more around it, a part of it, or spelled as addresses spell it.

use super::is_cut;
use std::borrow::Cow;

/// Nothing shorter is looked for as a secret under other names: it would be found everywhere.
pub(super) const SHORTEST: usize = 4;
/// No shorter part of a secret counts as one.
const SHORTEST_PART: usize = 8;
/// How many times over a value may be escaped.
const DEEPEST: usize = 4;

/// A value that is not to be told.
pub(super) struct Secret<'p> {
    sent: &'p [u8],
    plain: Cow<'p, [u8]>,
}

impl<'p> Secret<'p> {
    /// Of a hidden value, without the word that says of what kind it is; nothing, where it is too short to be recognised.
    pub(super) fn of(value: &'p str) -> Option<Self> {
        let scheme = |word: &&str| ["bearer", "basic"].iter().any(|known| word.eq_ignore_ascii_case(known));
        let value = match value.trim_start().split_once(' ') {
            Some((_, rest)) if value.split_whitespace().next().as_ref().is_some_and(scheme) => rest.trim(),
            _ => value,
        };
        let sent = value.as_bytes();
        (sent.len() >= SHORTEST).then(|| Self { sent, plain: unescaped(value) })
    }

    /// Whether whoever reads this value knows of it.
    pub(super) fn is_told_by(&self, value: &str) -> bool {
        let plain = unescaped(value);
        let tells = |value: &[u8], secret: &[u8]| {
            secret.len() >= SHORTEST && contains(value, secret)
                || value.len() >= SHORTEST_PART && contains(secret, value)
        };
        tells(value.as_bytes(), self.sent)
            || tells(&plain, &self.plain)
            || is_cut(value)
                && (ends_with_beginning(value.as_bytes(), self.sent)
                    || ends_with_beginning(&plain, &self.plain))
    }
}

/// Without `%` and two digits, however often over; one that was cut off is left out.
fn unescaped(text: &str) -> Cow<'_, [u8]> {
    let mut bytes = Cow::Borrowed(text.as_bytes());
    for _ in 0..DEEPEST {
        if !bytes.contains(&b'%') {
            break;
        }
        bytes = Cow::Owned(once_unescaped(&bytes));
    }
    bytes
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

fn contains(text: &[u8], part: &[u8]) -> bool {
    part.len() <= text.len() && text.windows(part.len()).any(|window| window == part)
}

/// Whether the end of a value is the beginning of a secret that did not fit.
fn ends_with_beginning(value: &[u8], secret: &[u8]) -> bool {
    (SHORTEST..=secret.len().min(value.len())).any(|length| value.ends_with(&secret[..length]))
}
