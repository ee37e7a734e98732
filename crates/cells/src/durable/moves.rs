//! Changes of owners: a cell that begins to decide counters that another decided before reads back what that one has
//! written, and until then decides none of them. Assuming that they are unused was rejected: a month's quota would
//! begin anew with each death of a cell; assuming that they are used up as well: it would lock callers out for the rest of the
//! month.

use super::store::Durable;
use crate::members::Members;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::{Charge, Clock, StoreError, TimeDelta, Timestamp};

/// Maximum time for which counters whose owner has changed wait for what the database has of them.
const MAX_WAIT: TimeDelta = TimeDelta::from_secs(5);

impl<C: Clock> Durable<C> {
    /// Follows the cells: counters whose owner changes are read back before they are charged.
    pub fn follow(&self, members: &Arc<Members>) {
        let _ = self.members.set(Arc::clone(members));
    }

    /// Returns the number of the last change of owners, if it has not been read back.
    #[must_use]
    pub fn unread_moves(&self) -> Option<u64> {
        let (moves, _) = self.members.get()?.moves();
        (moves != self.moves_read.load(Ordering::Acquire)).then_some(moves)
    }

    /// Records that all up to this change of owners has been read back.
    pub fn record_moves(&self, moves: u64) {
        self.moves_read.store(moves, Ordering::Release);
    }

    /// Returns whether a charge's counter may have another owner than before.
    pub(super) fn may_move(&self, charge: &Charge<'_>) -> bool {
        charge.key.scope.region_mode().has_owner()
            && self.members.get().is_some_and(|members| !members.has_one_owner(&charge.key))
    }

    /// Returns whether a charge must wait until what another cell has counted is read back. Not for long: a database
    /// that is unavailable must not stop requests.
    pub(super) fn must_wait(&self, charge: &Charge<'_>) -> bool {
        let moved_at = self.members.get().map_or(Timestamp::ZERO, |members| members.moves().1);
        self.is_durable(charge) && self.may_move(charge) && self.clock.now().since(moved_at) < MAX_WAIT
    }

    /// Returns why charges cannot be decided, if some must wait.
    pub(super) fn refusal(&self, charges: &[Charge<'_>]) -> Option<StoreError> {
        self.unread_moves()?;
        let failed: Vec<usize> = (0..charges.len()).filter(|at| self.must_wait(&charges[*at])).collect();
        let cause = StoreError::Unavailable("what another cell has counted is being read back".to_owned());
        match failed.len() {
            0 => None,
            all if all == charges.len() => Some(cause),
            _ => Some(StoreError::Partial { failed, cause: Box::new(cause) }),
        }
    }
}
