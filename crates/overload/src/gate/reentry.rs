//! Taking a place again: for a request that gave its place back while it waited for its client.

use super::{Gate, Ticket};
use std::sync::atomic::Ordering;
use tollgate_core::Timestamp;

impl<W> Gate<W> {
    /// Takes a place in flight for a request that [`Gate::enter`] has admitted and that gave its place back with
    /// [`Gate::leave`]. It is neither shed nor counted a second time, so the limit may be exceeded by as many requests as
    /// had given their places back; others wait until it is not. Its latency is counted from now.
    pub fn enter_again(&self, now: Timestamp) -> Ticket {
        let in_flight = self.places.in_flight.0.fetch_add(1, Ordering::AcqRel) + 1;
        Ticket { began: now, in_flight, is_shadowed: false }
    }
}
