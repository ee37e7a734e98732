//! Who was let in lately, by what the database said: so that those who look on need not look away while it is away. Nothing can
//! be changed by this, for a change needs the database; and it ends an hour after the database last said so.

use crate::auth::principal::{Principal, Role};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// For how long it counts, in milliseconds.
const MAX_AGE_MS: i64 = 3_600_000;
/// The most tokens that are remembered.
const MAX_PRINCIPALS: usize = 1_024;

/// What the database last said of tokens.
#[derive(Debug)]
pub(crate) struct OfflineAccess {
    /// By the token's id: who holds it, and until when that counts.
    principals: Mutex<HashMap<String, (Principal, i64)>>,
    /// Until when it counts that there never was a token.
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

    /// The database said who holds a token, and until when it is valid; or that nobody does.
    pub(crate) fn record(&self, id: &str, held: Option<(&Principal, Option<i64>)>, now: i64) {
        let mut all = self.principals();
        let Some((who, expires)) = held else {
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
        all.insert(id.to_owned(), (who.clone(), until));
    }

    /// The database said whether there ever was a token.
    pub(crate) fn record_tokens(&self, any: bool, now: i64) {
        self.no_tokens_until
            .store(if any { i64::MIN } else { now.saturating_add(MAX_AGE_MS) }, Ordering::Relaxed);
    }

    /// Whether the database said within the hour that there never was a token.
    pub(crate) fn had_no_tokens(&self, now: i64) -> bool {
        self.no_tokens_until.load(Ordering::Relaxed) > now
    }

    pub(crate) fn principal(&self, id: &str, now: i64) -> Option<Principal> {
        let (who, _) = self.principals().get(id).filter(|(_, until)| *until > now)?.clone();
        Some(Principal { role: Role::Viewer, ..who })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_is_cached_for_an_hour_and_never_longer_than_the_token() {
        let lately = OfflineAccess::default();
        let who = Principal { name: "otto".to_owned(), role: Role::Admin };
        lately.record("a", Some((&who, None)), 1_000);
        lately.record("b", Some((&who, Some(5_000))), 1_000);
        let told = |id: &str, now: i64| lately.principal(id, now).map(|who| (who.name, who.role));
        assert_eq!(
            told("a", 1_000 + MAX_AGE_MS - 1),
            Some(("otto".to_owned(), Role::Viewer)),
            "to look, and no more"
        );
        assert_eq!(told("a", 1_000 + MAX_AGE_MS), None);
        assert_eq!((told("b", 4_999).is_some(), told("b", 5_000)), (true, None));
        lately.record("a", None, 2_000);
        assert_eq!(told("a", 2_001), None, "revoked");
        // Whatever comes, the memory is bounded; what is over makes room.
        (0..2 * MAX_PRINCIPALS).for_each(|n| lately.record(&n.to_string(), Some((&who, None)), 2_000));
        assert_eq!(lately.principals().len(), MAX_PRINCIPALS);
        lately.record("later", Some((&who, None)), 2_000 + MAX_AGE_MS);
        assert!(lately.principals().len() == 1 && told("later", 2_001 + MAX_AGE_MS).is_some());
    }
}
