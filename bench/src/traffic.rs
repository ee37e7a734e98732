//! Who asks: keys of 16 characters, drawn uniformly or by Zipf's law.
//!
//! Keys are written into a small block before each measurement, as a caller has them: in its cache, as text. Reading
//! them from a list of millions would measure the list.

use tollgate_core::conformance::SplitMix64;
use tollgate_testing::zipf;

/// Requests drawn before each measurement.
pub(crate) const BLOCK: usize = 1_024;

/// How keys are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Law {
    /// All alike.
    Uniform,
    /// The n-th most frequent key as often as 1/n.
    Zipf,
}

pub(crate) struct Traffic {
    random: SplitMix64,
    keys: u64,
    law: Law,
    /// The present block.
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

    /// A block of the keys from `first` on, in order, to fill a table.
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

/// Spreads numbers over all words.
pub(crate) fn mix(number: u64) -> u64 {
    SplitMix64::new(number).next_u64()
}
