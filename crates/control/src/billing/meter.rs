//! Meter: the part of billing on the request path. A thread adds to a table of its own, which the background task
//! empties twice a second.
//!
//! Each thread has two tables and uses the one that is not being emptied, so it never waits. An entry stays while its
//! caller is active: a known caller costs a hash and a comparison, no allocation. Tables are bounded; what does not fit
//! is counted for [`OTHERS`], so that no unit is lost, only whose it was.

use foldhash::fast::RandomState;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use tollgate_core::Timestamp;
use tollgate_engine::{Consumption, Meter};

/// Maximum number of entries in one table.
const MAX_ENTRIES: usize = 16_384;
/// Maximum length of a caller's value, in bytes.
const MAX_CALLER: usize = 1_024;
/// Number of times that an entry is emptied without having been used before it is removed: a minute.
const MAX_IDLE: u8 = 120;

/// Key and value of callers that could not be told apart.
pub(crate) const OTHERS: (&str, &str) = ("", "");

/// Consumption of one caller in one hour, since the table was last emptied.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Start of the hour, in seconds.
    pub(crate) hour: i64,
    pub(crate) domain: Box<str>,
    pub(crate) rule: Box<str>,
    pub(crate) meter: Box<str>,
    pub(crate) key: Box<str>,
    pub(crate) caller: Box<str>,
    pub(crate) units: i64,
    pub(crate) requests: i64,
    idle: u8,
}

impl Entry {
    fn is_of(&self, hour: i64, consumption: &Consumption<'_>, (key, caller): (&str, &str)) -> bool {
        self.hour == hour
            && *self.caller == *caller
            && *self.rule == *consumption.rule
            && *self.meter == *consumption.meter
            && *self.domain == *consumption.domain
            && *self.key == *key
    }
}

/// Entries by the hash of what identifies them. Of two with the same hash, the second takes the next number.
type Table = HashMap<u64, Entry, RandomState>;

/// The tables of one thread.
#[derive(Debug, Default)]
struct Tables([Mutex<Table>; 2]);

/// Counts consumption until it is taken.
#[derive(Debug)]
pub(crate) struct ThreadMeter {
    /// A thread may work for several meters.
    owner: u64,
    hasher: RandomState,
    all: Mutex<Vec<Arc<Tables>>>,
}

thread_local! {
    static LOCALS: RefCell<Vec<(u64, Arc<Tables>)>> = const { RefCell::new(Vec::new()) };
}

impl Default for ThreadMeter {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let owner = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { owner, hasher: RandomState::default(), all: Mutex::default() }
    }
}

/// Returns the start of the hour, in seconds.
pub(crate) fn hour_of(at: Timestamp) -> i64 {
    let seconds = i64::try_from(at.as_micros() / 1_000_000).unwrap_or(i64::MAX);
    seconds - seconds % 3_600
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a table that is free. The thread is the only one that adds, and the other holder leaves one of them at a time.
fn free(tables: &Tables) -> MutexGuard<'_, Table> {
    for table in &tables.0 {
        match table.try_lock() {
            Ok(table) => return table,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {}
        }
    }
    lock(&tables.0[0])
}

impl ThreadMeter {
    fn with(&self, run: impl FnOnce(&Tables)) {
        LOCALS.with_borrow_mut(|locals| {
            let at = locals.iter().position(|(owner, _)| *owner == self.owner);
            let at = at.unwrap_or_else(|| {
                // Drops the tables of meters that no longer exist.
                locals.retain(|(_, tables)| Arc::strong_count(tables) > 1);
                let tables = Arc::new(Tables::default());
                lock(&self.all).push(Arc::clone(&tables));
                locals.push((self.owner, tables));
                locals.len() - 1
            });
            run(&locals[at].1);
        });
    }

    fn add(&self, table: &mut Table, consumption: &Consumption<'_>, caller: (&str, &str)) {
        let hour = hour_of(consumption.at);
        let mut hasher = self.hasher.build_hasher();
        hasher.write_i64(hour);
        for text in [caller.1, caller.0, consumption.rule, consumption.meter, consumption.domain] {
            hasher.write(text.as_bytes());
            hasher.write_u8(0xff);
        }
        let mut hash = hasher.finish();
        loop {
            match table.get_mut(&hash) {
                Some(entry) if entry.is_of(hour, consumption, caller) => {
                    entry.units = entry.units.saturating_add(consumption.units);
                    entry.requests = entry.requests.saturating_add(consumption.requests);
                    entry.idle = 0;
                    return;
                }
                Some(_) => hash = hash.wrapping_add(1),
                None => break,
            }
        }
        if (table.len() >= MAX_ENTRIES || caller.1.len() > MAX_CALLER) && caller != OTHERS {
            return self.add(table, consumption, OTHERS);
        }
        let Consumption { domain, rule, meter, units, requests, .. } = *consumption;
        let entry = Entry {
            hour,
            domain: domain.into(),
            rule: rule.into(),
            meter: meter.into(),
            key: caller.0.into(),
            caller: caller.1.into(),
            units,
            requests,
            idle: 0,
        };
        table.insert(hash, entry);
    }

