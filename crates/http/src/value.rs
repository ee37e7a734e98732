//! Values from untrusted clients that rules and counters can use as they are: UTF-8 of bounded length.
//!
//! A check is never rejected for one long or unreadable value: proxies that fail open would forward the request without
//! any limit, and one header would be enough. The part of such a value that cannot be kept is replaced by a hash of the
//! whole. Its beginning and its end stay, because rules match them (`value: foo*`), and different values stay different.

use ring::digest;
use std::borrow::Cow;

/// Maximum length of a value in bytes.
pub const MAX_VALUE: usize = 8 * 1024;
/// How much of the beginning and of the end is kept. Together longer than a literal of a rule, so that none is matched
/// by accident.
const MAX_HEAD: usize = 4 * 1024;
const MAX_TAIL: usize = 2 * 1024;

/// Returns the value, or if it is too long, its beginning and end with a hash between them.
///
/// ```
/// use tollgate_http::value::{MAX_VALUE, bounded};
/// assert_eq!(bounded("ada".into()), "ada");
/// let long = bounded("ada".repeat(MAX_VALUE).into());
/// assert!(long.len() <= MAX_VALUE && long.starts_with("ada") && long.contains("…sha256:"));
/// ```
#[must_use]
#[inline]
pub fn bounded(value: Cow<'_, str>) -> Cow<'_, str> {
    if value.len() <= MAX_VALUE { value } else { Cow::Owned(replaced(value.as_bytes())) }
}

/// Returns the value as [`bounded`] text, with a hash of the whole in place of the part that is not UTF-8.
///
/// ```
/// use tollgate_http::value::from_bytes;
/// let value = from_bytes(b"caf\xe9 1");
/// assert!(value.starts_with("caf…sha256:") && value.ends_with("… 1"));
/// assert_ne!(value, from_bytes(b"caf\xe8 1"));
/// ```
#[must_use]
#[inline]
pub fn from_bytes(value: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(value) {
        Ok(text) => bounded(Cow::Borrowed(text)),
        Err(_) => Cow::Owned(replaced(value)),
    }
}

#[cold]
fn replaced(value: &[u8]) -> String {
    let mut text = match value.utf8_chunks().next() {
        Some(first) => first.valid()[..first.valid().floor_char_boundary(MAX_HEAD)].to_owned(),
        None => String::new(),
    };
    text.push_str("…sha256:");
    let mut digits = Vec::new();
    crate::hex::put(&mut digits, &digest::digest(&digest::SHA256, value).as_ref()[..16]);
    text.extend(digits.into_iter().map(char::from));
    text.push('…');
    // A value with a byte that is not UTF-8 has its head before the first one and its tail after the last.
    let rest = &value[value.len().saturating_sub(MAX_TAIL)..];
    if let Some(last) = rest.utf8_chunks().last().filter(|last| last.invalid().is_empty()) {
        text.push_str(last.valid());
    }
    text
}
