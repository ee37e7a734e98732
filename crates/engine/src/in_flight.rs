//! In-flight permits: the number held now, by rule, for metrics. Counted where permits are held (a gateway, a layer, a
//! reservation), so only concurrency rules pay for it.

use crate::by_rule::ByRule;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Permit counts by rule.
#[derive(Debug, Default)]
pub(crate) struct InFlight(ByRule<AtomicU64>);

/// Counts a request as in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard(SmallVec<[Arc<AtomicU64>; 2]>);

impl InFlight {
    /// Counts one request under `rules`. Returns `None` if there are none.
    pub(crate) fn enter<'r>(&self, rules: impl Iterator<Item = &'r str>) -> Option<Arc<InFlightGuard>> {
        let counts: SmallVec<[_; 2]> = rules.map(|rule| self.0.counter(rule)).collect();
        if counts.is_empty() {
            return None;
        }
        counts.iter().for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
        Some(Arc::new(InFlightGuard(counts)))
    }

    /// Returns all rules that ever held permits, with their current counts.
    pub(crate) fn all(&self) -> Vec<(String, u64)> {
        self.0.all(|rule, count| (rule.to_owned(), count.load(Ordering::Relaxed)))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.iter().for_each(|count| _ = count.fetch_sub(1, Ordering::Relaxed));
    }
}
