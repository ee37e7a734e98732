//! Recent requests by caller: this node's traffic sample, grouped by API key, to tell what a change of a quota would have
//! denied. Taken once for an import, so that each of its lines replays only the requests of its caller.

use crate::preview::replay::{ImpactReport, replay_terms};
use crate::preview::sample::TrafficSample;
use crate::preview::sampled_request::SampledRequest;
use crate::quota::guard::QuotaChange;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_engine::CounterSharing;
use tollgate_rules::{CALLER_KEY, Ruleset};

/// The sampled requests of each API key, in time order.
#[derive(Debug)]
pub struct RecentRequests {
    by_key: HashMap<String, Vec<SampledRequest>>,
    /// Requests without an API key.
    others: Vec<SampledRequest>,
    counters: CounterSharing,
}

impl RecentRequests {
    pub(crate) fn new(sample: &TrafficSample, counters: CounterSharing) -> Self {
        let mut by_key: HashMap<String, Vec<SampledRequest>> = HashMap::new();
        let mut others = Vec::new();
        for mut one in sample.requests() {
            if one.is_peek() {
                continue;
            }
            let key = one.with(|check| match check.caller() {
                Some((CALLER_KEY, key)) => Some(key.to_owned()),
                _ => None,
            });
            // The caller is not a sample of others here.
            one.callers = 1;
            match key {
                Some(key) => by_key.entry(key).or_default().push(one),
                None => others.push(one),
            }
        }
        Self { by_key, others, counters }
    }

    /// Replays the caller's requests with its terms before and after a change.
    #[must_use]
    pub fn impact(&self, rules: &Arc<Ruleset>, change: &QuotaChange) -> ImpactReport {
        let Some(value) = &change.value else { return ImpactReport::default() };
        let others;
        let sample = if change.key == CALLER_KEY {
            self.by_key.get(value)
        } else {
            others = self.of(&change.key, value);
            Some(&others)
        };
        sample.map_or_else(ImpactReport::default, |sample| {
            replay_terms(sample, rules, change.before.clone(), change.after.clone(), self.counters)
        })
    }

    /// Returns the sampled requests with this value of an attribute, in time order.
    fn of(&self, key: &str, value: &str) -> Vec<SampledRequest> {
        let all = self.by_key.values().flatten().chain(&self.others);
        let mut own: Vec<SampledRequest> =
            all.filter(|one| one.with(|check| check.value(key) == Some(value))).cloned().collect();
        own.sort_by_key(|one| one.at);
        own
    }
}
