//! Damaged keys: keys of this store that hold something else than counters, each reported once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Maximum number of keys that are remembered; further ones are not reported.
const MAX_REPORTED: usize = 1_024;

/// Keys that were reported.
#[derive(Default)]
pub(super) struct DamagedKeys(Mutex<HashSet<String>>);

impl DamagedKeys {
    /// Logs keys that a script could not read, and how to repair them.
    pub(super) fn report(&self, keys: &[String], code: &str, details: &str) {
        for key in keys.iter().filter(|key| self.is_new(key)) {
            // Only these keys are affected. They are not deleted here: somebody else wrote them, and may need them.
            tracing::error!(
                key = ?key,
                error = format!("{code} {details}"),
                "Redis key is not a counter; delete it with redis-cli DEL, until then its rules decide by on_error"
            );
        }
    }

    fn is_new(&self, key: &str) -> bool {
        let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reported.len() < MAX_REPORTED && reported.insert(key.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A damaged key that is checked a thousand times a second must not fill the log.
    #[test]
    fn a_key_is_new_once_and_the_table_is_bounded() {
        let keys = DamagedKeys::default();
        assert_eq!([keys.is_new("a"), keys.is_new("a"), keys.is_new("b")], [true, false, true]);
        let new = (0..2 * MAX_REPORTED).filter(|n| keys.is_new(&n.to_string())).count();
        assert_eq!(new, MAX_REPORTED - 2);
    }
}
