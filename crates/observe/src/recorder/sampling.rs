//! Sampling of decisions for the sketches: all of them at low traffic, one in 2^n at high traffic, weighted by 2^n.
//!
//! A thread that has sampled many decisions since the last visit of the worker doubles its interval on its own, so that a
//! burst after a quiet period costs no more per decision than sustained load. The worker shortens the interval when it
//! receives few samples; the thread then does not wait for the end of a long interval.

use std::sync::atomic::{AtomicU32, Ordering};

/// Samples between two visits of the worker after which the interval doubles.
const MAX_SAMPLES: u32 = 256;
/// Samples per visit below which the interval is halved.
const MIN_SAMPLES: usize = 64;
/// Binary logarithm of the longest interval.
const MAX_SHIFT: u32 = 20;

/// Sampling interval of one thread, shared with the worker.
#[derive(Debug, Default)]
pub(crate) struct SampleRate {
    /// Binary logarithm of the interval. The thread increases it, the worker decreases it.
    shift: AtomicU32,
    /// Number of visits of the worker.
    visits: AtomicU32,
}

impl SampleRate {
    /// Records a visit of the worker that found `found` samples.
    pub(crate) fn visit(&self, found: usize) {
        if found < MIN_SAMPLES {
            let less = |shift: u32| shift.checked_sub(1);
            let _ = self.shift.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        self.visits.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the interval: one in how many decisions is sampled.
    #[cfg(test)]
    pub(crate) fn step(&self) -> u32 {
        1 << self.shift.load(Ordering::Relaxed)
    }
}

/// Fast random number generator, predictable.
#[derive(Debug)]
pub(crate) struct FastRng(u64);

impl FastRng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Returns a number from 1 to `2 * mean - 1`.
    pub(crate) fn jitter(&mut self, mean: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        1 + ((self.0 >> 32) as u32) % mean.saturating_mul(2).saturating_sub(1).max(1)
    }
}

/// Progress of a thread towards its next sample.
#[derive(Debug)]
pub(crate) struct Sampling {
    /// Decisions until the next sample, including that one.
    until: u32,
    /// Binary logarithm of the current interval.
    shift: u32,
    visits: u32,
    shown: u32,
}

impl Sampling {
    /// Creates the state in which the next decision is sampled.
    pub(crate) const fn new() -> Self {
        Self { until: 1, shift: 0, visits: 0, shown: 0 }
    }

    /// Skips `count` decisions and returns `true`, unless one of them is to be sampled.
    #[inline]
    pub(crate) fn pass(&mut self, count: u32, rate: &SampleRate) -> bool {
        let passes = self.until > count && rate.shift.load(Ordering::Relaxed) >= self.shift;
        if passes {
            self.until -= count;
        }
        passes
    }

    /// Counts one decision and returns its weight; 0 if it is not sampled.
    pub(crate) fn count(&mut self, rate: &SampleRate, rng: &mut FastRng) -> u32 {
        let shift = rate.shift.load(Ordering::Relaxed);
        if shift < self.shift {
            self.shift = shift;
            self.until = self.until.min(rng.jitter(1 << shift));
        }
        self.until -= 1;
        if self.until > 0 {
            return 0;
        }
        // The weight is the mean interval so far, independent of the next one.
        let weight = 1 << self.shift;
        let visits = rate.visits.load(Ordering::Relaxed);
        if visits != self.visits {
            (self.visits, self.shown) = (visits, 0);
        }
        self.shown += 1;
        self.shift = self.shift.max(shift);
        if self.shown >= MAX_SAMPLES {
            self.shown = 0;
            self.shift = (self.shift + 1).min(MAX_SHIFT);
            rate.shift.store(self.shift, Ordering::Relaxed);
        }
        self.until = rng.jitter(1 << self.shift);
        weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of samples among `decisions`, and their total weight.
    fn shown(sampling: &mut Sampling, rate: &SampleRate, rng: &mut FastRng, decisions: u32) -> (usize, u64) {
        let mut totals = (0, 0);
        for _ in 0..decisions {
            if sampling.pass(1, rate) {
                continue;
            }
            let weight = sampling.count(rate, rng);
            totals = (totals.0 + usize::from(weight > 0), totals.1 + u64::from(weight));
        }
        totals
    }

    #[test]
    fn a_burst_after_a_quiet_time_is_sampled_little_and_weighted_fully() {
        let (rate, mut sampling, mut rng) = (SampleRate::default(), Sampling::new(), FastRng::new(7));
        for _ in 0..3 {
            let (count, weight) = shown(&mut sampling, &rate, &mut rng, 1_000_000);
            assert!(count < 14 * MAX_SAMPLES as usize, "{count} samples");
            assert!((900_000..1_100_000).contains(&weight), "total weight {weight}");
            // Enough visits to shorten the interval to 1.
            (0..MAX_SHIFT).for_each(|_| rate.visit(0));
            assert_eq!(
                shown(&mut sampling, &rate, &mut rng, 50),
                (50, 50),
                "low traffic is sampled completely"
            );
        }
    }

    #[test]
    fn a_sustained_burst_is_sampled_evenly() {
        let (rate, mut sampling, mut rng) = (SampleRate::default(), Sampling::new(), FastRng::new(7));
        for round in 0..50 {
            let (count, weight) = shown(&mut sampling, &rate, &mut rng, 100_000);
            rate.visit(count);
            if round > 10 {
                assert!((MIN_SAMPLES / 2..2 * MAX_SAMPLES as usize).contains(&count), "{count} samples");
                assert!((70_000..130_000).contains(&weight), "total weight {weight}");
            }
        }
    }
}
