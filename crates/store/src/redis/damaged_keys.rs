//! Damaged keys: keys of this store that hold something else than counters, each reported once.
//!
//! A damaged key concerns the checks that use it, which their rules' `on_error` decides, until an operator deletes it or
//! it expires. What it had counted is lost then, and a deletion must not hand out a fresh budget: for a while this node
//! remembers when it last saw the damage, and treats the counters as if their server had lost them at that moment
//! (`data_loss`). Deleting the key here was rejected: another program wrote it, and may need it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// Maximum number of keys that are remembered; further ones are not reported.
const MAX_REPORTED: usize = 1_024;
/// A key that was damaged so long ago may be forgotten for another, and is reported again.
const FORGET: TimeDelta = TimeDelta::from_secs(86_400);

/// Keys that were reported, and when each was last seen to be damaged.
#[derive(Default)]
pub(super) struct DamagedKeys {
    /// False on the usual path, which then takes no lock.
    any: AtomicBool,
    keys: Mutex<HashMap<String, Timestamp>>,
}

impl DamagedKeys {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Timestamp>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs keys that a script could not read, and how to repair them.
    pub(super) fn report(&self, keys: &[String], code: &str, details: &str, now: Timestamp) {
        for key in keys.iter().filter(|key| self.is_new(key, now)) {
            tracing::error!(
                key = ?key,
                error = format!("{code} {details}"),
                "Redis key is not a counter; delete it with redis-cli DEL, until then its rules decide by on_error"
            );
        }
    }

    /// Returns when a key was last seen to be damaged.
    #[inline]
    pub(super) fn seen_at(&self, key: &str) -> Option<Timestamp> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.keys().get(key).copied()
    }

    fn is_new(&self, key: &str, now: Timestamp) -> bool {
        let mut keys = self.keys();
        if let Some(seen_at) = keys.get_mut(key) {
            let before = std::mem::replace(seen_at, now.max(*seen_at));
            return now.since(before) >= FORGET;
        }
        if keys.len() >= MAX_REPORTED {
            keys.retain(|_, seen_at| now.since(*seen_at) < FORGET);
        }
        let has_room = keys.len() < MAX_REPORTED;
        if has_room {
            keys.insert(key.to_owned(), now);
            self.any.store(true, Ordering::Release);
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_000);

    /// A damaged key that is checked a thousand times a second must not fill the log.
    #[test]
    fn a_key_is_new_once_and_the_table_is_bounded() {
        let keys = DamagedKeys::default();
        let later = NOW + TimeDelta::from_secs(5);
        assert_eq!(
            [keys.is_new("a", NOW), keys.is_new("a", later), keys.is_new("b", NOW)],
            [true, false, true]
        );
        assert_eq!((keys.seen_at("a"), keys.seen_at("c")), (Some(later), None));
        let count = |at| (0..2 * MAX_REPORTED).filter(|n| keys.is_new(&n.to_string(), at)).count();
        assert_eq!(count(NOW), MAX_REPORTED - 2);
        assert_eq!(count(NOW + FORGET + FORGET), MAX_REPORTED, "what is long repaired makes room");
    }
}
