//! The thresholds of publishing: when a person must confirm or approve, and when new rules are rolled back.

use std::time::Duration;

/// Parts of the time that a rise must last.
pub(crate) const PARTS: u32 = 12;

/// When publishing is refused, and when it is undone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guardrails {
    /// The part of requests newly denied above which a publication must be confirmed.
    pub confirm_over: f64,
    /// The part above which another person must approve of it.
    pub approval_over: f64,
    /// So many times their baseline are too many denials of a caller; zero: nobody watches.
    pub rise: f64,
    /// For so long.
    pub lasting: Duration,
    /// New rules are watched for so long.
    pub within: Duration,
}

impl Default for Guardrails {
    fn default() -> Self {
        Self {
            confirm_over: 0.05,
            approval_over: 0.5,
            rise: 10.0,
            lasting: Duration::from_secs(60),
            within: Duration::from_secs(300),
        }
    }
}

impl Guardrails {
    /// How long one part is.
    pub(crate) fn part(&self) -> Duration {
        (self.lasting / PARTS).max(Duration::from_millis(50))
    }
}
