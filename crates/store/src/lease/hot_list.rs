//! The hot list of a fleet: names of counters that other processes have found hot, which are leased here from their first
//! charge on, instead of when this node's own traffic has shown it.
//!
//! Processes name a counter alike, by a keyed hash that the program provides, so that no values travel. What a process
//! reports is its own traffic alone, never what the list made it lease: otherwise a key would stay hot for as long as two
//! processes remind each other of it.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use tollgate_core::{CounterKey, Timestamp};

/// Names a counter alike in every process of a fleet.
pub type CounterNamer = Arc<dyn Fn(&CounterKey<'_>) -> u64 + Send + Sync>;

/// A counter that is hot by the traffic of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotCounter {
    /// Its name, by the program's [`CounterNamer`].
    pub name: u64,
    /// Units per second at this process.
    pub rate: u64,
}

/// The names of the list, until it expires.
pub(super) type HotNames = Arc<HashSet<u64>>;

/// The list, and what names the counters of this process.
#[derive(Default)]
pub(super) struct HotList {
    namer: OnceLock<CounterNamer>,
    /// The list has names; read without the lock.
    has_names: AtomicBool,
    names: RwLock<Option<(HotNames, Timestamp)>>,
}

impl fmt::Debug for HotList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HotList").field("has_names", &self.has_names).finish_non_exhaustive()
    }
}

impl HotList {
    pub(super) fn set_namer(&self, namer: CounterNamer) {
        let _ = self.namer.set(namer);
    }

    /// Returns the name of a counter, once there is something that names it.
    pub(super) fn name(&self, key: &CounterKey<'_>) -> Option<u64> {
        self.namer.get().map(|namer| namer(key))
    }

    /// Replaces the list, which is valid until this time.
    pub(super) fn replace(&self, names: HashSet<u64>, until: Timestamp) {
        let has_names = !names.is_empty();
        let mut list = self.names.write().unwrap_or_else(PoisonError::into_inner);
        *list = has_names.then(|| (Arc::new(names), until));
        self.has_names.store(has_names, Ordering::Relaxed);
    }

    /// Returns the names, unless the list is empty or has expired.
    #[inline]
    pub(super) fn names(&self, now: Timestamp) -> Option<HotNames> {
        if !self.has_names.load(Ordering::Relaxed) {
            return None;
        }
        let list = self.names.read().unwrap_or_else(PoisonError::into_inner);
        list.as_ref().filter(|(_, until)| now < *until).map(|(names, _)| Arc::clone(names))
    }

    /// Returns whether the list has this counter.
    #[inline]
    pub(super) fn contains(&self, key: &CounterKey<'_>, now: Timestamp) -> bool {
        self.names(now).is_some_and(|names| self.name(key).is_some_and(|name| names.contains(&name)))
    }
}
