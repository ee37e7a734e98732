//! Data loss: the state assumed for counters that a server may have lost.
//!
//! When another process replaces a server, the state it does not have may have been spent. A charge with
//! [`LossPolicy::AssumeExhausted`] then treats a counter without any state that outlived the loss as exhausted at that
//! moment. Any lost state had used no more than that, so no crash hands out fresh quota; and the counter recovers as
//! its limit does, so no caller is locked out for longer than one that had really exhausted it. Charges on top of the
//! assumed state are written, so all nodes see them; a denial writes nothing, and the next check assumes the same.
//!
//! An operator who resets such a counter says what it holds: unused. A state that is unused is none, so the reset leaves a
//! mark beside it, which lasts as long as the loss matters (`lua/loss.lua`).
//!
//! The moment is passed to scripts as an age, because the server's clock decides and may differ from this node's.
//! Denying everything for a period was rejected: a daily quota would lock out every caller whose first request comes
//! that day.

use super::shard_request::ShardCharge;
use tollgate_core::{LossPolicy, PermitId, State, TimeDelta, Timestamp};

/// When state may have been lost, as far as it concerns one request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DataLoss {
    /// Latest loss of all servers that the request was sent to, by this node's clock.
    at: Option<Timestamp>,
    /// Age of that loss when the request was last sent; `None` if it no longer matters.
    pub(super) ago: Option<TimeDelta>,
}

impl DataLoss {
    /// Records what the server in use at `now` may have lost, and when; `most` is the longest time that a loss matters.
    pub(super) fn record(&mut self, lost_at: Option<Timestamp>, now: Timestamp, most: Option<TimeDelta>) {
        self.at = self.at.max(lost_at);
        let counts = |ago: &TimeDelta| most.is_none_or(|most| *ago < most);
        self.ago = self.at.map(|at| now.since(at)).filter(counts);
    }

    /// Returns how long ago the state of this charge's counter may have been lost; `None` if it would have recovered
    /// since.
    pub(super) fn applies_to(&self, want: &ShardCharge) -> Option<TimeDelta> {
        let asks = want.loss_policy == LossPolicy::AssumeExhausted
            && (!want.cost.is_refund() || want.cost.is_reset());
        self.ago.filter(|ago| asks && *ago < want.limit.retention())
    }

    /// Returns the state to assume, if it is not the stored one. `lua/loss.lua` assumes the same. `reset_at` is when the
    /// counter was last reset in a loss.
    pub(super) fn assume(
        &self,
        want: &ShardCharge,
        state: &State,
        now: Timestamp,
        reset_at: Option<Timestamp>,
    ) -> Option<State> {
        let ago = self.applies_to(want)?;
        if reset_at.is_some_and(|reset_at| reset_at > now - ago) {
            return None;
        }
        let lost = now + want.phase - ago;
        if *state != State::Unused && want.limit.expires(state) > lost {
            return None;
        }
        let mut used_up = State::Unused;
        want.limit.debit(PermitId::ANONYMOUS, &mut used_up, lost, want.limit.capacity());
        Some(used_up)
    }
}
