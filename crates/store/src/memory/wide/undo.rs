//! Exact undo of a charge on a wide counter.
//!
//! Small states are copied before they are charged. Logs and permits can be large, and both charge at their end: what
//! was added there is removed again. A refund can remove any entry, so before one the state is copied whatever its
//! size.

use super::WideCharge;
use tollgate_core::{PermitId, State, Timestamp};

/// How to undo a charge.
#[derive(Debug)]
pub(crate) enum Undo {
    /// The charge changed nothing.
    Nothing,
    /// The charge created this entry.
    Remove(u128),
    /// The charge stepped this entry.
    Step(u128, Step),
}

/// The part of a state that a step changes.
#[derive(Debug)]
pub(crate) enum Step {
    /// Any part: this was the state before.
    Whole(State),
    /// The newest units of a log.
    LogTail,
    /// The newest permit.
    PermitTail,
    /// Units and deadline of a permit that was held before.
    Renewal(u64, Timestamp),
}

impl Step {
    pub(super) fn before(ask: &WideCharge<'_>, state: &State) -> Self {
        if ask.cost.is_refund() {
            return Self::Whole(state.clone());
        }
        match state {
            State::Log(_) => Self::LogTail,
            State::Permits(permits) => {
                let named = ask.id != PermitId::ANONYMOUS;
                let held =
                    permits.held.iter().find(|(id, _, deadline)| *id == ask.id && *deadline > ask.moment);
                held.filter(|_| named)
                    .map_or(Self::PermitTail, |(_, units, deadline)| Self::Renewal(*units, *deadline))
            }
            other => Self::Whole(other.clone()),
        }
    }

    pub(super) fn revert(self, ask: &WideCharge<'_>, state: &mut State) {
        match (self, state) {
            (Self::Whole(before), state) => *state = before,
            (Self::LogTail, state) => {
                ask.limit.step(state, ask.moment, ask.cost.negated());
            }
            (Self::PermitTail, State::Permits(permits)) if !ask.cost.is_peek() => {
                permits.held.pop();
            }
            (Self::Renewal(before, until), State::Permits(permits)) => {
                for (_, units, deadline) in permits.held.iter_mut().filter(|(id, ..)| *id == ask.id) {
                    *units = before;
                    *deadline = until.min(*deadline);
                }
            }
            (Self::PermitTail | Self::Renewal(..), _) => {}
        }
    }
}
