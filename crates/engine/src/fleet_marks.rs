//! Guarantees and reserves of a fleet's capacity that were found used up a moment ago: the next request does not ask for them.
//!
//! A request beyond its tenant's fair share of a reserve finds that used up before it is: what it finds holds for others beyond theirs, not
//! for those within. A place that is released on this node can be taken at once: its counter's marks are lifted. One that is released on
//! another node is found after the mark's time.

use crate::fleet_fairness::FleetShares;
use tollgate_core::{KeyPart, Permit, Scope, Timestamp};
use tollgate_rules::{FleetMatch, FleetStanding};

impl FleetShares {
    fn mark_of(&self, scope: &Scope, value: Option<&KeyPart<'_>>) -> u64 {
        self.hash(&(scope.id(), value)) & !BEYOND
    }

    fn claim_mark(&self, own: &FleetMatch<'_>, standing: FleetStanding) -> Option<u64> {
        let (scope, value) = own.claim_key(standing)?;
        Some(self.mark_of(scope, value.as_ref()))
    }

    /// Returns whether the counter of a guarantee or a reserve was found used up a moment ago by a request like this one.
    pub(crate) fn is_used_up(&self, now: Timestamp, own: &FleetMatch<'_>, standing: FleetStanding) -> bool {
        self.claim_mark(own, standing).is_some_and(|mark| {
            let is_beyond = is_beyond(own, standing);
            self.marks.is_marked(now, mark) || (is_beyond && self.marks.is_marked(now, mark | BEYOND))
        })
    }

    /// Records that the counter of a request's guarantee or reserve is used up.
    pub(crate) fn mark_used_up(&self, now: Timestamp, own: &FleetMatch<'_>) {
        if let Some(mark) = self.claim_mark(own, own.standing) {
            let is_beyond = is_beyond(own, own.standing);
            self.marks.mark(now, if is_beyond { mark | BEYOND } else { mark });
        }
    }

    /// Lifts the marks of counters whose permits were released.
    pub(crate) fn on_released(&self, permits: &[Permit<'_>]) {
        if self.is_empty() {
            return;
        }
        // The key of a guarantee or a reserve has at most the tenant.
        for key in permits.iter().map(|permit| &permit.key).filter(|key| key.parts.len() <= 1) {
            let mark = self.mark_of(key.scope, key.parts.first());
            self.marks.lift(mark);
            self.marks.lift(mark | BEYOND);
        }
    }
}

/// Bit of a mark that was set by a request beyond its tenant's fair share of a reserve.
const BEYOND: u64 = 1;

/// Returns whether a request finds the counter used up before others do.
fn is_beyond(own: &FleetMatch<'_>, standing: FleetStanding) -> bool {
    standing == FleetStanding::Reserved && own.is_beyond_reserve()
}
