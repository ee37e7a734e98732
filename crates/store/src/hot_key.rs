//! Hot key detection: a heavy-hitter sketch of fixed size (Space-Saving), over windows of half a second.
//!
//! Each shard has [`WAYS`] counters. A key without one takes over the smallest, and its count: so a count is too high
//! by at most what it took over, which is stored next to it, and a key with more than a [`WAYS`]-th of its shard's
//! traffic always has a counter. Only the certain part of a count makes a key hot. A count-min sketch was rejected: it
//! estimates the count of a given key, but cannot list the keys.

use std::sync::{Mutex, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// Counters per shard.
const WAYS: usize = 64;
/// Shards, so that threads rarely contend.
const SHARDS: usize = 32;

/// Counts keys in a fixed amount of memory.
pub struct HotKeys {
    shards: Box<[Mutex<SketchShard>]>,
    /// Units per window that make a key hot.
    threshold: u64,
}

struct SketchShard {
    since: Timestamp,
    names: [u64; WAYS],
    counts: [u64; WAYS],
    /// How much each count may be too high by.
    errors: [u64; WAYS],
}

impl HotKeys {
    /// Length of a counting window.
    pub const WINDOW: TimeDelta = TimeDelta::from_millis(500);

    /// Creates a detector that considers a key hot at this many units per second.
    #[must_use]
    pub fn new(per_second: u64) -> Self {
        let part =
            || SketchShard { since: Timestamp::ZERO, names: [0; WAYS], counts: [0; WAYS], errors: [0; WAYS] };
        let threshold = (per_second.saturating_mul(Self::WINDOW.as_micros()) / 1_000_000).max(1);
        Self { shards: (0..SHARDS).map(|_| Mutex::new(part())).collect(), threshold }
    }

    /// Counts units of a key. Returns whether it is certainly hot now.
    pub fn count(&self, name: u64, units: u64, now: Timestamp) -> bool {
        let (count, error) = self.add(name, units, now);
        count - error >= self.threshold
    }

    /// Counts units of a key. Returns its count in the current window, and how much that may be too high by.
    fn add(&self, name: u64, units: u64, now: Timestamp) -> (u64, u64) {
        let name = name.max(1);
        let at = (name >> 32) as usize % SHARDS;
        let mut part = self.shards[at].lock().unwrap_or_else(PoisonError::into_inner);
        if now.since(part.since) >= Self::WINDOW {
            *part = SketchShard { since: now, names: [0; WAYS], counts: [0; WAYS], errors: [0; WAYS] };
        }
        let place = match part.names.iter().position(|known| *known == name) {
            Some(place) => place,
            None => {
                let place = (0..WAYS).min_by_key(|place| part.counts[*place]).unwrap_or(0);
                part.names[place] = name;
                part.errors[place] = part.counts[place];
                place
            }
        };
        part.counts[place] = part.counts[place].saturating_add(units);
        (part.counts[place], part.errors[place])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use tollgate_testing::zipf::ranks;

    /// Key names by Zipf's law: their ranks, spread over all 64-bit words.
    fn zipf(keys: u64, draws: usize) -> Vec<u64> {
        let spread = |rank: u64| (rank + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ranks(keys, draws).into_iter().map(spread).collect()
    }

    /// Every count is compared with the exact one, to catch a sketch that is too small or loses counts.
    #[test]
    fn counts_are_never_low_and_errors_cover_what_they_are_high_by() {
        let (sketch, now) = (HotKeys::new(1), Timestamp::from_secs(1_000));
        let mut exact: HashMap<u64, u64> = HashMap::new();
        for name in zipf(100_000, 200_000) {
            let known = exact.entry(name).or_default();
            *known += 1;
            let (count, error) = sketch.add(name, 1, now);
            assert!(count >= *known && count - error <= *known, "{count} - {error} for {known}");
        }
    }

    #[test]
    fn every_key_above_the_threshold_is_found_and_none_below_it() {
        let traffic = zipf(100_000, 200_000);
        let sketch = HotKeys::new(2_000);
        let (mut exact, mut hot): (HashMap<u64, u64>, HashMap<u64, bool>) = Default::default();
        for name in &traffic {
            *exact.entry(*name).or_default() += 1;
            *hot.entry(*name).or_default() |= sketch.count(*name, 1, Timestamp::from_secs(1_000));
        }
        for (name, count) in exact {
            // A shard sees about a 32nd of 200,000: what a counter took over is at most a 64th of that.
            if count >= 1_000 + 200 {
                assert!(hot[&name], "a key with {count} was missed");
            }
            if count < 1_000 {
                assert!(!hot[&name], "a key with {count} was called hot");
            }
        }
    }

    #[test]
    fn a_window_later_nothing_is_hot() {
        let (sketch, now) = (HotKeys::new(10), Timestamp::from_secs(1_000));
        assert!(sketch.count(7, 5, now));
        assert!(!sketch.count(7, 1, now + HotKeys::WINDOW));
    }
}
