//! The limits of a decision that its caller is shown.
//!
//! A request is charged to the fleet's capacity, and to what is left of it without each reserve of a higher priority. These are limits of
//! one rule over one period: a caller could not tell them apart, and only one of them says whether its next request passes.
//!
//! Of those shown, only the ones that can deny are what a caller paces itself by. Every integration takes the nearest limit, what
//! remains and the reset from that list: a shadow limit, or one that degrades, would make callers wait for nothing.

use crate::decision::{Decision, LimitStatus};
use std::cmp::Reverse;
use tollgate_core::Verdict;

impl Decision {
    /// Returns the limits that callers are shown: all, but of the fleet's capacity the one that binds for the request's priority.
    pub fn shown_limits(&self) -> impl Iterator<Item = &LimitStatus> {
        self.limits.iter().enumerate().filter(|(at, _)| self.is_shown(*at)).map(|(_, status)| status)
    }

    /// Returns the shown limits that can deny a request: alone, or together with the other quotas of the request.
    pub fn deciding_limits(&self) -> impl Iterator<Item = &LimitStatus> {
        self.shown_limits().filter(|status| self.is_enforced(status))
    }

    /// Returns the most restrictive limit of a descriptor among those that can deny: one that the request is over, else the one
    /// with the fewest units remaining.
    #[must_use]
    pub fn tightest(&self, descriptor: usize) -> Option<&LimitStatus> {
        let own = self.deciding_limits().filter(|limit| {
            usize::from(limit.descriptor) == descriptor && limit.outcome.verdict != Verdict::Unknown
        });
        own.min_by_key(|limit| {
            let reset = Reverse(limit.outcome.reported_reset());
            (!self.is_over(limit), limit.outcome.remaining, reset)
        })
    }

    fn is_shown(&self, at: usize) -> bool {
        let own = &self.limits[at];
        let alike = || (0..self.limits.len()).filter(|other| self.limits[*other].rule == own.rule);
        let Some(rule) = own.rule.filter(|_| alike().nth(1).is_some()) else { return true };
        if !self.rules().rule(rule).is_some_and(|rule| rule.is_shedding) {
            return true;
        }
        // One that denies, else the one with the least left; of two with the same, that of the lower priority, which is the smaller.
        let order = |at: &usize| {
            let outcome = &self.limits[*at].outcome;
            let kind = match outcome.verdict {
                Verdict::Denied { .. } => 0,
                Verdict::Allowed { .. } => 1,
                Verdict::Unknown => 2,
            };
            (kind, outcome.remaining, Reverse(*at))
        };
        alike().min_by_key(order) == Some(at)
    }
}
