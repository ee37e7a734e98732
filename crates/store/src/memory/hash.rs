//! Seeded hash of a counter key, unpredictable from outside.
//!
//! 64 bits choose the counter: the upper ones its home line, the lower 48 its fingerprint. The seed is drawn from the
//! operating system by every process, so that an attacker cannot prepare keys that crowd one line or share one counter.
//! All tables of a process have the same seed, so that a name is computed once for all that a charge meets.
//! Fields carry their lengths: parts never join. A cryptographic hash was rejected: it costs as much as the rest of a
//! decision.

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;
use tollgate_core::{CounterKey, KeyPart};

/// Set in the length field of a network, which is not text.
const NETWORK: u64 = 1 << 63;

/// Bits that choose one of the shared counters of a scope.
const SHARES: u32 = 8;

static OF_PROCESS: LazyLock<KeyHasher> = LazyLock::new(KeyHasher::random);

/// Names of counters in memory.
#[derive(Clone)]
pub struct KeyHasher {
    seed: u64,
    /// Seed for the second half of a 128-bit name.
    other: u64,
    shared: SharedSeed,
}

impl KeyHasher {
    /// Returns the hasher of this process.
    #[must_use]
    pub fn of_process() -> Self {
        OF_PROCESS.clone()
    }

    fn random() -> Self {
        let system = RandomState::new();
        Self {
            seed: system.hash_one(1_u8),
            other: system.hash_one(2_u8),
            shared: SharedSeed::from_u64(system.hash_one(3_u8)),
        }
    }

    /// Returns the name of a counter.
    #[must_use]
    #[inline(always)]
    pub fn name(&self, key: &CounterKey<'_>) -> u64 {
        self.seeded(self.seed, key)
    }

    /// Returns a name for wide counters, which no position in a table distinguishes further.
    pub(super) fn long_name(&self, key: &CounterKey<'_>, name: u64) -> u128 {
        u128::from(self.seeded(self.other, key)) << 64 | u128::from(name)
    }

    /// Returns the name of the counter that this key shares with a 256th of the keys of its scope that find no slot.
    #[inline]
    pub(super) fn shared_name(&self, key: &CounterKey<'_>, name: u64) -> u64 {
        // One multiplication, because it is computed for every charge and used for few.
        let share = name >> (u64::BITS - SHARES);
        let product = u128::from(key.scope.id() ^ self.seed) * u128::from(self.other.wrapping_add(share) | 1);
        product as u64 ^ (product >> 64) as u64
    }

    #[inline(always)]
    fn seeded(&self, seed: u64, key: &CounterKey<'_>) -> u64 {
        let mut hasher = FoldHasher::with_seed(seed, &self.shared);
        hasher.write_u64(key.scope.id());
        for part in key.parts {
            match part {
                KeyPart::Text(text) | KeyPart::Secret(text) => {
                    hasher.write_u64(text.len() as u64);
                    hasher.write(text.as_bytes());
                }
                KeyPart::Network { address, prefix } => {
                    hasher.write_u64(NETWORK | u64::from(*prefix));
                    hasher.write_u128(*address);
                }
            }
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::Scope;

    #[test]
    fn parts_never_join() {
        let hasher = KeyHasher::random();
        let scope = Scope::new("s");
        let name = |parts: &[KeyPart<'_>]| hasher.name(&CounterKey { scope: &scope, parts });
        let texts =
            |parts: &[&'static str]| name(&parts.iter().map(|text| KeyPart::Text(text)).collect::<Vec<_>>());
        let names = [
            texts(&["ab", "c"]),
            texts(&["a", "bc"]),
            texts(&["abc"]),
            texts(&["abc", ""]),
            texts(&["", "abc"]),
            texts(&[]),
            name(&[KeyPart::Network { address: 0, prefix: 0 }]),
            name(&[KeyPart::Network { address: 0, prefix: 1 }]),
        ];
        let distinct: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
    }

    /// Otherwise an attacker finds keys that crowd one line by trying them elsewhere.
    #[test]
    fn two_processes_do_not_agree_on_names() {
        let scope = Scope::new("s");
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("k")] };
        assert_ne!(KeyHasher::random().name(&key), KeyHasher::random().name(&key));
        assert_eq!(KeyHasher::of_process().name(&key), KeyHasher::of_process().name(&key));
    }
}
