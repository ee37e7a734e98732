//! Pseudonyms for values that must not be written down: 64 bits of the keyed hash, and the leading characters that
//! may be shown. The quota table finds a caller by its pseudonym as by the value itself.

use crate::key_hash::{KeyHasher, prefix};

/// First and last character of a pseudonym.
pub const MARK: char = '\u{7f}';
/// Number of digits after the mark: sixteen control characters, which no wildcard pattern contains.
const DIGITS: usize = 16;
const ZERO: u8 = 0x80;

/// Returns the hash and the leading characters of the original value.
fn read(value: &str) -> Option<(u64, &str)> {
    let (_, rest) = value.split_once(MARK)?;
    let (mut hash, mut digits) = (0, rest.chars());
    for _ in 0..DIGITS {
        let digit = u32::from(digits.next()?).checked_sub(ZERO.into()).filter(|digit| *digit < 16)?;
        hash = hash << 4 | u64::from(digit);
    }
    Some((hash, digits.as_str().split(MARK).next()?))
}

/// Returns the hash by which the quota table finds a pseudonymized caller.
#[must_use]
pub fn table_hash(value: &str) -> Option<u64> {
    read(value).map(|(hash, _)| hash)
}

/// Returns the leading characters of a pseudonymized value.
#[must_use]
pub fn pseudonym_prefix(value: &str) -> Option<&str> {
    read(value).map(|(_, first)| first)
}

/// Returns the pseudonym of a value.
#[must_use]
pub fn pseudonymize(hasher: &KeyHasher, value: &str) -> String {
    let hash = hasher.hash(value).table_hash().to_be_bytes();
    let digits = hash.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(ZERO + digit));
    format!("{MARK}{}{}{MARK}", digits.collect::<String>(), prefix(value))
}
