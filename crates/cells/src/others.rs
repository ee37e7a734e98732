//! What other cells have consumed of shared counters, as they reported it: for usage and explanations, not for
//! decisions.
//!
//! Kept as a state of the limit, so that what time has restored no longer counts. Bounded; when full, one that has run
//! out gives way, else the new one is left out.

use crate::outbox::used;
use foldhash::quality::RandomState;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, Cost, CounterId, Limit, PermitId, State, Timestamp};

const MAX: usize = 65_536;
/// Number of counters looked at when one must give way.
const SAMPLE: usize = 8;
/// Counters that are looked up together, so that their lines of memory arrive at the same time: waiting for one after
/// another is most of what a report costs.
const GROUP: usize = 32;
/// Limits that are remembered, so that counters share them.
const MAX_SHARED: usize = 32;

/// Reported consumption by counter.
#[derive(Default)]
pub(crate) struct Others(Mutex<Reported>);

#[derive(Default)]
struct Reported {
    counters: HashMap<CounterId, (Arc<Limit>, State), RandomState>,
    limits: Vec<Arc<Limit>>,
}

impl Reported {
    /// Returns a limit, shared with other counters.
    fn shared(&mut self, limit: &Limit) -> Arc<Limit> {
        if let Some(known) = self.limits.iter().find(|known| ***known == *limit) {
            return Arc::clone(known);
        }
        if self.limits.len() >= MAX_SHARED {
            self.limits.clear();
        }
        let limit = Arc::new(limit.clone());
        self.limits.push(Arc::clone(&limit));
        limit
    }

    /// Adds what other cells have consumed or refunded. `has_room` is whether there is room for all these counters.
    fn add(&mut self, charges: &[Charge<'_>], ids: &[CounterId], has_room: bool, now: Timestamp) {
        let mut last: Option<(&Limit, Arc<Limit>)> = None;
        for (charge, id) in charges.iter().zip(ids) {
            let is_full = !has_room && self.counters.len() >= MAX && !self.counters.contains_key(id);
            if is_full && !self.make_room(now) {
                continue;
            }
            // Most charges have the limit of the one before them.
            let (_, shared) = match last.take().filter(|(limit, _)| std::ptr::eq(*limit, charge.limit)) {
                Some(known) => last.insert(known),
                None => last.insert((charge.limit, self.shared(charge.limit))),
            };
            let (limit, state) =
                self.counters.entry(*id).or_insert_with(|| (Arc::clone(shared), State::default()));
            if !Arc::ptr_eq(limit, shared) {
                limit.clone_from(shared);
            }
            let at = moment(charge, now);
            match charge.cost.is_refund() {
                true => drop(limit.step(state, at, Cost::refund(charge.cost.units()))),
                false => limit.debit(PermitId::ANONYMOUS, state, at, charge.cost.units()),
            }
        }
    }

    /// Makes room for a new counter, if that is possible.
    fn make_room(&mut self, now: Timestamp) -> bool {
        let some = self.counters.iter().take(SAMPLE);
        let over = some.filter(|(_, (limit, state))| limit.expires(state) <= now).map(|(id, _)| *id).next();
        over.and_then(|over| self.counters.remove(&over)).is_some()
    }
}

impl Others {
    fn lock(&self) -> MutexGuard<'_, Reported> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what other cells have consumed or refunded; `ids` are those of the charges' counters.
    pub(crate) fn add(&self, charges: &[Charge<'_>], ids: &[CounterId], now: Timestamp) {
        let mut all = self.lock();
        for (charges, ids) in charges.chunks(GROUP).zip(ids.chunks(GROUP)) {
            let new = ids.iter().filter(|id| !all.counters.contains_key(id)).count();
            let has_room = all.counters.len() + new <= MAX;
            all.add(charges, ids, has_room, now);
        }
    }

    /// Returns the units of a charge's counter that still count.
    pub(crate) fn used(&self, charge: &Charge<'_>, now: Timestamp) -> u64 {
        let at = moment(charge, now);
        self.lock().counters.get(&charge.key.id()).map_or(0, |(_, state)| used(charge.limit, state, at))
    }

    /// Returns the units of a charge's counter in the window that contains `now`, without those that slide out of the one
    /// before.
    pub(crate) fn used_in_window(&self, charge: &Charge<'_>, now: Timestamp) -> u64 {
        let at = moment(charge, now);
        match self.lock().counters.get(&charge.key.id()) {
            Some((limit, State::Sliding(counts))) => {
                let is_over = counts.start + limit.rate().period.length() <= at;
                if is_over { 0 } else { counts.current }
            }
            Some((_, state)) => used(charge.limit, state, at),
            None => 0,
        }
    }
}

/// Returns the time at which a charge's counter is stepped: windows of limits with jitter are shifted by the key.
fn moment(charge: &Charge<'_>, now: Timestamp) -> Timestamp {
    match charge.limit.is_jittered() {
        true => now + charge.limit.phase(charge.key.stable_hash()),
        false => now,
    }
}
