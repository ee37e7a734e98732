//! Taking a place again: for a request that gave its place back while it waited for its client.

use super::{Gate, Ticket};
use tollgate_core::Timestamp;

impl<W> Gate<W> {
    /// Takes a place in flight for a request that [`Gate::enter`] has admitted and that gave its place back with
    /// [`Gate::leave`]. It is neither shed nor counted a second time, so the limit may be exceeded by as many requests as
    /// had given their places back; others wait until it is not. Its latency is counted from now.
    pub fn enter_again(&self, now: Timestamp) -> Ticket {
        self.enter_again_at(|| now)
    }

    /// Takes a place again, as [`Gate::enter_again`]. `now` is called only if the request's latency is measured.
    pub fn enter_again_at(&self, now: impl FnOnce() -> Timestamp) -> Ticket {
        let own = self.places.threads.own();
        self.places.take_any(&own);
        let weight = self.places.sample_weight(&own);
        self.ticket_of(weight, if weight == 0 { Timestamp::ZERO } else { now() })
    }
}
