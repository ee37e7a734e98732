//! How often decisions were made without the store, by rule: an operator's sign that a fail policy is at work.

use crate::decision::Origin;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Counts by rule and origin. Only the failing path comes here, so a lock is cheap enough. There are as many names as
/// there are rules; those of rules that are gone stay, as counters do.
#[derive(Default)]
pub(crate) struct Fallbacks(Mutex<BTreeMap<(String, &'static str), u64>>);

impl Fallbacks {
    pub(crate) fn note(&self, rule: &str, origin: Origin) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((rule.to_owned(), origin.name())).or_default() += 1;
    }

    pub(crate) fn all(&self) -> Vec<(String, &'static str, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|((rule, origin), count)| (rule.clone(), *origin, *count)).collect()
    }
}
