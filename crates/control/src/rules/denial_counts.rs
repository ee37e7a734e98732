//! How often each caller is denied: a table of fixed size, without locks on the way of a request.
//!
//! A caller takes a place when it is first denied, and loses it when it has not been denied for long. Where there is no
//! place left nearby, its denials are not counted: an attack with many names must not take memory.

use crate::preview::caller;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tollgate_engine::{Check, Decision, Observer, Origin};

const SLOTS: usize = 8_192;
/// Places that a caller may have.
const PROBES: usize = 8;

#[derive(Default)]
struct CallerSlot {
    caller: AtomicU64,
    count: AtomicU64,
}

/// How often each caller was denied since somebody last asked.
pub struct DenialCounts {
    hasher: foldhash::fast::RandomState,
    slots: Box<[CallerSlot]>,
    /// What callers are called, for those who must be told.
    names: Mutex<HashMap<u64, String>>,
}

impl Default for DenialCounts {
    fn default() -> Self {
        Self {
            hasher: foldhash::fast::RandomState::default(),
            slots: (0..SLOTS).map(|_| CallerSlot::default()).collect(),
            names: Mutex::default(),
        }
    }
}

impl DenialCounts {
    /// The denials of each caller that has a place, since this was last asked.
    pub(crate) fn drain(&self) -> Vec<(u64, u64)> {
        let taken = self.slots.iter().filter_map(|place| {
            let caller = place.caller.load(Ordering::Relaxed);
            (caller != 0).then(|| (caller, place.count.swap(0, Ordering::Relaxed)))
        });
        taken.collect()
    }

    /// Gives the places of these callers to others.
    pub(crate) fn clear(&self, gone: impl Fn(u64) -> bool) {
        for place in &self.slots {
            if gone(place.caller.load(Ordering::Relaxed)) {
                place.caller.store(0, Ordering::Relaxed);
            }
        }
        self.names.lock().unwrap_or_else(PoisonError::into_inner).retain(|caller, _| !gone(*caller));
    }

    /// What a caller is called, by its first characters.
    pub(crate) fn name(&self, caller: u64) -> String {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).get(&caller).cloned().unwrap_or_default()
    }

    #[cold]
    fn count(&self, check: &Check<'_>) {
        let Some(caller) = caller::number(&self.hasher, check) else { return };
        for near in 0..PROBES {
            let place = &self.slots[(caller as usize + near) % SLOTS];
            let mut found = place.caller.load(Ordering::Relaxed);
            if found == 0 {
                let taken = place.caller.compare_exchange(0, caller, Ordering::Relaxed, Ordering::Relaxed);
                found = taken.map_or_else(|other| other, |_| caller);
                if taken.is_ok() {
                    let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                    names.insert(caller, caller::masked(check));
                }
            }
            if found == caller {
                place.count.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
    }
}

impl Observer for DenialCounts {
    #[inline]
    fn on_decision(&self, check: &Check<'_>, decision: &Decision) {
        // What a store that is away makes of requests is no fault of the rules.
        if !decision.is_allowed() && matches!(decision.origin, Origin::Store | Origin::Local) {
            self.count(check);
        }
    }
}

impl std::fmt::Debug for DenialCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Denials")
    }
}
