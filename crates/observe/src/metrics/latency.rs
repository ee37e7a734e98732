//! Latency histograms: fine enough for percentiles, with bounds that are common in alerts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Upper bound of each bucket in microseconds: ten per decade, from 1 µs to 8 s.
pub(crate) const BOUNDS: [u64; 65] = bounds();
/// Number of buckets: one more than bounds, for larger values.
pub(crate) const BUCKETS: usize = BOUNDS.len() + 1;

const fn bounds() -> [u64; 65] {
    const STEPS: [u64; 10] = [10, 12, 15, 20, 25, 30, 40, 50, 60, 80];
    let mut bounds = [0; 65];
    let mut at = 0;
    // Below ten there are only whole microseconds.
    while at < 5 {
        bounds[at] = [1, 2, 3, 5, 8][at];
        at += 1;
    }
    let mut scale = 1;
    while at < 65 {
        bounds[at] = STEPS[(at - 5) % 10] * scale;
        at += 1;
        if (at - 5).is_multiple_of(10) {
            scale *= 10;
        }
    }
    bounds
}

/// Histogram of one thread for one protocol. Only that thread writes.
#[derive(Debug)]
pub(crate) struct Latencies {
    counts: [AtomicU64; BUCKETS],
    micros: AtomicU64,
}

impl Latencies {
    pub(crate) const fn new() -> Self {
        Self { counts: [const { AtomicU64::new(0) }; BUCKETS], micros: AtomicU64::new(0) }
    }

    /// Records `times` requests that took `micros` each.
    pub(crate) fn record(&self, micros: u64, times: u64) {
        crate::recorder::stripe::add(&self.counts[BOUNDS.partition_point(|bound| *bound < micros)], times);
        crate::recorder::stripe::add(&self.micros, micros.saturating_mul(times));
    }

    pub(crate) fn add_to(&self, sums: &mut Latency) {
        for (sum, count) in sums.counts.iter_mut().zip(&self.counts) {
            *sum += count.load(Ordering::Relaxed);
        }
        sums.micros += self.micros.load(Ordering::Relaxed);
    }
}

/// Histogram summed over all threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latency {
    pub(crate) counts: [u64; BUCKETS],
    pub(crate) micros: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], micros: 0 }
    }
}

impl Latency {
    /// Returns the difference from an earlier histogram.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let mut since = *self;
        for (count, before) in since.counts.iter_mut().zip(&before.counts) {
            *count = count.saturating_sub(*before);
        }
        since.micros = since.micros.saturating_sub(before.micros);
        since
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum += count;
        }
        self.micros += other.micros;
    }

    /// Returns the bucket bound in microseconds that this share of requests stays within; `None` if there were none.
    pub(crate) fn quantile(&self, share: f64) -> Option<u64> {
        let all: u64 = self.counts.iter().sum();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut below = 0;
        for (at, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= wanted {
                return Some(BOUNDS.get(at).copied().unwrap_or(BOUNDS[BOUNDS.len() - 1]));
            }
        }
        None
    }

    /// Returns a histogram in seconds with fewer bounds, for the exposition.
    pub(crate) fn coarse(&self) -> (Vec<f64>, Vec<u64>, f64) {
        const COARSE_BOUNDS: [u64; 22] = [
            1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000,
            250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 8_000_000,
        ];
        let mut counts = vec![0; COARSE_BOUNDS.len() + 1];
        for (at, count) in self.counts.iter().enumerate() {
            let bound = BOUNDS.get(at).copied().unwrap_or(u64::MAX);
            counts[COARSE_BOUNDS.partition_point(|coarse| *coarse < bound)] += count;
        }
        (COARSE_BOUNDS.iter().map(|micros| *micros as f64 / 1e6).collect(), counts, self.micros as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_grow_and_quantiles_are_the_bound_of_the_exact_value() {
        assert!(BOUNDS.windows(2).all(|pair| pair[0] < pair[1]), "{BOUNDS:?}");
        assert_eq!(BOUNDS[64], 8_000_000);
        let latencies = Latencies::new();
        let mut exact: Vec<u64> = (0..10_000).map(|n: u64| n * n % 70_001).collect();
        exact.iter().for_each(|micros| latencies.record(*micros, 1));
        exact.sort_unstable();
        let mut sums = Latency::default();
        latencies.add_to(&mut sums);
        for share in [0.0, 0.5, 0.99, 0.999, 1.0] {
            let at = ((exact.len() as f64 * share).ceil() as usize).max(1) - 1;
            let bound = sums.quantile(share).expect("recorded values");
            let lower =
                BOUNDS[BOUNDS.iter().position(|known| *known == bound).expect("a bound").saturating_sub(1)];
            assert!(
                exact[at] <= bound && (exact[at] > lower || bound == 1),
                "{share}: {} reported as {bound}",
                exact[at]
            );
        }
        let (bounds, counts, sum) = sums.coarse();
        assert_eq!((counts.len(), counts.iter().sum::<u64>()), (bounds.len() + 1, 10_000));
        assert_eq!(counts[0], exact.iter().filter(|micros| **micros <= 1).count() as u64);
        assert!((sum - exact.iter().sum::<u64>() as f64 / 1e6).abs() < 1e-9);
        assert_eq!(sums.since(&sums).quantile(0.5), None);
    }
}
