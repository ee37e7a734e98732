//! Data loss: the state assumed for counters that a server may have lost.
//!
//! When another process answers in a server's place, what it does not know may have been spent. A charge that asks for it
//! ([`LossPolicy::AssumeExhausted`]) then takes a counter of which nothing is known that outlived the loss as used up at that
//! moment. Any state that was lost had used up no more than that, so no crash hands out fresh quota; and the counter recovers
//! as its limit does, so nobody is locked out for longer than one who had really used it up. What is charged on top is
//! written, so all nodes see it; a denial writes nothing, and the next check assumes the same.
//!
//! The moment is told to scripts as an age, because the server's clock decides and need not agree with ours. Denying
//! everything for a period was rejected: a daily quota would lock out all who come for the first time that day.

use super::shard_request::ShardCharge;
use tollgate_core::{LossPolicy, PermitId, State, TimeDelta, Timestamp};

/// When something may have been lost, as far as it concerns one request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DataLoss {
    /// The latest loss of all servers that the request has been sent to; by our clock.
    at: Option<Timestamp>,
    /// How long ago that was when it was last sent; none where it no longer counts.
    pub(super) ago: Option<TimeDelta>,
}

impl DataLoss {
    /// Notes what the server that is asked at `now` may have lost, and when; `most` is the longest that it counts.
    pub(super) fn record(&mut self, lost_at: Option<Timestamp>, now: Timestamp, most: Option<TimeDelta>) {
        self.at = self.at.max(lost_at);
        let counts = |ago: &TimeDelta| most.is_none_or(|most| *ago < most);
        self.ago = self.at.map(|at| now.since(at)).filter(counts);
    }

    /// How long ago the state of this want's counter may have been lost; none where it would have recovered since.
    pub(super) fn applies_to(&self, want: &ShardCharge) -> Option<TimeDelta> {
        let asks = want.loss_policy == LossPolicy::AssumeExhausted && !want.cost.is_refund();
        self.ago.filter(|ago| asks && *ago < want.limit.retention())
    }

    /// The state to go by, where it is not the one that is kept. `lua/loss.lua` assumes the same.
    pub(super) fn assume(&self, want: &ShardCharge, state: &State, now: Timestamp) -> Option<State> {
        let lost = now + want.phase - self.applies_to(want)?;
        if *state != State::Unused && want.limit.expires(state) > lost {
            return None;
        }
        let mut used_up = State::Unused;
        want.limit.debit(PermitId::ANONYMOUS, &mut used_up, lost, want.limit.capacity());
        Some(used_up)
    }
}
