//! Guardrails of publishing: thresholds for confirmation, approval and automatic rollback.

use std::time::Duration;

/// Number of parts of the time that a denial spike must last.
pub(crate) const PARTS: u32 = 12;

/// Thresholds for rejecting a publication and for rolling it back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guardrails {
    /// Share of newly denied requests above which a publication must be confirmed.
    pub confirm_over: f64,
    /// Share above which another operator must approve it.
    pub approval_over: f64,
    /// Multiple of a caller's baseline above which its denials are a spike; 0 disables the rollback guard.
    pub rise: f64,
    /// Duration that a spike must last.
    pub lasting: Duration,
    /// Duration for which new rules are watched.
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
    /// Returns the duration of one part.
    pub(crate) fn part(&self) -> Duration {
        (self.lasting / PARTS).max(Duration::from_millis(50))
    }
}
