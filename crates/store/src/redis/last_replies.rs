//! Last replies: the last outcome from Redis for each counter, in a fixed amount of memory.
//!
//! A node that must decide without Redis begins from here, not from zero. Sets of four entries; the one with the oldest reply
//! is replaced. A table of all states was rejected: logs and permits are long, and what was used is enough to begin with.

use super::key_encoding::Name;
use foldhash::fast::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{LastKnown, Outcome, TimeDelta, Timestamp, Verdict};

const WAYS: usize = 4;
/// Number of sets; with their locks they take about 2.5 MiB.
const SETS: usize = 1 << 14;

pub(super) struct LastReplies {
    hasher: RandomState,
    sets: Box<[Mutex<[Entry; WAYS]>]>,
}

/// One counter; an id of zero is an empty slot.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    id: u64,
    used: u64,
    reset_after: TimeDelta,
    heard_at: Timestamp,
    /// When a reply last came in time; zero if none did.
    in_time_at: Timestamp,
    /// Whether the state was not known, and assumed to be used up.
    is_assumed: bool,
}

/// Whether somebody still waits for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    InTime,
    Late,
}

impl LastReplies {
    pub(super) fn new() -> Self {
        Self { hasher: RandomState::default(), sets: (0..SETS).map(|_| Mutex::default()).collect() }
    }

    fn id(&self, bundle: &str, name: &Name) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(bundle.as_bytes());
        hasher.write_u8(0);
        hasher.write(name);
        hasher.finish().max(1)
    }

    fn set(&self, id: u64) -> MutexGuard<'_, [Entry; WAYS]> {
        self.sets[id as usize % SETS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the outcome of a limit with this capacity.
    pub(super) fn record(
        &self,
        (bundle, name): (&str, &Name),
        capacity: u64,
        (outcome, is_assumed): (&Outcome, bool),
        arrival: Arrival,
        now: Timestamp,
    ) {
        if outcome.verdict == Verdict::Unknown {
            return;
        }
        let id = self.id(bundle, name);
        let mut set = self.set(id);
        let known = set.iter().position(|entry| entry.id == id);
        let place = known.or_else(|| (0..WAYS).min_by_key(|at| set[*at].heard_at)).unwrap_or(0);
        let (used, reset_after) = (capacity.saturating_sub(outcome.remaining), outcome.reset_after);
        let in_time_at = match (arrival, known) {
            (Arrival::InTime, _) => now,
            (Arrival::Late, Some(at)) => set[at].in_time_at,
            (Arrival::Late, None) => Timestamp::ZERO,
        };
        set[place] = Entry { id, used, reset_after, heard_at: now, in_time_at, is_assumed };
    }

    pub(super) fn get(&self, bundle: &str, name: &Name, now: Timestamp) -> Option<LastKnown> {
        let id = self.id(bundle, name);
        let entry = self.set(id).iter().find(|entry| entry.id == id).copied()?;
        let Entry { used, reset_after, heard_at, in_time_at, is_assumed, .. } = entry;
        let in_time = (in_time_at > Timestamp::ZERO).then(|| now.since(in_time_at));
        Some(LastKnown { used, reset_after, age: now.since(heard_at), in_time, is_assumed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flood of other counters may evict one, but never gives it another's numbers, and the latest reply counts.
    #[test]
    fn the_latest_reply_of_each_counter_is_returned() {
        let (table, now) = (LastReplies::new(), Timestamp::from_secs(1_000));
        let outcome = |remaining| Outcome { remaining, ..Outcome::UNKNOWN };
        let allowed = |remaining| Outcome { verdict: Verdict::ALLOWED, ..outcome(remaining) };
        let name = |n: u64| Name::from_slice(n.to_string().as_bytes());
        let most = 1_000_000;
        for n in 0..most {
            table.record(("b", &name(n)), most, (&allowed(most - n), false), Arrival::Late, now);
        }
        let known = (0..most).filter_map(|n| Some((n, table.get("b", &name(n), now)?.used)));
        let known: Vec<_> = known.collect();
        assert!(known.len() > SETS && known.iter().all(|(n, used)| n == used));
        let (key, secs) = (name(7), TimeDelta::from_secs);
        let record = |outcome: &Outcome, arrival, at| {
            table.record(("b", &key), 5, (outcome, false), arrival, now + secs(at));
        };
        let last = || table.get("b", &key, now + secs(3)).expect("known");
        record(&allowed(4), Arrival::Late, 0);
        assert_eq!((last().used, last().in_time), (1, None));
        record(&allowed(3), Arrival::InTime, 0);
        record(&allowed(2), Arrival::Late, 1);
        record(&outcome(9), Arrival::InTime, 1);
        assert_eq!((last().used, last().age, last().in_time), (3, secs(2), Some(secs(3))));
    }
}
