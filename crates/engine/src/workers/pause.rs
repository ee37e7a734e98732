//! Places of requests that wait for their clients: a client that sends its request or reads its response slowly takes no
//! place meanwhile, and its slowness is not taken for the upstream's.

use super::{Place, WorkerPermit, hand_over};
use tollgate_overload::Ended;

impl WorkerPermit {
    /// Gives the place back while the request waits for its client, not for the upstream.
    pub fn pause(&mut self) {
        if let Some(Place { gate, ticket }) = self.place.take() {
            // Neither a latency nor an abandoned request: only the place is free.
            let admitted = gate.gate.leave(ticket, gate.clock.now(), Ended::Completed);
            hand_over(&gate, admitted);
            self.paused = Some(gate);
        }
        if let Some(metered) = &mut self.metered {
            metered.pause();
        }
    }

    /// Takes the place again, without shedding, because the request waits for the upstream from now on. The latency is
    /// measured from here.
    pub fn resume(&mut self) {
        if let Some(gate) = self.paused.take() {
            let ticket = gate.gate.enter_again(gate.clock.now());
            self.place = Some(Place { gate, ticket });
        }
        if let Some(metered) = &mut self.metered {
            metered.resume();
        }
    }
}