    /// Takes what was counted since the last call.
    pub(crate) fn drain(&self, mut each: impl FnMut(&Entry)) {
        lock(&self.all).retain(|tables| {
            // Asked first: a thread may still add to a table that is empty by now, and end.
            let has_ended = Arc::strong_count(tables) == 1;
            for table in &tables.0 {
                let mut table = lock(table);
                // A flood of callers must not take the place of others: what is counted is taken, so nothing is lost.
                let is_crowded = table.len() >= MAX_ENTRIES / 2;
                table.retain(|_, entry| {
                    if entry.units != 0 || entry.requests != 0 {
                        each(entry);
                        (entry.units, entry.requests) = (0, 0);
                    }
                    entry.idle = entry.idle.saturating_add(1);
                    entry.idle <= MAX_IDLE && !is_crowded
                });
            }
            !has_ended
        });
    }
}

impl Meter for ThreadMeter {
    fn record(&self, consumption: &Consumption<'_>) {
        self.with(|tables| {
            self.add(&mut free(tables), consumption, (consumption.key, consumption.caller));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn used(caller: &str, units: i64) -> Consumption<'_> {
        let at = Timestamp::from_secs(7_205);
        Consumption { domain: "d", rule: "r", meter: "cost", key: "k", caller, units, requests: 1, at }
    }

    fn drained(meter: &ThreadMeter) -> BTreeMap<String, (i64, i64)> {
        let mut sums = BTreeMap::new();
        meter.drain(|entry| {
            assert_eq!(entry.hour, 7_200);
            let sum: &mut (i64, i64) = sums.entry(entry.caller.to_string()).or_default();
            *sum = (sum.0 + entry.units, sum.1 + entry.requests);
        });
        sums
    }

    /// A unit that is lost between two threads is not billed; one that is taken twice is billed twice.
    #[test]
    fn threads_lose_nothing_while_the_tables_are_emptied() {
        const EACH: i64 = 20_000;
        let meter = ThreadMeter::default();
        let mut sums = BTreeMap::<String, (i64, i64)>::new();
        let mut add = |drained: BTreeMap<String, (i64, i64)>| {
            for (caller, (units, requests)) in drained {
                let sum = sums.entry(caller).or_default();
                *sum = (sum.0 + units, sum.1 + requests);
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        for n in 0..EACH {
                            meter.record(&used(["a", "b"][n as usize % 2], 2));
                        }
                    })
                })
                .collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                add(drained(&meter));
            }
            // A thread's tables are released when it has ended, not when its closure returns.
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
        add(drained(&meter));
        add(drained(&meter));
        assert!(lock(&meter.all).is_empty(), "threads that have ended leave nothing");
        assert_eq!(sums["a"], (3 * EACH, 3 * EACH / 2));
        assert_eq!(sums["b"], (3 * EACH, 3 * EACH / 2));
    }

    /// A client that sends a new name each time must take bounded memory, and take nothing from the bill.
    #[test]
    fn what_does_not_fit_is_counted_for_others() {
        let meter = ThreadMeter::default();
        let extra = 100;
        for n in 0..MAX_ENTRIES + extra {
            meter.record(&used(&format!("caller {n}"), 1));
        }
        meter.record(&used(&"x".repeat(MAX_CALLER + 1), 7));
        meter.record(&used("caller 5", 3));
        let sums = drained(&meter);
        assert_eq!(sums.len(), MAX_ENTRIES + 1);
        assert_eq!(sums[OTHERS.1], (extra as i64 + 7, extra as i64 + 1));
        assert_eq!(sums["caller 5"], (4, 2), "a known caller is still counted for itself");
        for _ in 0..=MAX_IDLE {
            assert!(drained(&meter).is_empty());
        }
        meter.record(&used("late", 1));
        assert_eq!(drained(&meter)["late"], (1, 1), "idle entries make room");
    }
}
