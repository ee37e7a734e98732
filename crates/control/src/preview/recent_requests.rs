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
    counters: CounterSharing,
}

impl RecentRequests {
    pub(crate) fn new(sample: &TrafficSample, counters: CounterSharing) -> Self {
        let mut by_key: HashMap<String, Vec<SampledRequest>> = HashMap::new();
        for mut one in sample.requests() {
            let key = one.with(|check| match check.caller() {
                Some((CALLER_KEY, key)) if !one.is_peek() => Some(key.to_owned()),
                _ => None,
            });
            if let Some(key) = key {
                // The caller stands for nobody but itself here.
                one.callers = 1;
                by_key.entry(key).or_default().push(one);
            }
        }
        Self { by_key, counters }
    }

    /// Replays the caller's requests with its terms before and after a change.
    #[must_use]
    pub fn impact(&self, rules: &Arc<Ruleset>, change: &QuotaChange) -> ImpactReport {
        let sample = change.key.as_ref().and_then(|key| self.by_key.get(key));
        sample.map_or_else(ImpactReport::default, |sample| {
            replay_terms(sample, rules, change.before.clone(), change.after.clone(), self.counters)
        })
    }
}
