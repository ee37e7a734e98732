//! Rate limiting algorithms: their names and the options that each supports.

pub(crate) mod bucket;
pub(crate) mod concurrency;
pub(crate) mod fixed_window;
pub(crate) mod refill_steps;
pub(crate) mod sliding_log;
pub(crate) mod sliding_window;
pub(crate) mod strict_window;

use std::fmt;

/// The eight rate limiting algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Algorithm {
    /// Burst plus a steady rate, in one word of state. The default.
    Gcra,
    /// The same arithmetic as `Gcra`, described as a bucket of tokens.
    TokenBucket,
    /// The same arithmetic as a queue that drains at the steady rate; outcomes carry a delay when `with_delay` is set.
    LeakyBucket,
    /// One count per window.
    FixedWindow,
    /// Two counts: the previous window's, weighted, plus the current one's.
    SlidingWindow,
    /// Counts in k slots; the oldest slot counts in full.
    StrictWindow,
    /// A log of every admitted unit.
    SlidingLog,
    /// Permits held at the same time.
    Concurrency,
}

impl Algorithm {
    /// All algorithms, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::Gcra,
        Self::TokenBucket,
        Self::LeakyBucket,
        Self::FixedWindow,
        Self::SlidingWindow,
        Self::StrictWindow,
        Self::SlidingLog,
        Self::Concurrency,
    ];

    /// Returns the name used in rules, metrics and documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gcra => "gcra",
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindow => "sliding_window",
            Self::StrictWindow => "strict_window",
            Self::SlidingLog => "sliding_log",
            Self::Concurrency => "concurrency",
        }
    }

    /// Returns whether the algorithm supports `burst`.
    #[must_use]
    pub const fn has_burst(self) -> bool {
        matches!(self, Self::Gcra | Self::TokenBucket | Self::LeakyBucket)
    }

    /// Returns whether the algorithm supports `refill_interval`.
    #[must_use]
    pub const fn has_refill_interval(self) -> bool {
        matches!(self, Self::TokenBucket)
    }

    /// Returns whether windows start at the same instant for all keys unless they are jittered.
    #[must_use]
    pub const fn has_windows(self) -> bool {
        matches!(self, Self::FixedWindow | Self::SlidingWindow | Self::StrictWindow)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
