//! The heaviest of a stream, in fixed memory: Space-Saving. A key without a counter takes over the smallest, with its count:
//! so a count is too high by at most what was taken over, and a key that has more than a [`WAYS`]-th of the stream always
//! has a counter.

use std::collections::HashMap;
use std::hash::Hash;

/// Counters.
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

    /// Counts; `told` is kept with a key that had no counter.
    pub(crate) fn add(&mut self, key: K, units: u64, told: impl FnOnce() -> T) {
        self.total += units;
        if let Some(place) = self.slots.get(&key) {
            self.counters[*place].2 += units;
            return;
        }
        if self.counters.len() < WAYS {
            self.slots.insert(key, self.counters.len());
            self.counters.push((key, told(), units, 0));
            return;
        }
        let smallest = (0..WAYS).min_by_key(|place| self.counters[*place].2).unwrap_or(0);
        let (old, .., taken, _) = &self.counters[smallest];
        let taken = *taken;
        self.slots.remove(old);
        self.slots.insert(key, smallest);
        self.counters[smallest] = (key, told(), taken + units, taken);
    }

    /// Everything that was counted.
    pub(crate) const fn total(&self) -> u64 {
        self.total
    }

    /// What is kept with a key that has a counter.
    pub(crate) fn top_n(&self, key: &K) -> Option<&T> {
        self.slots.get(key).map(|place| &self.counters[*place].1)
    }

    /// All that have a counter, with what is certain of their counts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&K, &T, u64)> {
        self.counters.iter().map(|(key, told, count, over)| (key, told, count - over))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_testing::zipf::ranks;

    /// Against exact counts: the heaviest twenty of a hundred thousand are found, in order, and none is told too high.
    #[test]
    fn the_heaviest_are_found_and_never_overestimated() {
        let mut sketch = Sketch::new();
        let mut exact: HashMap<u64, u64> = HashMap::new();
        for key in ranks(100_000, 300_000) {
            *exact.entry(key).or_default() += 1;
            sketch.add(key, 1, || ());
        }
        assert_eq!(sketch.total(), 300_000);
        let mut told: Vec<(u64, u64)> = sketch.counts().map(|(key, (), count)| (*key, count)).collect();
        assert!(told.iter().all(|(key, count)| *count <= exact[key]), "what is told is certain");
        told.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let mut heaviest: Vec<(u64, u64)> = exact.into_iter().collect();
        heaviest.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (told, exact) in told.iter().zip(&heaviest).take(20) {
            assert_eq!(told.0, exact.0, "{told:?} beside {exact:?}");
            assert!(exact.1 - told.1 <= 300_000 / WAYS as u64, "{told:?} beside {exact:?}");
        }
        assert_eq!(sketch.counters.len(), WAYS, "whatever comes");
    }
}
