//! Heavy hitters of a stream in fixed memory: the Space-Saving sketch. A key without a counter takes over the smallest one
//! with its count, so a count is too high by at most what was taken over, and a key with more than a [`WAYS`]-th of the
//! stream always has a counter.

use std::collections::HashMap;
use std::hash::Hash;

/// Number of counters.
const WAYS: usize = 512;

#[derive(Debug)]
pub(crate) struct Sketch<K, T> {
    slots: HashMap<K, usize>,
    counters: Vec<(K, T, u64, u64)>,
    total: u64,
}

impl<K: Copy + Eq + Hash, T> Sketch<K, T> {
    pub(crate) fn new() -> Self {
        Self { slots: HashMap::new(), counters: Vec::new(), total: 0 }
    }

    /// Adds `units` to a key; `value` is stored with a key that had no counter.
    pub(crate) fn add(&mut self, key: K, units: u64, value: impl FnOnce() -> T) {
        self.total += units;
        if let Some(slot) = self.slots.get(&key) {
            self.counters[*slot].2 += units;
            return;
        }
        if self.counters.len() < WAYS {
            self.slots.insert(key, self.counters.len());
            self.counters.push((key, value(), units, 0));
            return;
        }
        let smallest = (0..WAYS).min_by_key(|slot| self.counters[*slot].2).unwrap_or(0);
        let (old, .., taken, _) = &self.counters[smallest];
        let taken = *taken;
        self.slots.remove(old);
        self.slots.insert(key, smallest);
        self.counters[smallest] = (key, value(), taken + units, taken);
    }

    /// Returns the sum of all units added.
    pub(crate) const fn total(&self) -> u64 {
        self.total
    }

    /// Returns the value stored with a key that has a counter.
    pub(crate) fn value_of(&self, key: &K) -> Option<&T> {
        self.slots.get(key).map(|slot| &self.counters[*slot].1)
    }

    /// Returns all keys with a counter, and the lower bound of their counts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&K, &T, u64)> {
        self.counters.iter().map(|(key, value, count, over)| (key, value, count - over))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_testing::zipf::ranks;

    /// Compared with exact counts, the heaviest 20 of 100,000 keys are found in order, and none is overestimated.
    #[test]
    fn the_heaviest_are_found_and_never_overestimated() {
        let mut sketch = Sketch::new();
        let mut exact: HashMap<u64, u64> = HashMap::new();
        for key in ranks(100_000, 300_000) {
            *exact.entry(key).or_default() += 1;
            sketch.add(key, 1, || ());
        }
        assert_eq!(sketch.total(), 300_000);
        let mut estimated: Vec<(u64, u64)> = sketch.counts().map(|(key, (), count)| (*key, count)).collect();
        assert!(estimated.iter().all(|(key, count)| *count <= exact[key]), "counts are lower bounds");
        estimated.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let mut heaviest: Vec<(u64, u64)> = exact.into_iter().collect();
        heaviest.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (found, exact) in estimated.iter().zip(&heaviest).take(20) {
            assert_eq!(found.0, exact.0, "{found:?} beside {exact:?}");
            assert!(exact.1 - found.1 <= 300_000 / WAYS as u64, "{found:?} beside {exact:?}");
        }
        assert_eq!(sketch.counters.len(), WAYS, "fixed memory");
    }
}
