//! Cache of verified tokens. Checking a signature costs more than all other work for a request, and callers send the
//! same token for minutes.
//!
//! Only verified tokens are cached, so an untrusted client cannot evict others. The key is the full SHA-256 of the
//! token, so no token can pass for another, and no token is stored. Two generations bound the memory: when the young
//! one is full it replaces the old one, and entries that were not used since are dropped. Rejected: caching failed
//! tokens, because made-up tokens rarely repeat.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Number of independently locked maps, so that threads rarely contend.
const SHARDS: usize = 8;
/// Maximum number of tokens per generation of one map: 16,384 in total.
const MAX_TOKENS: usize = 1024;
/// Maximum number of bytes of values per generation of one map: 16 MiB in total. A value may have 8 KiB.
const MAX_BYTES: usize = 1 << 20;

/// The attribute values of a token, in the order of the settings.
pub(super) type Values = Arc<[Option<String>]>;

/// The SHA-256 of a token.
pub(super) type Digest = [u8; 32];

/// The validity period of a token, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Validity {
    pub(super) from: f64,
    pub(super) until: f64,
}

impl Validity {
    pub(super) fn holds(&self, now: u64) -> bool {
        let now = now as f64;
        self.from <= now && now < self.until
    }
}

/// Tokens that one set of keys verified.
#[derive(Default)]
pub(super) struct VerifiedJwts([Mutex<Generations>; SHARDS]);

type Generation = HashMap<Digest, (Validity, Values), foldhash::fast::RandomState>;

#[derive(Default)]
struct Generations {
    young: Generation,
    old: Generation,
    /// Of the values that were added to the young one.
    bytes: usize,
}

impl VerifiedJwts {
    fn shard(&self, digest: &Digest) -> std::sync::MutexGuard<'_, Generations> {
        self.0[usize::from(digest[0]) % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the values of a cached token, if it is still valid.
    pub(super) fn get(&self, digest: &Digest, now: u64) -> Option<Values> {
        let mut shard = self.shard(digest);
        let known = match shard.young.get(digest) {
            Some(known) => known.clone(),
            None => {
                let known = shard.old.remove(digest)?;
                shard.add(*digest, known.clone());
                known
            }
        };
        known.0.holds(now).then_some(known.1)
    }

    pub(super) fn put(&self, digest: Digest, validity: Validity, values: Values) {
        self.shard(&digest).add(digest, (validity, values));
    }

    #[cfg(test)]
    fn bytes(&self) -> usize {
        let of = |shard: &Mutex<Generations>| -> usize {
            let shard = shard.lock().unwrap();
            let values = shard.young.values().chain(shard.old.values()).flat_map(|(_, values)| values.iter());
            values.flatten().map(String::len).sum()
        };
        self.0.iter().map(of).sum()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let lengths = self.0.iter().map(|shard| {
            let shard = shard.lock().unwrap();
            shard.young.len() + shard.old.len()
        });
        lengths.sum()
    }
}

impl Generations {
    fn add(&mut self, digest: Digest, known: (Validity, Values)) {
        let bytes = known.1.iter().flatten().map(String::len).sum::<usize>();
        self.bytes += bytes;
        if self.young.len() >= MAX_TOKENS || self.bytes > MAX_BYTES {
            self.old = std::mem::take(&mut self.young);
            self.bytes = bytes;
        }
        self.young.insert(digest, known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALWAYS: Validity = Validity { from: f64::NEG_INFINITY, until: f64::INFINITY };

    fn digest(number: u32) -> Digest {
        let mut digest = [0; 32];
        digest[..4].copy_from_slice(&number.to_le_bytes());
        digest
    }

    fn values(text: &str) -> Values {
        Arc::from([Some(text.to_owned())])
    }

    /// Memory is bounded however many users there are, and tokens that are used once do not evict one that is used
    /// often.
    #[test]
    fn busy_tokens_stay_cached_and_memory_is_bounded() {
        let verified = VerifiedJwts::default();
        verified.put(digest(0), ALWAYS, values("busy"));
        for number in 1..200_000 {
            verified.put(digest(number), ALWAYS, values("once"));
            if number % 512 == 0 {
                assert_eq!(verified.get(&digest(0), 0), Some(values("busy")), "after {number}");
            }
        }
        assert!(verified.len() <= 2 * SHARDS * MAX_TOKENS, "{}", verified.len());
        assert_eq!(verified.get(&digest(1), 0), None);
        let long = values(&"x".repeat(8 << 10));
        for number in 0..20_000 {
            verified.put(digest(number), ALWAYS, long.clone());
        }
        assert!(verified.bytes() <= 2 * SHARDS * MAX_BYTES, "{}", verified.bytes());
        assert_eq!(verified.get(&digest(19_999), 0), Some(long), "long values are cached, too");
    }

    /// A token that expires while it is cached must not be accepted a second longer.
    #[test]
    fn a_cached_token_is_valid_in_its_validity_period_only() {
        let verified = VerifiedJwts::default();
        verified.put(digest(7), Validity { from: 10.0, until: 20.5 }, values("u"));
        for (now, accepted) in [(9, false), (10, true), (20, true), (21, false)] {
            assert_eq!(verified.get(&digest(7), now).is_some(), accepted, "{now}");
        }
    }
}
