//! Last outcomes of counters that other cells own. Where `on_error` lets a cell decide without the owner, its fallback
//! counter starts from them and not unused.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, CounterId, LastKnown, Outcome, TimeDelta, Timestamp, Verdict};

/// Counters that are remembered; beyond, the oldest of a few gives way.
const MAX: usize = 65_536;
/// Number of counters compared when one must give way.
const SAMPLE: usize = 8;

#[derive(Clone, Copy)]
struct StoredOutcome {
    used: u64,
    reset_after: TimeDelta,
    at: Timestamp,
}

/// Last outcomes by counter.
#[derive(Default)]
pub(crate) struct LastOutcomes(Mutex<HashMap<CounterId, StoredOutcome, foldhash::quality::RandomState>>);

impl LastOutcomes {
    fn lock(&self) -> MutexGuard<'_, HashMap<CounterId, StoredOutcome, foldhash::quality::RandomState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the owner's outcome at `at`.
    pub(crate) fn set(&self, charge: &Charge<'_>, outcome: &Outcome, at: Timestamp) {
        if outcome.verdict == Verdict::Unknown {
            return;
        }
        let used = charge.limit.capacity().saturating_sub(outcome.remaining);
        let (id, mut all) = (charge.key.id(), self.lock());
        if all.len() >= MAX && !all.contains_key(&id) {
            let oldest = all.iter().take(SAMPLE).min_by_key(|(_, entry)| entry.at).map(|(id, _)| *id);
            oldest.and_then(|id| all.remove(&id));
        }
        all.insert(id, StoredOutcome { used, reset_after: outcome.reset_after, at });
    }

    /// Returns the owner's last outcome of a counter.
    pub(crate) fn get(&self, charge: &Charge<'_>, now: Timestamp) -> Option<LastKnown> {
        let StoredOutcome { used, reset_after, at } = *self.lock().get(&charge.key.id())?;
        let age = now.since(at);
        Some(LastKnown { used, reset_after, age, in_time: Some(age), is_assumed: false })
    }
}
