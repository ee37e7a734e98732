//! Cohort of a caller: which callers of one priority are shed first.
//!
//! A keyed hash puts a caller into one of 128 cohorts, so that no caller can choose a favorable name. The cohorts move on by
//! one bucket of measured demand at a time: by four every four seconds, or by eight every eight seconds where two cohorts share
//! a place. A caller that is shed now has its turn to be served within two minutes, and each time only a few of the
//! callers change sides. Drawing new cohorts from time to time was rejected: every draw would interrupt
//! all callers that were being served.
//!
//! The control step moves them, together with the threshold: what it has measured at a place of the order of shedding it
//! then expects at the place to which these callers moved. If requests moved by themselves, a caller that sends most of the
//! load would arrive at a place where nothing was measured yet.

use crate::priority::COHORTS;
use crate::threshold::PER_BUCKET;
use std::sync::atomic::{AtomicU16, Ordering};
use tollgate_core::Timestamp;

/// Assignment of callers to cohorts.
#[derive(Debug)]
pub(crate) struct Cohorts {
    key: u64,
    /// Cohorts by which all callers move at a time, and seconds between two moves: those of one bucket of measured demand.
    /// More would leave out buckets, and their callers would never be in them.
    step: u16,
    moved: AtomicU16,
}

impl Cohorts {
    /// Creates the assignment with this secret key. `per_place` cohorts share a place in the order of shedding.
    pub(crate) const fn new(key: u64, per_place: u16) -> Self {
        Self { key, step: PER_BUCKET * per_place, moved: AtomicU16::new(0) }
    }

    /// Returns this assignment with all cohorts moved as far as in the other.
    pub(crate) fn moved_as(self, other: &Self) -> Self {
        Self { moved: AtomicU16::new(other.moved.load(Ordering::Relaxed)), ..self }
    }

    /// Returns the cohort, below [`COHORTS`], of the caller with this hash.
    #[inline]
    pub(crate) fn cohort(&self, caller: u64) -> u16 {
        ((mix(caller ^ self.key) >> 57) as u16).wrapping_add(self.moved.load(Ordering::Relaxed)) % COHORTS
    }

    /// Moves all callers to their cohorts of this time. Returns by how many they have moved.
    pub(crate) fn advance(&self, now: Timestamp) -> u16 {
        let turn = now.as_secs() / u64::from(self.step) % u64::from(COHORTS / self.step);
        let next = turn as u16 * self.step;
        let before = self.moved.swap(next, Ordering::Relaxed);
        (next + COHORTS - before) % COHORTS
    }
}

/// Mixes all bits of a word (the finalizer of SplitMix64).
pub(crate) const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_caller_passes_through_the_whole_order() {
        for per_place in [1, 2] {
            let cohorts = Cohorts::new(7, per_place);
            let mut before = cohorts.cohort(42);
            let buckets: std::collections::HashSet<_> = (0..u64::from(COHORTS))
                .map(|at| {
                    let moved = cohorts.advance(Timestamp::from_secs(at));
                    let now = cohorts.cohort(42);
                    assert_eq!((before + moved) % COHORTS, now);
                    assert_eq!(moved / per_place % PER_BUCKET, 0, "demand moves by whole buckets");
                    before = now;
                    now / per_place / PER_BUCKET
                })
                .collect();
            assert_eq!(buckets.len(), usize::from(COHORTS / per_place / PER_BUCKET), "{per_place} per place");
        }
    }

    #[test]
    fn callers_are_spread_evenly() {
        let mut counts = [0u32; COHORTS as usize];
        let cohorts = Cohorts::new(9, 1);
        (0..128_000).for_each(|n| counts[usize::from(cohorts.cohort(n))] += 1);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }
}
