//! What other cells have consumed of shared counters, as they reported it: for usage and explanations, not for
//! decisions.
//!
//! Kept as a state of the limit, so that what time has restored no longer counts. Bounded; when full, one that has run
//! out gives way, else the new one is left out.

use crate::outbox::used;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, Cost, CounterId, Limit, PermitId, State, Timestamp};

const MAX: usize = 65_536;
/// Number of counters looked at when one must give way.
const SAMPLE: usize = 8;

/// Reported consumption by counter.
#[derive(Default)]
pub(crate) struct Others(Mutex<HashMap<CounterId, (Limit, State)>>);

impl Others {
    fn lock(&self) -> MutexGuard<'_, HashMap<CounterId, (Limit, State)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what other cells have consumed or refunded.
    pub(crate) fn add(&self, charges: &[Charge<'_>], now: Timestamp) {
        let mut all = self.lock();
        for charge in charges {
            let id = charge.key.id();
            if all.len() >= MAX && !all.contains_key(&id) {
                let over = all.iter().take(SAMPLE).find(|(_, (limit, state))| limit.expires(state) <= now);
                let Some(over) = over.map(|(id, _)| *id) else { continue };
                all.remove(&over);
            }
            let (limit, state) = all.entry(id).or_insert_with(|| (charge.limit.clone(), State::default()));
            limit.clone_from(charge.limit);
            let at = now + charge.limit.phase(charge.key.stable_hash());
            match charge.cost.is_refund() {
                true => drop(limit.step(state, at, Cost::refund(charge.cost.units()))),
                false => limit.debit(PermitId::ANONYMOUS, state, at, charge.cost.units()),
            }
        }
    }

    /// Returns the units of a charge's counter that still count.
    pub(crate) fn used(&self, charge: &Charge<'_>, now: Timestamp) -> u64 {
        let at = now + charge.limit.phase(charge.key.stable_hash());
        self.lock().get(&charge.key.id()).map_or(0, |(_, state)| used(charge.limit, state, at))
    }
}
