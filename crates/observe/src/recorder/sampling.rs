//! Which decisions the sketches are shown: with little traffic all of them, with much one in so many, which then stands for as
//! many.
//!
//! A thread that has shown much since the worker last came takes steps twice as long from there on, by itself: a rush after a
//! quiet time costs a decision no more than one that lasts. The worker makes steps shorter when it is shown little, and a
//! thread does not go a long one to its end then.

use std::sync::atomic::{AtomicU32, Ordering};

/// So many are shown between two visits of the worker before steps become longer.
const MAX_SHOWN: u32 = 256;
/// From fewer than this on they become shorter.
const MIN_SHOWN: usize = 64;
/// The longest step is two to the power of this.
const MAX_INTERVAL: u32 = 20;

/// How long a thread's steps are: what it has in common with the worker.
#[derive(Debug, Default)]
pub(crate) struct SampleRate {
    /// Two to the power of this. The thread makes it more, the worker less.
    shift: AtomicU32,
    /// How often the worker has come.
    visits: AtomicU32,
}

impl SampleRate {
    /// The worker has come, and found so many.
    pub(crate) fn visit(&self, found: usize) {
        if found < MIN_SHOWN {
            let less = |shift: u32| shift.checked_sub(1);
            let _ = self.shift.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        self.visits.fetch_add(1, Ordering::Relaxed);
    }

    /// One in how many is shown.
    #[cfg(test)]
    pub(crate) fn step(&self) -> u32 {
        1 << self.shift.load(Ordering::Relaxed)
    }
}

/// A generator of numbers that nobody needs to be unable to guess.
#[derive(Debug)]
pub(crate) struct FastRng(u64);

impl FastRng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number from one to twice `mean` less one.
    pub(crate) fn jitter(&mut self, mean: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        1 + ((self.0 >> 32) as u32) % mean.saturating_mul(2).saturating_sub(1).max(1)
    }
}

/// Where a thread is on its way to the next that is shown.
#[derive(Debug)]
pub(crate) struct Sampling {
    /// Decisions until then, that one included.
    until: u32,
    /// Its step's length: two to the power of this.
    shift: u32,
    visits: u32,
    shown: u32,
}

impl Sampling {
    /// The next one is shown.
    pub(crate) const fn new() -> Self {
        Self { until: 1, shift: 0, visits: 0, shown: 0 }
    }

    /// Goes past so many decisions, if none of them is to be shown.
    #[inline]
    pub(crate) fn pass(&mut self, count: u32, pace: &SampleRate) -> bool {
        let passes = self.until > count && pace.shift.load(Ordering::Relaxed) >= self.shift;
        if passes {
            self.until -= count;
        }
        passes
    }

    /// Counts one decision; how many it stands for, none if it is not to be shown.
    pub(crate) fn count(&mut self, pace: &SampleRate, rng: &mut FastRng) -> u32 {
        let shift = pace.shift.load(Ordering::Relaxed);
        if shift < self.shift {
            self.shift = shift;
            self.until = self.until.min(rng.jitter(1 << shift));
        }
        self.until -= 1;
        if self.until > 0 {
            return 0;
        }
        // It stands for what lay between on the average, whatever comes next.
        let weight = 1 << self.shift;
        let visits = pace.visits.load(Ordering::Relaxed);
        if visits != self.visits {
            (self.visits, self.shown) = (visits, 0);
        }
        self.shown += 1;
        self.shift = self.shift.max(shift);
        if self.shown >= MAX_SHOWN {
            self.shown = 0;
            self.shift = (self.shift + 1).min(MAX_INTERVAL);
            pace.shift.store(self.shift, Ordering::Relaxed);
        }
        self.until = rng.jitter(1 << self.shift);
        weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of so many decisions: how many, and how many they stand for.
    fn shown(sampling: &mut Sampling, pace: &SampleRate, rng: &mut FastRng, decisions: u32) -> (usize, u64) {
        let mut told = (0, 0);
        for _ in 0..decisions {
            if sampling.pass(1, pace) {
                continue;
            }
            let weight = sampling.count(pace, rng);
            told = (told.0 + usize::from(weight > 0), told.1 + u64::from(weight));
        }
        told
    }

    #[test]
    fn a_burst_after_a_quiet_time_is_sampled_little_and_weighted_fully() {
        let (pace, mut sampling, mut rng) = (SampleRate::default(), Sampling::new(), FastRng::new(7));
        for _ in 0..3 {
            let (count, weight) = shown(&mut sampling, &pace, &mut rng, 1_000_000);
            assert!(count < 14 * MAX_SHOWN as usize, "{count} were shown");
            assert!((900_000..1_100_000).contains(&weight), "they stand for {weight}");
            // Long enough that steps are short again.
            (0..MAX_INTERVAL).for_each(|_| pace.visit(0));
            assert_eq!(shown(&mut sampling, &pace, &mut rng, 50), (50, 50), "little traffic is shown whole");
        }
    }

    #[test]
    fn a_sustained_burst_is_sampled_evenly() {
        let (pace, mut sampling, mut rng) = (SampleRate::default(), Sampling::new(), FastRng::new(7));
        for round in 0..50 {
            let (count, weight) = shown(&mut sampling, &pace, &mut rng, 100_000);
            pace.visit(count);
            if round > 10 {
                assert!((MIN_SHOWN / 2..2 * MAX_SHOWN as usize).contains(&count), "{count} were shown");
                assert!((70_000..130_000).contains(&weight), "they stand for {weight}");
            }
        }
    }
}
