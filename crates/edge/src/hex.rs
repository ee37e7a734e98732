//! Bytes as hexadecimal digits. By a table: the standard formatting takes longer for a key than hashing it does.

/// Two digits for each byte.
pub(crate) fn digits(bytes: &[u8]) -> impl Iterator<Item = u8> {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]])
}
