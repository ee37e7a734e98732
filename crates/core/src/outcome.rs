//! Outcome: a limit's result for one charge.

use crate::time::TimeDelta;

/// Verdict of a limit on one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The charge fits. `delay` is how long the caller should delay the request (nonzero only for a leaky bucket's
    /// queue).
    Allowed {
        /// Time to wait before proceeding.
        delay: TimeDelta,
    },
    /// The charge does not fit.
    Denied {
        /// Exact time after which the same charge would fit if no other charge is applied; `None` if it never will.
        retry_after: Option<TimeDelta>,
    },
    /// Unknown: the part of the store that keeps this counter was unavailable, or was not called because another charge
    /// of the request had already been denied. Nothing was charged.
    Unknown,
}

impl Verdict {
    /// Allowed without delay.
    pub const ALLOWED: Self = Self::Allowed { delay: TimeDelta::ZERO };

    /// Returns whether the charge fits.
    #[must_use]
    pub const fn is_allowed(self) -> bool {
        matches!(self, Self::Allowed { .. })
    }

    /// Returns whether the charge does not fit.
    #[must_use]
    pub const fn is_denied(self) -> bool {
        matches!(self, Self::Denied { .. })
    }
}

impl Outcome {
    /// The outcome of a charge that was not decided.
    pub const UNKNOWN: Self = Self { verdict: Verdict::Unknown, remaining: 0, reset_after: TimeDelta::ZERO };
}

/// The result of one limit for one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Verdict on the charge.
    pub verdict: Verdict,
    /// Units available at this instant, after this charge if it was applied.
    pub remaining: u64,
    /// Time after which the limit is equivalent to an unused one (a bucket is full, a window has ended).
    pub reset_after: TimeDelta,
}
