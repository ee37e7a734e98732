//! The floor: a bare flat table of 16-byte slots on huge pages, the minimum work possible.
//!
//! The same hash, arithmetic and clock as the store, and nothing else: no synchronization between threads (plain loads and
//! stores), no expiry, no eviction, no statistics. The only unsafe code here.

#![allow(unsafe_code, reason = "the one module with unsafe code; each use has its proof")]

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;
use memmap2::{Advice, MmapMut};
use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tollgate_core::{Cost, Limit, Outcome, Timestamp};

/// A slot: the whole hash and the state.
#[repr(C, align(16))]
struct Slot([AtomicU64; 2]);

pub(crate) struct Floor {
    map: MmapMut,
    slots: usize,
    seed: SharedSeed,
}

impl Floor {
    pub(crate) fn new(slots: usize) -> Self {
        // Spare slots at the end, so that probing never wraps.
        let map = MmapMut::map_anon((slots + 1_024) * 16).expect("memory");
        let _ = map.advise(Advice::HugePage);
        Self { map, slots, seed: SharedSeed::from_u64(12_345) }
    }

    fn slots(&self) -> &[Slot] {
        // SAFETY: the mapping is zeroed, page-aligned, of that length, and only accessed as these atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.slots + 1_024) }
    }

    #[inline]
    pub(crate) fn hash(&self, scope: u64, key: &str) -> u64 {
        let mut hasher = FoldHasher::with_seed(54_321, &self.seed);
        hasher.write_u64(scope);
        hasher.write_u64(key.len() as u64);
        hasher.write(key.as_bytes());
        hasher.finish()
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.slots as u128) >> 64) as usize
    }

    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint; the address is within the mapping.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(self.slots().as_ptr().add(self.home(hash)).cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = hash;
    }

    #[inline]
    pub(crate) fn charge(&self, hash: u64, limit: &Limit, now: Timestamp) -> Outcome {
        let mut at = self.home(hash);
        loop {
            let Slot([name, word]) = &self.slots()[at];
            let seen = name.load(Relaxed);
            if seen == hash {
                let (after, outcome) = limit.step_word(Some(word.load(Relaxed)), 0, now, Cost::ONE);
                word.store(after, Relaxed);
                return outcome;
            }
            if seen == 0 {
                let (after, outcome) = limit.step_word(None, 0, now, Cost::ONE);
                name.store(hash, Relaxed);
                word.store(after, Relaxed);
                return outcome;
            }
            at += 1;
        }
    }
}
