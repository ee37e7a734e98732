//! Units that windows could not count: reports of other cells beyond what a window's state can represent.
//!
//! A window counts at most twice its limit. With three cells or more, the others can have admitted more than that before
//! they knew of each other. The counter denies anyway; but what is refunded later must first be taken off the units that
//! were never counted, or it would erase what this cell and others have consumed, and every such refund would be a new
//! limit. The table is bounded; when it is full, the counter whose window ends first is dropped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, CounterId, Limit, LimitParams, Rate, Timestamp};

const MAX: usize = 65_536;

/// Units that were not counted, and until when they would count.
#[derive(Default)]
pub(crate) struct LostUnits {
    units: Mutex<HashMap<CounterId, (u64, Timestamp)>>,
    count: AtomicUsize,
}

impl LostUnits {
    fn lock(&self) -> MutexGuard<'_, HashMap<CounterId, (u64, Timestamp)>> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the units of a counter that were not counted in its present window.
    pub(crate) fn get(&self, id: CounterId, now: Timestamp) -> u64 {
        if self.is_empty() {
            return 0;
        }
        self.lock().get(&id).filter(|(_, until)| *until > now).map_or(0, |(units, _)| *units)
    }

    /// Adds units to a counter's, up to `most`.
    pub(crate) fn add(&self, id: CounterId, units: u64, most: u64, until: Timestamp, now: Timestamp) {
        let mut all = self.lock();
        if all.len() >= MAX && !all.contains_key(&id) {
            let soonest = all.iter().take(8).min_by_key(|(_, (_, until))| *until).map(|(id, _)| *id);
            soonest.and_then(|id| all.remove(&id));
        }
        let known = all.entry(id).or_insert((0, until));
        if known.1 <= now {
            known.0 = 0;
        }
        *known = (known.0.saturating_add(units).min(most), until);
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Takes units off a counter's.
    pub(crate) fn take(&self, id: CounterId, units: u64) {
        let mut all = self.lock();
        if let Some((known, _)) = all.get_mut(&id) {
            *known = known.saturating_sub(units);
            if *known == 0 {
                all.remove(&id);
            }
        }
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Drops what has ended.
    pub(crate) fn sweep(&self, now: Timestamp) {
        if !self.is_empty() {
            let mut all = self.lock();
            all.retain(|_, (_, until)| *until > now);
            self.count.store(all.len(), Ordering::Relaxed);
        }
    }
}

/// Returns whether a charge's limit counts units in windows.
pub(crate) const fn has_windows(limit: &Limit) -> bool {
    matches!(
        limit.params(),
        LimitParams::Fixed { .. }
            | LimitParams::Attempts { .. }
            | LimitParams::Sliding
            | LimitParams::Strict { .. }
            | LimitParams::Log { .. }
    )
}

/// Returns the limit by which a window's state shows how much more it can count: twice the limit, where a state of both
/// has the same form.
pub(crate) fn whole_window(limit: &Limit) -> Limit {
    let rate = Rate { count: 2 * limit.rate().count, period: limit.rate().period.clone() };
    let twice = limit.with_rate(rate, None).ok();
    let twice = twice.filter(|twice| twice.packed().is_some() == limit.packed().is_some());
    twice.unwrap_or_else(|| limit.clone())
}

/// Returns until when units that a charge takes now count.
pub(crate) fn counts_until(charge: &Charge<'_>, id: CounterId, now: Timestamp) -> Timestamp {
    match charge.limit.window(now, id.1) {
        Some((_, end)) => end,
        None => now + charge.limit.rate().period.length(),
    }
}
