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
    pub const UNKNOWN: Self = Self {
        verdict: Verdict::Unknown,
        remaining: 0,
        next_after: TimeDelta::ZERO,
        reset_after: TimeDelta::ZERO,
    };

    /// Returns the same outcome with another number of units available. When one more is there is no longer known if the
    /// last one is gone only now, so it is the reset.
    #[must_use]
    pub const fn with_remaining(self, remaining: u64) -> Self {
        let next_after = match (remaining, self.remaining) {
            (0, 0) => self.next_after,
            (0, _) => self.reset_after,
            _ => TimeDelta::ZERO,
        };
        Self { remaining, next_after, ..self }
    }

    /// Returns the time that callers are told to be that of the reset: while units remain, until all are there; with none,
    /// until the next one, or until the request that was denied would pass. All integrations report this one.
    ///
    /// ```
    /// use tollgate_core::{Outcome, TimeDelta, Verdict};
    /// let (next, full) = (TimeDelta::from_secs(9), TimeDelta::from_secs(110));
    /// let left = Outcome { verdict: Verdict::ALLOWED, remaining: 1, next_after: TimeDelta::ZERO, reset_after: full };
    /// assert_eq!(left.reported_reset(), full);
    /// let none = Outcome { remaining: 0, next_after: next, ..left };
    /// assert_eq!(none.reported_reset(), next);
    /// let wait = TimeDelta::from_secs(20);
    /// let denied = Outcome { verdict: Verdict::Denied { retry_after: Some(wait) }, ..none };
    /// assert_eq!(denied.reported_reset(), wait);
    /// ```
    #[must_use]
    pub const fn reported_reset(&self) -> TimeDelta {
        match self.verdict {
            _ if self.remaining > 0 => self.reset_after,
            Verdict::Denied { retry_after: Some(wait) } => wait,
            _ => self.next_after,
        }
    }
}

/// The result of one limit for one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Verdict on the charge.
    pub verdict: Verdict,
    /// Units available at this instant, after this charge if it was applied.
    pub remaining: u64,
    /// Time after which a charge of one unit would fit if no other charge is applied; zero while units remain, and for a
    /// limit that never admits one.
    pub next_after: TimeDelta,
    /// Time after which the limit is equivalent to an unused one (a bucket is full, a window has ended).
    pub reset_after: TimeDelta,
}
