//! Propagation lag: the time from a change, by the clock of the node that made it, until this node has applied it.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Upper bounds of the histogram buckets, in milliseconds.
pub const LAG_BUCKETS_MS: [i64; 12] = [5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000];

/// Histogram of propagation times.
#[derive(Debug, Default)]
pub struct PropagationLag {
    buckets: [AtomicU64; LAG_BUCKETS_MS.len()],
    count: AtomicU64,
    sum: AtomicI64,
    last: AtomicI64,
}

impl PropagationLag {
    /// Records the propagation time of a change, in milliseconds. Differing clocks can make it negative, which counts
    /// as zero.
    pub(crate) fn observe(&self, millis: i64) {
        let millis = millis.max(0);
        if let Some(bucket) = LAG_BUCKETS_MS.iter().position(|end| millis <= *end) {
            self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(millis, Ordering::Relaxed);
        self.last.store(millis, Ordering::Relaxed);
    }

    /// Returns each bucket's upper bound and the number of changes up to it.
    pub fn cumulative(&self) -> impl Iterator<Item = (i64, u64)> {
        let mut so_far = 0;
        LAG_BUCKETS_MS.into_iter().zip(&self.buckets).map(move |(end, bucket)| {
            so_far += bucket.load(Ordering::Relaxed);
            (end, so_far)
        })
    }

    /// Returns the number of changes.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the sum of all propagation times, in milliseconds.
    #[must_use]
    pub fn sum_millis(&self) -> i64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// Returns the propagation time of the last change, in milliseconds.
    #[must_use]
    pub fn last_millis(&self) -> i64 {
        self.last.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_is_in_its_bucket_and_all_larger_ones() {
        let lag = PropagationLag::default();
        for millis in [-3, 5, 6, 1_000, 60_000] {
            lag.observe(millis);
        }
        let at = |end| lag.cumulative().find(|(bound, _)| *bound == end).map(|(_, count)| count);
        assert_eq!([at(5), at(10), at(500), at(30_000)], [Some(2), Some(3), Some(3), Some(4)]);
        assert_eq!((lag.count(), lag.sum_millis(), lag.last_millis()), (5, 61_011, 60_000));
    }
}
