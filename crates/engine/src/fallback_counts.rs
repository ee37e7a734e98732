//! Fallback counts: decisions made without the store, by rule and origin.

use crate::by_rule::ByRule;
use crate::decision::Origin;
use std::sync::atomic::{AtomicU64, Ordering};

/// Origins of decisions made without the store.
const ORIGINS: [Origin; 3] = [Origin::FailOpen, Origin::FailClosed, Origin::Local];

/// Counts by rule and origin.
#[derive(Default)]
pub(crate) struct FallbackCounts(ByRule<[AtomicU64; ORIGINS.len()]>);

impl FallbackCounts {
    pub(crate) fn record(&self, rule: &str, origin: Origin) {
        if let Some(at) = ORIGINS.iter().position(|known| *known == origin) {
            self.0.counter(rule)[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn all(&self) -> Vec<(String, &'static str, u64)> {
        let each = self.0.all(|rule, counts| {
            let counts = ORIGINS.iter().zip(counts.each_ref().map(|count| count.load(Ordering::Relaxed)));
            let nonzero = counts.filter(|(_, count)| *count > 0);
            nonzero.map(|(origin, count)| (rule.to_owned(), origin.name(), count)).collect::<Vec<_>>()
        });
        each.into_iter().flatten().collect()
    }
}
