//! Taking a place again: for a request that gave its place back while it waited for its client.

use super::places::ThreadPlaces;
use super::{Gate, Ticket, lock};
use crate::striped::Own;
use tollgate_core::Timestamp;

impl<W> Gate<W> {
    /// Takes a place in flight for a request that [`Gate::enter`] has admitted and that gave its place back with
    /// [`Gate::leave`], if one is free and no other request needs its place again. It is neither shed nor counted a second time. Its
    /// latency is counted from now. `now` is called only if the latency is measured.
    #[must_use]
    pub fn try_enter_again(&self, is_patient: bool, now: impl FnOnce() -> Timestamp) -> Option<Ticket> {
        if self.is_shadow() {
            return Some(self.enter_again(is_patient, now));
        }
        if self.places.waiting() > 0 && lock(&self.places.room).has_again(is_patient) {
            return None;
        }
        let own = self.places.threads.own();
        self.places.take(&own, is_patient).then(|| self.ticket_again(&own, is_patient, now))
    }

    /// Lets a request wait for its place, before those that have had none. It waits until it gets one, or leaves: dropping
    /// what the waiter leads to. Call [`Gate::admit_waiting`] afterwards: a place may have become free.
    pub fn wait_again(&self, is_patient: bool, waiter: W) {
        let mut room = lock(&self.places.room);
        room.push_again(is_patient, waiter);
        self.places.set_waiting(&room);
    }

    /// Takes a place again whether or not one is free: for a request whose response the upstream is sending. The limit may be
    /// exceeded by as many requests as had given their places back meanwhile.
    pub fn enter_again(&self, is_patient: bool, now: impl FnOnce() -> Timestamp) -> Ticket {
        let own = self.places.threads.own();
        self.places.take_any(&own);
        self.ticket_again(&own, is_patient, now)
    }

    fn ticket_again(
        &self,
        own: &Own<'_, ThreadPlaces>,
        is_patient: bool,
        now: impl FnOnce() -> Timestamp,
    ) -> Ticket {
        let weight = self.places.sample_weight(own);
        self.ticket_of(weight, if weight == 0 { Timestamp::ZERO } else { now() }, is_patient)
    }
}
