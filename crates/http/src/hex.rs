//! Hexadecimal encoding by table lookup. Rejected: standard formatting, because for a key it takes longer than hashing
//! it.

/// Appends two digits per byte.
pub(crate) fn put(text: &mut Vec<u8>, bytes: &[u8]) {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let start = text.len();
    text.resize(start + 2 * bytes.len(), b'0');
    for (pair, byte) in text[start..].chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}
