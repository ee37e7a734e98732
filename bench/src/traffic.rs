//! Traffic: keys of 16 characters, with a uniform or Zipf distribution.
//!
//! Keys are written into a small block before each measurement, as text in the cache, where a caller would have them.
//! Reading them from a list of millions would measure the list.

use tollgate_core::conformance::SplitMix64;
use tollgate_testing::zipf;

/// Number of requests drawn before each measurement.
pub(crate) const BLOCK: usize = 1_024;

/// Distribution of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Law {
    /// All keys equally often.
    Uniform,
    /// The n-th most frequent key with a weight of 1/n.
    Zipf,
}

pub(crate) struct Traffic {
    random: SplitMix64,
    keys: u64,
    law: Law,
    /// The current block.
    pub(crate) block: Vec<String>,
    /// The same keys as numbers.
    pub(crate) numbers: Vec<u64>,
}

impl Traffic {
    pub(crate) fn new(keys: u64, law: Law, seed: u64) -> Self {
        Self {
            random: SplitMix64::new(seed),
            keys,
            law,
            block: vec![String::with_capacity(16); BLOCK],
            numbers: vec![0; BLOCK],
        }
    }

    fn draw(&mut self) -> u64 {
        match self.law {
            Law::Uniform => ((u128::from(self.random.next_u64()) * u128::from(self.keys)) >> 64) as u64,
            Law::Zipf => zipf::draw(&mut self.random, self.keys),
        }
    }

    /// Draws the next block.
    pub(crate) fn next_block(&mut self) {
        for n in 0..BLOCK {
            let key = self.draw();
            self.put(n, key);
        }
    }

    /// Fills the block with the keys from `first` on, in order, to fill a table.
    pub(crate) fn block_from(&mut self, first: u64) {
        for n in 0..BLOCK {
            self.put(n, (first + n as u64) % self.keys);
        }
    }

    fn put(&mut self, n: usize, key: u64) {
        let number = mix(key.wrapping_add(0x5eed));
        self.numbers[n] = number;
        let text = &mut self.block[n];
        text.clear();
        for nibble in (0..16).rev() {
            text.push(char::from(b"0123456789abcdef"[(number >> (4 * nibble) & 15) as usize]));
        }
    }
}

/// Spreads a number over 64 bits.
pub(crate) fn mix(number: u64) -> u64 {
    SplitMix64::new(number).next_u64()
}
