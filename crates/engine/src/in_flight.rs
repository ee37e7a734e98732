//! How many permits are held at this moment, by rule: for those who watch. Counted where permits are held (a gateway, a
//! layer, a reservation), so only rules about concurrency pay for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts by rule.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Mutex<BTreeMap<String, u64>>);

/// A request that is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    all: Arc<InFlight>,
    rules: Vec<String>,
}

impl InFlight {
    /// Counts one request under these rules; nothing, where there are none.
    pub(crate) fn enter<'r>(self: &Arc<Self>, rules: impl Iterator<Item = &'r str>) -> Option<Arc<Counted>> {
        let rules: Vec<String> = rules.map(str::to_owned).collect();
        if rules.is_empty() {
            return None;
        }
        let mut counts = self.counts();
        for rule in &rules {
            *counts.entry(rule.clone()).or_default() += 1;
        }
        drop(counts);
        Some(Arc::new(Counted { all: Arc::clone(self), rules }))
    }

    /// All rules that ever had any, with what they have now.
    pub(crate) fn all(&self) -> Vec<(String, u64)> {
        self.counts().iter().map(|(rule, count)| (rule.clone(), *count)).collect()
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.all.counts();
        for rule in &self.rules {
            if let Some(count) = counts.get_mut(rule) {
                *count = count.saturating_sub(1);
            }
        }
    }
}
