//! Counters by rule name, found without a lock, with a bounded number of names.
//!
//! The number of names is bounded however often rules change. Rules beyond the bound share one counter.

use arc_swap::ArcSwap;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of distinct names. Names of removed rules stay, as their counters do.
const MAX_RULES: usize = 1_024;
/// Name under which all further rules are counted.
const OTHER: &str = "other";

type Known<T> = BTreeMap<Box<str>, Arc<T>>;

/// One counter, or a few, per rule.
#[derive(Debug)]
pub(crate) struct ByRule<T> {
    known: ArcSwap<Known<T>>,
    adding: Mutex<()>,
}

impl<T> Default for ByRule<T> {
    fn default() -> Self {
        Self { known: ArcSwap::default(), adding: Mutex::default() }
    }
}

impl<T: Default> ByRule<T> {
    /// Returns the counters of one rule.
    pub(crate) fn counter(&self, rule: &str) -> Arc<T> {
        match self.known.load().get(rule) {
            Some(known) => Arc::clone(known),
            None => self.add(rule),
        }
    }

    /// Returns the counters of a rule that has had any.
    pub(crate) fn find(&self, rule: &str) -> Option<Arc<T>> {
        self.known.load().get(rule).map(Arc::clone)
    }

    #[cold]
    fn add(&self, rule: &str) -> Arc<T> {
        let _one = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.known.load();
        let name = if known.len() < MAX_RULES || known.contains_key(rule) { rule } else { OTHER };
        if let Some(known) = known.get(name) {
            return Arc::clone(known);
        }
        let mut more = Known::clone(&known);
        let added = Arc::clone(more.entry(name.into()).or_default());
        self.known.store(Arc::new(more));
        added
    }

    /// Returns the counters of all rules that ever had any, by name.
    pub(crate) fn all<U>(&self, read: impl Fn(&str, &T) -> U) -> Vec<U> {
        self.known.load().iter().map(|(rule, counts)| read(rule, counts)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn however_many_rules_come_and_go_names_are_bounded_and_nothing_is_lost() {
        let counts: ByRule<AtomicU64> = ByRule::default();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for rule in 0..3_000 {
                        counts.counter(&format!("rule-{rule}")).fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let all = counts.all(|rule, count| (rule.to_owned(), count.load(Ordering::Relaxed)));
        assert_eq!(all.len(), MAX_RULES + 1);
        assert_eq!(all.iter().map(|(_, count)| count).sum::<u64>(), 6_000);
        assert!(all.iter().any(|(rule, count)| rule == OTHER && *count == 2 * (3_000 - MAX_RULES as u64)));
    }
}
