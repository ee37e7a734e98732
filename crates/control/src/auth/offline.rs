//! Read-only access for recently authenticated principals while the database is unavailable. Changes are impossible,
//! since they need the database, and access ends an hour after the database last confirmed it.

use crate::auth::principal::{Principal, Role};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Time for which a confirmation is valid, in milliseconds.
const MAX_AGE_MS: i64 = 3_600_000;
/// Maximum number of cached tokens.
const MAX_PRINCIPALS: usize = 1_024;

/// What the database last confirmed about tokens.
#[derive(Debug)]
pub(crate) struct OfflineAccess {
    /// By token id: the principal, and until when the entry is valid.
    principals: Mutex<HashMap<String, (Principal, i64)>>,
    /// Until when the absence of any token is considered confirmed.
    no_tokens_until: AtomicI64,
}

impl Default for OfflineAccess {
    fn default() -> Self {
        Self { principals: Mutex::default(), no_tokens_until: AtomicI64::new(i64::MIN) }
    }
}

impl OfflineAccess {
    fn principals(&self) -> MutexGuard<'_, HashMap<String, (Principal, i64)>> {
        self.principals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the principal of a token with its expiry; `None` if the token is not valid.
    pub(crate) fn record(&self, id: &str, found: Option<(&Principal, Option<i64>)>, now: i64) {
        let mut all = self.principals();
        let Some((principal, expires)) = found else {
            all.remove(id);
            return;
        };
        if all.len() >= MAX_PRINCIPALS && !all.contains_key(id) {
            all.retain(|_, (_, until)| *until > now);
            if all.len() >= MAX_PRINCIPALS {
                return;
            }
        }
        let until = expires.unwrap_or(i64::MAX).min(now.saturating_add(MAX_AGE_MS));
        all.insert(id.to_owned(), (principal.clone(), until));
    }

    /// Records whether any token was ever created.
    pub(crate) fn record_tokens(&self, any: bool, now: i64) {
        self.no_tokens_until
            .store(if any { i64::MIN } else { now.saturating_add(MAX_AGE_MS) }, Ordering::Relaxed);
    }

    /// Returns whether the database confirmed within the hour that no token was ever created.
    pub(crate) fn had_no_tokens(&self, now: i64) -> bool {
        self.no_tokens_until.load(Ordering::Relaxed) > now
    }

    pub(crate) fn principal(&self, id: &str, now: i64) -> Option<Principal> {
        let (principal, _) = self.principals().get(id).filter(|(_, until)| *until > now)?.clone();
        let role = principal.role.min(Role::Viewer);
        Some(Principal { role, ..principal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_is_cached_for_an_hour_and_never_longer_than_the_token() {
        let access = OfflineAccess::default();
        let principal = Principal { name: "otto".to_owned(), role: Role::Admin };
        access.record("a", Some((&principal, None)), 1_000);
        access.record("b", Some((&principal, Some(5_000))), 1_000);
        let cached = |id: &str, now: i64| access.principal(id, now).map(|found| (found.name, found.role));
        assert_eq!(cached("a", 1_000 + MAX_AGE_MS - 1), Some(("otto".to_owned(), Role::Viewer)), "read-only");
        assert_eq!(cached("a", 1_000 + MAX_AGE_MS), None);
        assert_eq!((cached("b", 4_999).is_some(), cached("b", 5_000)), (true, None));
        access.record("a", None, 2_000);
        assert_eq!(cached("a", 2_001), None, "revoked");
        // The cache is bounded; expired entries make room.
        (0..2 * MAX_PRINCIPALS).for_each(|n| access.record(&n.to_string(), Some((&principal, None)), 2_000));
        assert_eq!(access.principals().len(), MAX_PRINCIPALS);
        access.record("later", Some((&principal, None)), 2_000 + MAX_AGE_MS);
        assert!(access.principals().len() == 1 && cached("later", 2_001 + MAX_AGE_MS).is_some());
    }
}
