//! Seeded pseudorandom numbers (splitmix64), so that a failing case can be repeated.

/// A random number generator for tests and simulations. Never for secrets.
///
/// ```
/// use tollgate_core::conformance::SplitMix64;
/// let (mut one, mut other) = (SplitMix64::new(7), SplitMix64::new(7));
/// assert_eq!(one.below(100), other.below(100));
/// ```
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator with this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a fraction from 0 to 1, excluding 1.
    pub fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number below `bound`; zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// Returns an index into a list of this length.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    /// Returns a number from `from` to `to`, both included.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from) + 1)
    }

    /// Returns true with this probability, in thousandths.
    pub fn chance(&mut self, in_thousand: u64) -> bool {
        self.below(1_000) < in_thousand
    }

    /// Returns one of `choices`.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.index(choices.len())]
    }

    /// Returns an index into `weights`, each as likely as its weight.
    ///
    /// ```
    /// use tollgate_core::conformance::SplitMix64;
    /// let mut rng = SplitMix64::new(1);
    /// let seconds = (0..10_000).filter(|_| rng.weighted_index(&[1.0, 3.0]) == 1).count();
    /// assert!((7_300..7_700).contains(&seconds), "three in four: {seconds}");
    /// ```
    pub fn weighted_index(&mut self, weights: &[f64]) -> usize {
        let mut left = self.fraction() * weights.iter().sum::<f64>();
        let before = weights.iter().take_while(|weight| {
            left -= **weight;
            left >= 0.0
        });
        before.count().min(weights.len().saturating_sub(1))
    }

    /// Returns the time to the next event of a Poisson process whose events are `mean` apart on average.
    ///
    /// ```
    /// use tollgate_core::conformance::SplitMix64;
    /// let mut rng = SplitMix64::new(1);
    /// let mean = (0..10_000).map(|_| rng.exponential(2.0)).sum::<f64>() / 10_000.0;
    /// assert!((1.95..2.05).contains(&mean), "{mean}");
    /// ```
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.fraction()).ln()
    }

    /// Returns a log-normal value with this mean; `sigma` is the standard deviation of its logarithm.
    ///
    /// ```
    /// use tollgate_core::conformance::SplitMix64;
    /// let mut rng = SplitMix64::new(1);
    /// let mean = (0..10_000).map(|_| rng.log_normal(2.0, 0.5)).sum::<f64>() / 10_000.0;
    /// assert!((1.95..2.05).contains(&mean), "{mean}");
    /// ```
    pub fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        let normal =
            (-2.0 * (1.0 - self.fraction()).ln()).sqrt() * (std::f64::consts::TAU * self.fraction()).cos();
        mean * (sigma * normal - sigma * sigma / 2.0).exp()
    }
}
