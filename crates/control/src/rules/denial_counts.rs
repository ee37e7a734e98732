//! Denial counts per caller: a table of fixed size, without locks on the request path.
//!
//! A caller takes a slot when it is first denied, and loses it after a while without denials. If no slot nearby is
//! free, its denials are not counted: an attack with many names must not take memory.

use crate::preview::caller;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tollgate_engine::{Check, Decision, Observer, Origin};

const SLOTS: usize = 8_192;
/// Number of slots that a caller may use.
const PROBES: usize = 8;

#[derive(Default)]
struct CallerSlot {
    caller: AtomicU64,
    count: AtomicU64,
}

/// Denials of each caller since the last drain.
pub struct DenialCounts {
    hasher: foldhash::fast::RandomState,
    slots: Box<[CallerSlot]>,
    /// Masked names of callers, for reports.
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
    /// Returns the denials of each counted caller since the last call.
    pub(crate) fn drain(&self) -> Vec<(u64, u64)> {
        let taken = self.slots.iter().filter_map(|slot| {
            let caller = slot.caller.load(Ordering::Relaxed);
            (caller != 0).then(|| (caller, slot.count.swap(0, Ordering::Relaxed)))
        });
        taken.collect()
    }

    /// Frees the slots of the callers for which `gone` returns true.
    pub(crate) fn clear(&self, gone: impl Fn(u64) -> bool) {
        for slot in &self.slots {
            if gone(slot.caller.load(Ordering::Relaxed)) {
                slot.caller.store(0, Ordering::Relaxed);
            }
        }
        self.names.lock().unwrap_or_else(PoisonError::into_inner).retain(|caller, _| !gone(*caller));
    }

    /// Returns the masked name of a caller.
    pub(crate) fn name(&self, caller: u64) -> String {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).get(&caller).cloned().unwrap_or_default()
    }

    #[cold]
    fn count(&self, check: &Check<'_>) {
        let Some(caller) = caller::number(&self.hasher, check) else { return };
        for offset in 0..PROBES {
            let slot = &self.slots[(caller as usize + offset) % SLOTS];
            let mut found = slot.caller.load(Ordering::Relaxed);
            if found == 0 {
                let taken = slot.caller.compare_exchange(0, caller, Ordering::Relaxed, Ordering::Relaxed);
                found = taken.map_or_else(|other| other, |_| caller);
                if taken.is_ok() {
                    let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                    names.insert(caller, caller::masked(check, None).0);
                }
            }
            if found == caller {
                slot.count.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
    }
}

impl Observer for DenialCounts {
    #[inline]
    fn on_decision(&self, check: &Check<'_>, decision: &Decision) {
        // Denials by the fail policy while the store is unavailable are not the rules' fault.
        if !decision.is_allowed()
            && matches!(decision.origin, Origin::Store | Origin::Regional | Origin::Local)
        {
            self.count(check);
        }
    }
}

impl std::fmt::Debug for DenialCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DenialCounts")
    }
}
