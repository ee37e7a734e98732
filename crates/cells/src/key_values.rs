//! The values of a counter key in the form in which messages carry them: the exchange copies them as bytes from a request
//! to the message, and takes no memory of its own for short ones.
//!
//! A list of owned values was rejected: two pieces of memory for each counter and tick, at both ends of each link.

use crate::wire::{Reader, Writer};
use smallvec::SmallVec;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use tollgate_core::{KeyPart, OwnedKeyPart};

/// Bytes that are kept in place: a value of 43 characters, or a UUID and a short value.
const INLINE: usize = 46;

/// Values of a counter key, encoded.
#[derive(Clone)]
pub struct KeyValues(Bytes);

#[derive(Clone)]
enum Bytes {
    Inline(u8, [u8; INLINE]),
    Shared(Arc<[u8]>),
}

/// Values, borrowed.
pub(crate) type Parts<'a> = SmallVec<[KeyPart<'a>; 4]>;

impl KeyValues {
    /// Encodes the values of a key.
    #[must_use]
    pub fn new(parts: &[KeyPart<'_>]) -> Self {
        // The usual key is written where it stays.
        if let [KeyPart::Text(text)] = parts
            && text.len() <= INLINE - 3
        {
            let mut bytes = [0; INLINE];
            bytes[..3].copy_from_slice(&[1, 0, text.len() as u8]);
            bytes[3..3 + text.len()].copy_from_slice(text.as_bytes());
            return Self(Bytes::Inline(3 + text.len() as u8, bytes));
        }
        let mut out = Writer::default();
        out.parts(parts.iter().copied());
        Self::from_encoded(&out.0)
    }

    /// Encodes values that are owned.
    #[must_use]
    pub fn from_owned(parts: &[OwnedKeyPart]) -> Self {
        let parts: Parts<'_> = parts.iter().map(OwnedKeyPart::as_part).collect();
        Self::new(&parts)
    }

    /// Copies values that are encoded.
    pub(crate) fn from_encoded(encoded: &[u8]) -> Self {
        let mut bytes = [0; INLINE];
        match bytes.get_mut(..encoded.len()) {
            Some(start) => {
                start.copy_from_slice(encoded);
                Self(Bytes::Inline(encoded.len() as u8, bytes))
            }
            None => Self(Bytes::Shared(encoded.into())),
        }
    }

    /// Returns the encoded values.
    #[inline]
    pub(crate) fn encoded(&self) -> &[u8] {
        match &self.0 {
            Bytes::Inline(length, bytes) => &bytes[..usize::from(*length).min(INLINE)],
            Bytes::Shared(bytes) => bytes,
        }
    }

    /// Returns whether a key with these parts has these values.
    #[inline]
    pub(crate) fn is_of(&self, parts: &[KeyPart<'_>]) -> bool {
        match (parts, self.encoded()) {
            ([KeyPart::Text(text)], [1, 0, length, bytes @ ..]) if *length < 0x80 => {
                *bytes == *text.as_bytes()
            }
            _ => self.parts().as_slice() == parts,
        }
    }

    /// Returns the values.
    #[must_use]
    pub fn parts(&self) -> SmallVec<[KeyPart<'_>; 4]> {
        let mut parts = Parts::new();
        self.add_to(&mut parts);
        parts
    }

    /// Appends the values to a list; returns how many there are.
    pub(crate) fn add_to<'a>(&'a self, list: &mut impl Extend<KeyPart<'a>>) -> usize {
        let mut from = Reader(self.encoded());
        let count = from.number().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
        let mut read = 0;
        list.extend((0..count).map_while(|_| from.part(usize::MAX)).inspect(|_| read += 1));
        read
    }

    /// Returns whether a receiver can read them.
    pub(crate) fn can_be_sent(&self) -> bool {
        self.is_short() || Reader(self.encoded()).values().is_some()
    }

    /// Returns whether they take no memory of their own.
    pub(crate) const fn is_short(&self) -> bool {
        matches!(self.0, Bytes::Inline(..))
    }

    /// Returns the bytes that they take, in memory and in a message.
    pub(crate) fn len(&self) -> usize {
        self.encoded().len()
    }
}

impl PartialEq for KeyValues {
    fn eq(&self, other: &Self) -> bool {
        self.encoded() == other.encoded()
    }
}

impl Eq for KeyValues {}

impl Hash for KeyValues {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.encoded().hash(state);
    }
}

/// Shows no secrets.
impl fmt::Debug for KeyValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.parts()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it consumption is reported for another counter.
    #[test]
    fn values_are_the_same_after_they_were_encoded() {
        let (long, longer) = ("v".repeat(43), "v".repeat(300));
        let network = KeyPart::Network { address: 1 << 100, prefix: 32 };
        let lists: [&[KeyPart<'_>]; 8] = [
            &[],
            &[KeyPart::Text("")],
            &[KeyPart::Text("alice")],
            &[KeyPart::Secret("alice")],
            &[KeyPart::Text(&long)],
            &[KeyPart::Text(&longer)],
            &[KeyPart::Text("a"), KeyPart::Text("lice")],
            &[network, KeyPart::Text(&long), network],
        ];
        for (at, list) in lists.iter().enumerate() {
            let values = KeyValues::new(list);
            assert_eq!(values.parts().as_slice(), *list);
            assert!(values.can_be_sent());
            for (other, parts) in lists.iter().enumerate() {
                assert_eq!(values.is_of(parts), at == other, "{list:?} {parts:?}");
                assert_eq!(values == KeyValues::new(parts), at == other);
            }
        }
        assert!(!KeyValues::new(&[KeyPart::Text(&"v".repeat(70_000))]).can_be_sent());
        assert!(!format!("{:?}", KeyValues::new(&[KeyPart::Secret("sk_live_4242424242")])).contains("4242"));
    }
}
