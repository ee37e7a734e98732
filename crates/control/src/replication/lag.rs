//! How long changes take to act on this node: from when they were made, by the clock of the node that made them, to when
//! they are in the book here.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// The upper ends of the classes, in milliseconds.
pub const LAG_BUCKETS_MS: [i64; 12] = [5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000];

/// Changes by how long they took.
#[derive(Debug, Default)]
pub struct PropagationLag {
    buckets: [AtomicU64; LAG_BUCKETS_MS.len()],
    count: AtomicU64,
    sum: AtomicI64,
    last: AtomicI64,
}

impl PropagationLag {
    /// A change that took so many milliseconds. Clocks that differ can make it less than none.
    pub(crate) fn observe(&self, millis: i64) {
        let millis = millis.max(0);
        if let Some(class) = LAG_BUCKETS_MS.iter().position(|end| millis <= *end) {
            self.buckets[class].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(millis, Ordering::Relaxed);
        self.last.store(millis, Ordering::Relaxed);
    }

    /// How many changes took at most as long as each class says.
    pub fn cumulative(&self) -> impl Iterator<Item = (i64, u64)> {
        let mut so_far = 0;
        LAG_BUCKETS_MS.into_iter().zip(&self.buckets).map(move |(end, class)| {
            so_far += class.load(Ordering::Relaxed);
            (end, so_far)
        })
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// How long they took together, in milliseconds.
    #[must_use]
    pub fn sum_millis(&self) -> i64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// How long the last one took.
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
        let at = |end| lag.cumulative().find(|(class, _)| *class == end).map(|(_, count)| count);
        assert_eq!([at(5), at(10), at(500), at(30_000)], [Some(2), Some(3), Some(3), Some(4)]);
        assert_eq!((lag.count(), lag.sum_millis(), lag.last_millis()), (5, 61_011, 60_000));
    }
}
