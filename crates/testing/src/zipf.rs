//! Zipf distribution of keys: the n-th most frequent key has a weight of 1/n.
//!
//! Draws from the inverse of the continuous distribution, x = N^u, which needs no table of N sums.

use tollgate_core::conformance::SplitMix64;

/// Returns the rank of the next key among `keys`, from 0 for the most frequent.
///
/// ```
/// use tollgate_core::conformance::SplitMix64;
/// use tollgate_testing::zipf::draw;
/// let mut random = SplitMix64::new(1);
/// let firsts = (0..10_000).filter(|_| draw(&mut random, 1_000) == 0).count();
/// assert!((900..1_100).contains(&firsts), "the first of a thousand is one in ten: {firsts}");
/// ```
pub fn draw(random: &mut SplitMix64, keys: u64) -> u64 {
    ((keys as f64).powf(random.fraction()) as u64).saturating_sub(1).min(keys.saturating_sub(1))
}

/// Returns `draws` ranks, the same in every run.
#[must_use]
pub fn ranks(keys: u64, draws: usize) -> Vec<u64> {
    let mut random = SplitMix64::new(0x9e37_79b9_7f4a_7c15);
    (0..draws).map(|_| draw(&mut random, keys)).collect()
}
