//! Many checks with one reading of the clock.
//!
//! A decision over millions of keys is one cache miss and little else. A batch starts all its misses before it waits
//! for the first: names are hashed and lines fetched a group at a time, then charged in order.

use super::MemoryStore;
use super::counters::Ask;
use smallvec::{SmallVec, smallvec};
use tollgate_core::{Charge, Clock, Outcome, Outcomes, Timestamp};

/// Checks whose lines are fetched together. More than a core's outstanding misses, so that none idles; few enough to stay in the nearest cache.
const GROUP: usize = 32;

impl<C: Clock> MemoryStore<C> {
    /// Charges each on its own, as so many requests of one charge, in order; appends one outcome for each.
    pub fn charge_each(&self, now: Timestamp, charges: &[Charge<'_>], out: &mut Vec<Outcome>) {
        out.reserve(charges.len());
        for group in charges.chunks(GROUP) {
            let mut asks: SmallVec<[Option<Ask<'_>>; GROUP]> = SmallVec::new();
            for charge in group {
                let ask = self.ask(charge, now);
                if let Some(ask) = &ask {
                    self.counters.keys.prefetch(ask.name);
                }
                asks.push(ask);
            }
            for (charge, ask) in group.iter().zip(&asks) {
                out.push(match ask {
                    Some(ask) => self.charge_one(ask),
                    None => self.charge_at(now, std::slice::from_ref(charge)).each[0],
                });
            }
        }
    }

    /// Charges whole requests, in order, each all or none; appends the outcomes of each.
    pub fn charge_batch(&self, now: Timestamp, requests: &[&[Charge<'_>]], out: &mut Vec<Outcomes>) {
        out.reserve(requests.len());
        for group in requests.chunks(GROUP) {
            // Names are hashed again when charged: cheaper than keeping lists of lists.
            for charge in group.iter().flat_map(|request| request.iter()) {
                self.counters.keys.prefetch(self.hasher.name(&charge.key));
            }
            out.extend(group.iter().map(|request| match request {
                [] => Outcomes { admission: tollgate_core::Admission::Admitted, each: smallvec![] },
                request => self.charge_at(now, request),
            }));
        }
    }
}
