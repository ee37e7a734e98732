//! Pseudonyms: values that may be secrets are replaced by keyed hashes before they reach a counter that cells share, so
//! that no API key leaves a cell, and every cell names a caller's counter alike.
//!
//! The hash is computed once for a value and remembered: the request path then costs a lookup. Hashing when a message
//! is sent was rejected: the receiver could not find its own counter of the same caller.

use foldhash::quality::RandomState;
use ring::hmac;
use smallvec::SmallVec;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{Charge, CounterKey, KeyPart, Mode, RegionMode};

/// Number of values whose hashes are remembered.
const SLOTS: usize = 8_192;
/// Bytes of the hash that are used: finding two callers that share a counter still takes 2^64 tries.
const BYTES: usize = 16;

type Slot = Mutex<Option<(Box<str>, Arc<str>)>>;

/// Replaces secrets by keyed hashes.
pub struct Pseudonyms {
    key: hmac::Key,
    hasher: RandomState,
    slots: Box<[Slot]>,
}

impl Pseudonyms {
    /// Creates pseudonyms with a key that all cells have.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, secret),
            hasher: RandomState::default(),
            slots: (0..SLOTS).map(|_| Mutex::default()).collect(),
        }
    }

    /// Returns a fingerprint of the key, which reveals nothing about it.
    #[must_use]
    pub fn key_check(&self) -> u64 {
        let tag = hmac::sign(&self.key, b"tollgate cells: key check");
        u64::from_le_bytes(tag.as_ref()[..8].try_into().unwrap_or_default())
    }

    /// Returns the pseudonym of a value.
    #[must_use]
    pub fn of(&self, secret: &str) -> Arc<str> {
        let slot = &self.slots[self.hasher.hash_one(secret) as usize % SLOTS];
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, name)) = &*slot
            && **known == *secret
        {
            return Arc::clone(name);
        }
        let tag = hmac::sign(&self.key, secret.as_bytes());
        let mut name = String::with_capacity(2 * BYTES);
        for byte in &tag.as_ref()[..BYTES] {
            for digit in [byte >> 4, byte & 15] {
                name.push(char::from_digit(u32::from(digit), 16).unwrap_or('0'));
            }
        }
        let name: Arc<str> = name.into();
        *slot = Some((secret.into(), Arc::clone(&name)));
        name
    }

    /// Returns the pseudonyms of a key's secrets; `None` if it has none.
    pub(crate) fn names(&self, key: &CounterKey<'_>) -> Option<Names> {
        if !key.parts.iter().any(is_secret) {
            return None;
        }
        let secret = |part: &KeyPart<'_>| match part {
            KeyPart::Secret(value) => Some(self.of(value)),
            _ => None,
        };
        Some(key.parts.iter().map(secret).collect())
    }
}

/// One entry for each value of a key: the pseudonym of a secret.
pub(crate) type Names = SmallVec<[Option<Arc<str>>; 4]>;

/// Returns whether the counter is named alike in all cells.
#[inline]
pub(crate) fn is_shared_name(charge: &Charge<'_>) -> bool {
    charge.mode != Mode::Local && charge.key.scope.region_mode() != RegionMode::Split
}

/// Returns whether a charge has values that must be replaced.
#[inline]
pub(crate) fn needs_names(charge: &Charge<'_>) -> bool {
    charge.key.parts.iter().any(is_secret) && is_shared_name(charge)
}

#[inline]
fn is_secret(part: &KeyPart<'_>) -> bool {
    matches!(part, KeyPart::Secret(_))
}

/// Returns a key's values with secrets replaced.
pub(crate) fn renamed<'a>(parts: &[KeyPart<'a>], names: Option<&'a Names>) -> SmallVec<[KeyPart<'a>; 4]> {
    let Some(names) = names else { return parts.iter().copied().collect() };
    let one = |(part, name): (&KeyPart<'a>, &'a Option<Arc<str>>)| match name {
        Some(name) => KeyPart::Secret(name),
        None => *part,
    };
    parts.iter().zip(names).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key in a message between cells would be readable by anyone who reads the link or the peer's memory.
    #[test]
    fn a_pseudonym_depends_on_the_key_and_shows_nothing_of_the_secret() {
        let (one, other) = (Pseudonyms::new(b"one"), Pseudonyms::new(b"other"));
        let name = one.of("sk_live_4242424242424242");
        assert_eq!(name, one.of("sk_live_4242424242424242"), "remembered");
        assert_ne!(name, other.of("sk_live_4242424242424242"));
        assert_ne!(one.key_check(), other.key_check());
        assert!(name.len() == 32 && !name.contains("live"), "{name}");
    }
}
