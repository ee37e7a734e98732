//! What stands for a value that must not be written down: a word of its keyed hash, and the few first characters that people
//! may see. The quota table finds a caller by it as by the value itself.

use crate::auth::key_hash::{KeyHasher, prefix};

/// Begins and ends what stands for a value.
pub(crate) const MARK: char = '\u{7f}';
/// The digits after it: sixteen signs that nobody writes a wildcard with.
const DIGITS: usize = 16;
const ZERO: u8 = 0x80;

/// The word of a value's hash, and the value's first characters.
fn read(value: &str) -> Option<(u64, &str)> {
    let (_, rest) = value.split_once(MARK)?;
    let (mut word, mut signs) = (0, rest.chars());
    for _ in 0..DIGITS {
        let digit = u32::from(signs.next()?).checked_sub(ZERO.into()).filter(|digit| *digit < 16)?;
        word = word << 4 | u64::from(digit);
    }
    Some((word, signs.as_str().split(MARK).next()?))
}

/// The word that the book finds a hidden caller by.
pub(crate) fn table_hash(value: &str) -> Option<u64> {
    read(value).map(|(word, _)| word)
}

/// The first characters of what a hidden value stands for.
pub(crate) fn pseudonym_prefix(value: &str) -> Option<&str> {
    read(value).map(|(_, first)| first)
}

/// What stands for a value.
pub(crate) fn pseudonymize(hasher: &KeyHasher, value: &str) -> String {
    let word = hasher.hash(value).table_hash().to_be_bytes();
    let digits = word.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(ZERO + digit));
    format!("{MARK}{}{}{MARK}", digits.collect::<String>(), prefix(value))
}
