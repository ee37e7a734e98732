//! Batches of checks with one reading of the clock.
//!
//! A decision over millions of keys is one cache miss and little else. A batch starts all its misses before it waits
//! for the first: names are hashed and lines prefetched a group at a time, then charged in order.

use super::MemoryStore;
use super::packed_counters::ChargeKind;
use smallvec::smallvec;
use tollgate_core::{Charge, Clock, Outcome, Outcomes, Timestamp};

/// Number of checks whose lines are prefetched together: more than a core's outstanding misses, so that none idles; few
/// enough to stay in the nearest cache.
const GROUP: usize = 32;

impl<C: Clock> MemoryStore<C> {
    /// Charges each on its own, like requests of one charge, in order. Appends one outcome per charge to `out`.
    pub fn charge_each(&self, now: Timestamp, charges: &[Charge<'_>], out: &mut Vec<Outcome>) {
        out.reserve(charges.len());
        let mut names = [0_u64; GROUP];
        for group in charges.chunks(GROUP) {
            for (charge, name) in group.iter().zip(&mut names) {
                *name = self.hasher.name(&charge.key);
                self.counters.keys.prefetch(*name);
            }
            for (charge, name) in group.iter().zip(names) {
                match self.packed_charge_by_name(charge, name, now) {
                    // Two calls of `push`, because merging their outcomes would pass them through memory.
                    Some(ask) => match self.counters.charge_known(&ask) {
                        Some(outcome) => out.push(outcome),
                        None => out.push(self.charge_slowly(&ask, charge)),
                    },
                    None => out.push(self.charge_at(now, std::slice::from_ref(charge)).per_charge[0]),
                }
            }
        }
    }

    /// Debits charges that have already happened, in order.
    pub(super) fn debit_at(&self, now: Timestamp, charges: &[Charge<'_>]) {
        let mut names = [0_u64; GROUP];
        for group in charges.chunks(GROUP) {
            for (charge, name) in group.iter().zip(&mut names) {
                *name = self.hasher.name(&charge.key);
                self.counters.keys.prefetch(*name);
            }
            for (charge, name) in group.iter().zip(names) {
                match self.packed_charge_by_name(charge, name, now) {
                    Some(ask) => drop(self.charge_packed(&ask, charge, ChargeKind::Debit)),
                    None => drop(self.charge_wide_as(now, charge, ChargeKind::Debit)),
                }
            }
        }
    }

    /// Charges whole requests, in order, each all or none. Appends the outcomes of each to `out`.
    pub fn charge_batch(&self, now: Timestamp, requests: &[&[Charge<'_>]], out: &mut Vec<Outcomes>) {
        out.reserve(requests.len());
        for group in requests.chunks(GROUP) {
            // Names are hashed again when charged: cheaper than storing lists of lists.
            for charge in group.iter().flat_map(|request| request.iter()) {
                self.counters.keys.prefetch(self.hasher.name(&charge.key));
            }
            out.extend(group.iter().map(|request| match request {
                [] => Outcomes {
                    admission: tollgate_core::Admission::Admitted,
                    at: now,
                    per_charge: smallvec![],
                },
                request => self.charge_at(now, request),
            }));
        }
    }
}
