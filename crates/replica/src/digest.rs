//! Digest of a quota table: the sum of its entries' fingerprints, so that the order of changes does not matter and a change
//! costs an addition. It shows whether two tables of one installation are equal; it does not protect against entries
//! chosen by an attacker. The arithmetic is fixed, because processes of different versions compare their digests.

use ring::digest::{SHA256, digest};
use serde::Serialize;

/// Returns the fingerprint of terms, from their JSON.
pub(crate) fn terms_fingerprint(terms: &impl Serialize) -> u64 {
    let json = serde_json::to_vec(terms).unwrap_or_default();
    let hash = digest(&SHA256, &json);
    u64::from_le_bytes(hash.as_ref()[..8].try_into().unwrap_or_default())
}

/// Returns the fingerprint of a caller's entry.
pub(crate) fn entry_fingerprint(key: u64, from: u32, until: u32, terms: u64) -> u64 {
    let validity = u64::from(from) << 32 | u64::from(until);
    mix(mix(mix(key).wrapping_add(validity)).wrapping_add(terms))
}

/// The finalizer of `SplitMix64`.
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes of other versions compute the same numbers.
    #[test]
    fn the_arithmetic_is_fixed() {
        assert_eq!(terms_fingerprint(&("pro", [1, 2])), 0xaa18_6a1a_f568_68e0);
        assert_eq!(entry_fingerprint(1, 2, 3, 4), 0x8730_5f40_c844_0c5d);
        assert_ne!(entry_fingerprint(1, 2, 3, 4), entry_fingerprint(1, 3, 2, 4));
    }
}
