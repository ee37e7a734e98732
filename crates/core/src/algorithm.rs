//! The rate limiting algorithms: their names, and the options that each supports.

pub(crate) mod bucket;
pub(crate) mod concurrency;
pub(crate) mod fixed_window;
pub(crate) mod sliding_log;
pub(crate) mod sliding_window;
pub(crate) mod strict_window;

use std::fmt;

/// The eight algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// Burst plus a steady rate, one word of state. The default.
    Gcra,
    /// The same arithmetic in the words of buckets and tokens.
    TokenBucket,
    /// The same arithmetic as a queue that drains at the steady rate: answers carry a delay where asked to.
    LeakyBucket,
    /// A count a window.
    FixedWindow,
    /// Two counts, weighted.
    SlidingWindow,
    /// k slots, the oldest counted whole.
    StrictWindow,
    /// Every admitted unit.
    SlidingLog,
    /// Permits held at once.
    Concurrency,
}

impl Algorithm {
    /// All of them, in the order of the documentation.
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

    /// The name in rules, metrics and documents.
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

    /// Whether `burst` means something to it.
    #[must_use]
    pub const fn has_burst(self) -> bool {
        matches!(self, Self::Gcra | Self::TokenBucket | Self::LeakyBucket)
    }

    /// Whether its windows start together for all keys unless they are jittered.
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
