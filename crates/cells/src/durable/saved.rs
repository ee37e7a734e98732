//! Saved consumption: what was read back from the database, until each counter has been compared with the store.
//!
//! A counter is compared when it is charged for the first time after a loss. Counters that have been compared, and
//! those of which nothing is saved, are remembered in a small lossy table, so that the request path pays for a keyed
//! hash once.

use super::CounterDigest;
use super::store::ReadBack;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::Timestamp;

/// Number of compared counters that are remembered.
const COMPARED: usize = 1 << 16;

/// Consumption of one counter in one slot, of all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedSlot {
    /// Counter.
    pub counter: CounterDigest,
    /// Start of the slot.
    pub slot: Timestamp,
    /// Last use.
    pub last_at: Timestamp,
    /// Units admitted by processes of this cell.
    pub own: i64,
    /// Units that other cells have reported to processes of this cell.
    pub reported: i64,
    /// Units admitted by processes of all cells.
    pub all: i64,
}

pub(super) type Slots = SmallVec<[SavedSlot; 1]>;

/// Saved consumption by counter.
pub(super) struct Saved {
    counters: Mutex<HashMap<CounterDigest, Slots, foldhash::fast::RandomState>>,
    is_active: AtomicBool,
    is_after_loss: AtomicBool,
    /// Whether owners have changed since the start.
    is_after_move: AtomicBool,
    compared: Box<[AtomicU64]>,
}

impl Saved {
    pub(super) fn new() -> Self {
        Self {
            counters: Mutex::default(),
            is_active: AtomicBool::new(false),
            is_after_loss: AtomicBool::new(false),
            is_after_move: AtomicBool::new(false),
            compared: (0..COMPARED).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CounterDigest, Slots, foldhash::fast::RandomState>> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether any counter may still have to be compared.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// Replaces what is saved: every counter is compared again; after a change of owners, only those that may have moved,
    /// which have other hashes since.
    pub(super) fn install(&self, slots: Vec<SavedSlot>, after: ReadBack) {
        let mut counters: HashMap<CounterDigest, Slots, _> = HashMap::default();
        for slot in slots {
            counters.entry(slot.counter).or_default().push(slot);
        }
        counters.values_mut().for_each(|slots| slots.sort_by_key(|slot| slot.last_at));
        let mut known = self.lock();
        *known = counters;
        if after == ReadBack::Move {
            self.is_after_move.store(true, Ordering::Relaxed);
        } else {
            self.compared.iter().for_each(|compared| compared.store(0, Ordering::Relaxed));
            self.is_after_loss.store(after == ReadBack::Loss, Ordering::Relaxed);
        }
        self.is_active.store(!known.is_empty(), Ordering::Relaxed);
    }

    /// Returns whether the counter with this hash has been compared.
    #[inline]
    pub(super) fn is_compared(&self, hash: u64) -> bool {
        self.compared[hash as usize % COMPARED].load(Ordering::Relaxed) == hash
    }

    /// Remembers that a counter has been compared.
    pub(super) fn set_compared(&self, hash: u64) {
        self.compared[hash as usize % COMPARED].store(hash, Ordering::Relaxed);
    }

    /// Returns what is saved of a counter, why it was read back, and whether owners have changed.
    pub(super) fn get(&self, counter: &CounterDigest) -> Option<(Slots, (ReadBack, bool))> {
        let counters = self.lock();
        let after = if self.is_after_loss.load(Ordering::Relaxed) { ReadBack::Loss } else { ReadBack::Start };
        let after = (after, self.is_after_move.load(Ordering::Relaxed));
        counters.get(counter).map(|slots| (slots.clone(), after))
    }

    /// Forgets what is saved of a counter.
    pub(super) fn remove(&self, counter: &CounterDigest) {
        let mut counters = self.lock();
        counters.remove(counter);
        if counters.is_empty() {
            self.is_active.store(false, Ordering::Relaxed);
        }
    }

    /// Returns the number of counters that have not been compared.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }
}
