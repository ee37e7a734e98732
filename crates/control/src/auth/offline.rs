//! Who was let in lately, by what the database said: so that those who look on need not look away while it is away. Nothing can
//! be changed by this, for a change needs the database; and it ends an hour after the database last said so.

use crate::auth::principal::{Identity, Role};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// For how long it counts, in milliseconds.
const LASTS: i64 = 3_600_000;
/// The most tokens that are remembered.
const MOST: usize = 1_024;

/// What the database last said of tokens.
#[derive(Debug)]
pub(crate) struct Lately {
    /// By the token's id: who holds it, and until when that counts.
    held: Mutex<HashMap<String, (Identity, i64)>>,
    /// Until when it counts that there never was a token.
    none: AtomicI64,
}

impl Default for Lately {
    fn default() -> Self {
        Self { held: Mutex::default(), none: AtomicI64::new(i64::MIN) }
    }
}

impl Lately {
    fn held(&self) -> MutexGuard<'_, HashMap<String, (Identity, i64)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The database said who holds a token, and until when it is valid; or that nobody does.
    pub(crate) fn note(&self, id: &str, held: Option<(&Identity, Option<i64>)>, now: i64) {
        let mut all = self.held();
        let Some((who, expires)) = held else {
            all.remove(id);
            return;
        };
        if all.len() >= MOST && !all.contains_key(id) {
            all.retain(|_, (_, until)| *until > now);
            if all.len() >= MOST {
                return;
            }
        }
        let until = expires.unwrap_or(i64::MAX).min(now.saturating_add(LASTS));
        all.insert(id.to_owned(), (who.clone(), until));
    }

    /// The database said whether there ever was a token.
    pub(crate) fn note_tokens(&self, any: bool, now: i64) {
        self.none.store(if any { i64::MIN } else { now.saturating_add(LASTS) }, Ordering::Relaxed);
    }

    /// Whether the database said within the hour that there never was a token.
    pub(crate) fn had_no_tokens(&self, now: i64) -> bool {
        self.none.load(Ordering::Relaxed) > now
    }

    pub(crate) fn holder(&self, id: &str, now: i64) -> Option<Identity> {
        let (who, _) = self.held().get(id).filter(|(_, until)| *until > now)?.clone();
        Some(Identity { role: Role::Viewer, ..who })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_counts_for_an_hour_and_never_longer_than_the_token() {
        let lately = Lately::default();
        let who = Identity { name: "otto".to_owned(), role: Role::Admin };
        lately.note("a", Some((&who, None)), 1_000);
        lately.note("b", Some((&who, Some(5_000))), 1_000);
        let told = |id: &str, now: i64| lately.holder(id, now).map(|who| (who.name, who.role));
        assert_eq!(
            told("a", 1_000 + LASTS - 1),
            Some(("otto".to_owned(), Role::Viewer)),
            "to look, and no more"
        );
        assert_eq!(told("a", 1_000 + LASTS), None);
        assert_eq!((told("b", 4_999).is_some(), told("b", 5_000)), (true, None));
        lately.note("a", None, 2_000);
        assert_eq!(told("a", 2_001), None, "revoked");
        // Whatever comes, the memory is bounded; what is over makes room.
        (0..2 * MOST).for_each(|n| lately.note(&n.to_string(), Some((&who, None)), 2_000));
        assert_eq!(lately.held().len(), MOST);
        lately.note("later", Some((&who, None)), 2_000 + LASTS);
        assert!(lately.held().len() == 1 && told("later", 2_001 + LASTS).is_some());
    }
}
