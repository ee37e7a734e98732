//! Pseudonyms: values that may be secrets are replaced by keyed hashes before they reach a counter that cells share, so
//! that no API key leaves a cell, and every cell names a caller's counter alike. So are long values: what waits for
//! other cells is bounded in bytes, and a caller that sends long values must not take the room of the others.
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

/// Bytes of a value that is kept as it is.
const MAX_PLAIN: usize = 256;
/// Begins the name of a long value. Its rest is a keyed hash: without the key, no short value of the same name can be made.
const LONG: &str = "long value ";

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
        // Not remembered, because that would take its memory.
        if secret.len() > MAX_PLAIN {
            return named("", &hmac::sign(&self.key, secret.as_bytes()));
        }
        let slot = &self.slots[self.hasher.hash_one(secret) as usize % SLOTS];
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, name)) = &*slot
            && **known == *secret
        {
            return Arc::clone(name);
        }
        let name = named("", &hmac::sign(&self.key, secret.as_bytes()));
        *slot = Some((secret.into(), Arc::clone(&name)));
        name
    }

    /// Returns the name of a long value. It is not remembered, because that would take its memory.
    fn of_long(&self, value: &str) -> Arc<str> {
        let mut context = hmac::Context::with_key(&self.key);
        context.update(b"tollgate cells: long value");
        context.update(value.as_bytes());
        named(LONG, &context.sign())
    }

    /// Returns the names of a key's values that are replaced; `None` if none is.
    pub(crate) fn names(&self, key: &CounterKey<'_>) -> Option<Names> {
        if !key.parts.iter().any(is_replaced) {
            return None;
        }
        let name = |part: &KeyPart<'_>| match part {
            KeyPart::Secret(value) => Some(self.of(value)),
            KeyPart::Text(value) if is_replaced(part) => Some(self.of_long(value)),
            _ => None,
        };
        Some(key.parts.iter().map(name).collect())
    }
}

/// Returns a name: the prefix, and the hash in hexadecimal digits.
fn named(prefix: &str, tag: &hmac::Tag) -> Arc<str> {
    let mut name = String::with_capacity(prefix.len() + 2 * BYTES);
    name.push_str(prefix);
    for byte in &tag.as_ref()[..BYTES] {
        for digit in [byte >> 4, byte & 15] {
            name.push(char::from_digit(u32::from(digit), 16).unwrap_or('0'));
        }
    }
    name.into()
}

/// One entry for each value of a key: the name of one that is replaced.
pub(crate) type Names = SmallVec<[Option<Arc<str>>; 4]>;

/// Returns whether the counter is named alike in all cells.
#[inline]
pub(crate) fn is_shared_name(charge: &Charge<'_>) -> bool {
    charge.mode != Mode::Local && charge.key.scope.region_mode() != RegionMode::Split
}

/// Returns whether a charge has values that must be replaced.
#[inline]
pub(crate) fn needs_names(charge: &Charge<'_>) -> bool {
    charge.key.parts.iter().any(is_replaced) && is_shared_name(charge)
}

#[inline]
fn is_replaced(part: &KeyPart<'_>) -> bool {
    match part {
        KeyPart::Secret(_) => true,
        KeyPart::Text(value) => value.len() > MAX_PLAIN,
        KeyPart::Network { .. } => false,
    }
}

/// Returns a key's values with secrets and long values replaced.
pub(crate) fn renamed<'a>(parts: &[KeyPart<'a>], names: Option<&'a Names>) -> SmallVec<[KeyPart<'a>; 4]> {
    let Some(names) = names else { return parts.iter().copied().collect() };
    let one = |(part, name): (&KeyPart<'a>, &'a Option<Arc<str>>)| match name {
        Some(name) if matches!(part, KeyPart::Text(_)) => KeyPart::Text(name),
        Some(name) => KeyPart::Secret(name),
        None => *part,
    };
    parts.iter().zip(names).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::Scope;

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

    /// Without it a caller with long values takes the memory that all callers' consumption shares while a peer is silent.
    #[test]
    fn long_values_have_short_names_that_all_cells_agree_on() {
        let (one, same, other) =
            (Pseudonyms::new(b"one"), Pseudonyms::new(b"one"), Pseudonyms::new(b"other"));
        let (long, longer, short) = ("v".repeat(300), "v".repeat(8_000), "v".repeat(256));
        let name = |names: &Pseudonyms, part: KeyPart<'_>| {
            let (scope, parts) = (Scope::new("s"), [part]);
            let found = names.names(&CounterKey { scope: &scope, parts: &parts });
            match renamed(&parts, found.as_ref())[0] {
                KeyPart::Text(text) => format!("text {text}"),
                KeyPart::Secret(text) => format!("secret {text}"),
                part @ KeyPart::Network { .. } => panic!("{part:?}"),
            }
        };
        let names = [&long, &longer].map(|value| name(&one, KeyPart::Text(value)));
        assert!(names[0] != names[1] && names.iter().all(|name| name.len() < 64), "{names:?}");
        assert_eq!(name(&same, KeyPart::Text(&long)), names[0]);
        assert_ne!(
            name(&other, KeyPart::Text(&long)),
            names[0],
            "nobody can name another's counter without the key"
        );
        assert_eq!(name(&one, KeyPart::Text(&short)), format!("text {short}"), "as it is");
        assert!(name(&one, KeyPart::Secret(&long)).starts_with("secret "));
    }
}
