//! Outages: a store that was away may have come back empty. What is debited before that is noticed (reports of other cells,
//! what nodes have admitted meanwhile) would count as what the store has lost, and hide the loss. So the first debit after an
//! outage looks at the canaries, and if they are gone, waits until the counters are read back. For a bounded time: a database
//! that is unavailable must not hold consumption back. Requests do not wait: what they find is at most a second old.

use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::{StoreError, TimeDelta, Timestamp};

/// Maximum time for which debits wait for what the database has.
const MAX_WAIT: TimeDelta = TimeDelta::from_secs(5);

/// Failures of the store, and how many of them were before it was last looked at.
#[derive(Default)]
pub(super) struct Outages {
    failures: AtomicU64,
    looked: AtomicU64,
    /// When its counters were first seen to be lost, in microseconds; 0 if they are not.
    lost_at: AtomicU64,
}

impl Outages {
    /// Records an answer of the store. A slow one loses nothing.
    #[cold]
    pub(super) fn record(&self, error: &StoreError) {
        if is_away(error) {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of failures, if the store may have lost its counters since it was last looked at.
    #[inline]
    pub(super) fn unlooked(&self) -> Option<u64> {
        let failures = self.failures.load(Ordering::Relaxed);
        (failures != self.looked.load(Ordering::Relaxed)).then_some(failures)
    }

    /// Records a look that came after this many failures.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if counters are lost and may still be read back.
    pub(super) fn look(&self, failures: u64, is_lost: bool, now: Timestamp) -> Result<(), StoreError> {
        let known = self.lost_at.load(Ordering::Relaxed);
        if is_lost && known == 0 {
            self.lost_at.store(now.as_micros(), Ordering::Relaxed);
        }
        if is_lost && (known == 0 || now.since(Timestamp::from_micros(known)) < MAX_WAIT) {
            return Err(StoreError::Unavailable("what it has lost is being read back".to_owned()));
        }
        self.lost_at.store(0, Ordering::Relaxed);
        self.looked.store(failures, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns whether the store may be another one when it answers again.
fn is_away(error: &StoreError) -> bool {
    match error {
        StoreError::Timeout | StoreError::Late(_) => false,
        StoreError::Partial { cause, .. } | StoreError::BesideLate { cause, .. } => is_away(cause),
        StoreError::Several(all) => all.iter().any(is_away),
        _ => true,
    }
}
