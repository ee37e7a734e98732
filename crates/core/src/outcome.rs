//! Outcome: a limit's result for one charge.

use crate::time::TimeDelta;

/// Whether a charge fits its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It fits. `delay` is how long the caller should hold the request back (zero but for a leaky bucket's queue).
    Allowed {
        /// How long to wait before going on.
        delay: TimeDelta,
    },
    /// It does not fit.
    Denied {
        /// The exact time after which the same charge would fit if nobody else took any; `None` if it never will.
        retry_after: Option<TimeDelta>,
    },
    /// Nobody knows: the part of the store that keeps this counter did not answer, or was not asked because another
    /// charge of the request had been denied already. Nothing was taken.
    Unknown,
}

impl Verdict {
    /// Allowed at once.
    pub const ALLOWED: Self = Self::Allowed { delay: TimeDelta::ZERO };

    /// Whether the charge fits.
    #[must_use]
    pub const fn is_allowed(self) -> bool {
        matches!(self, Self::Allowed { .. })
    }

    /// Whether the charge does not fit.
    #[must_use]
    pub const fn is_denied(self) -> bool {
        matches!(self, Self::Denied { .. })
    }
}

impl Outcome {
    /// The outcome of a charge that nobody answered.
    pub const UNKNOWN: Self = Self { verdict: Verdict::Unknown, remaining: 0, reset_after: TimeDelta::ZERO };
}

/// The answer of one limit to one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether it fits.
    pub verdict: Verdict,
    /// Units that could still be taken at this instant, after this charge if it was taken.
    pub remaining: u64,
    /// The time after which the limit is as good as unused (a bucket is full, a window has turned).
    pub reset_after: TimeDelta,
}
