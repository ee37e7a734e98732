//! Counts of one minute, for the history that the control plane keeps. Nothing is added to the request path: a minute
//! is the difference of two readings of the counters, and its callers come from the worker's sketches.

use crate::metrics::labels::RuleLabel;
use crate::metrics::series::Totals;
use crate::recorder::SHADOW_DENY;
use crate::telemetry::Telemetry;
use std::collections::HashMap;
use std::sync::PoisonError;

/// The counters at the start of a minute.
#[derive(Debug, Default)]
pub(crate) struct MinuteStart {
    totals: Totals,
    rules: HashMap<RuleLabel, [u64; 3]>,
}

/// Counts of a minute, of all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MinuteTotals {
    /// Requests allowed.
    pub allow: u64,
    /// Requests denied.
    pub deny: u64,
    /// Requests that a shadow rule would have denied.
    pub shadow_deny: u64,
    /// Requests allowed because the store failed.
    pub fail_open: u64,
    /// Requests delayed.
    pub delayed: u64,
    /// Requests that no limit applied to.
    pub unmatched: u64,
    /// Latency in microseconds: the 50th, 99th and 99.9th percentile.
    pub latency_us: [Option<u64>; 3],
}

/// Counts of a minute of one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MinuteRule {
    /// The rule's domain.
    pub domain: String,
    /// The rule's name.
    pub rule: String,
    /// Checks that it allowed.
    pub allow: u64,
    /// Checks that it denied.
    pub deny: u64,
    /// Requests that it would have denied, in shadow mode.
    pub shadow_deny: u64,
}

/// One of the busiest callers of a minute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MinuteCaller {
    /// The caller's id.
    pub id: u64,
    /// The caller as lists show it: masked.
    pub display: String,
    /// Requests, estimated from samples under heavy load.
    pub requests: u64,
    /// Denials by each rule: domain, name, number.
    pub denied: Vec<(String, String, u64)>,
}

/// What happened between two calls of [`Telemetry::take_minute`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Minute {
    /// All requests.
    pub totals: MinuteTotals,
    /// Rules that were checked.
    pub rules: Vec<MinuteRule>,
    /// The busiest and the most denied callers, busiest first.
    pub callers: Vec<MinuteCaller>,
}

impl Telemetry {
    /// Counts callers for [`Telemetry::take_minute`] from now on.
    pub fn count_minutes(&self) {
        self.top().count_minutes();
    }

    /// Returns what happened since the last call; since the start of the process at the first call.
    #[must_use]
    pub fn take_minute(&self) -> Minute {
        self.drain_buffers();
        let (totals, counts) = (self.totals(), self.rule_counts());
        let mut start = self.minute.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut start.totals, totals);
        let latency = totals.latency.since(&before.latency);
        let all = MinuteTotals {
            allow: totals.allow.saturating_sub(before.allow),
            deny: totals.deny.saturating_sub(before.deny),
            shadow_deny: totals.shadow_deny.saturating_sub(before.shadow_deny),
            fail_open: totals.fail_open.saturating_sub(before.fail_open),
            delayed: totals.delayed.saturating_sub(before.delayed),
            unmatched: totals.unmatched.saturating_sub(before.unmatched),
            latency_us: [0.5, 0.99, 0.999].map(|share| latency.quantile(share)),
        };
        let mut rules = Vec::new();
        let mut now = HashMap::with_capacity(counts.len());
        for (name, counts) in counts {
            let old = start.rules.get(&name).copied().unwrap_or_default();
            let [allow, deny, shadow_deny] = [0, 1, 2].map(|at| counts[at].saturating_sub(old[at]));
            if allow + deny + shadow_deny > 0 {
                let (domain, rule) = (name.domain.to_string(), name.rule.to_string());
                rules.push(MinuteRule { domain, rule, allow, deny, shadow_deny });
            }
            now.insert(name, counts);
        }
        start.rules = now;
        drop(start);
        let (by_rate, by_denials) = self.top().take_minute();
        let mut callers: Vec<MinuteCaller> = Vec::new();
        let caller = |id, display: &str, requests| MinuteCaller {
            id,
            display: display.to_owned(),
            requests,
            denied: Vec::new(),
        };
        for by in by_rate {
            callers.push(caller(by.caller.id, &by.caller.display, by.requests));
        }
        for by in by_denials {
            let at = callers.iter().position(|caller| caller.id == by.caller.id).unwrap_or_else(|| {
                callers.push(caller(by.caller.id, &by.caller.display, 0));
                callers.len() - 1
            });
            let denied = (by.name.domain.to_string(), by.name.rule.to_string(), by.denied);
            callers[at].denied.push(denied);
        }
        Minute { totals: all, rules, callers }
    }

    /// Returns how many checks each rule allowed, denied, and would have denied in shadow mode.
    fn rule_counts(&self) -> Vec<(RuleLabel, [u64; 3])> {
        let all = self.all_counts().into_iter().filter(|(name, _)| !name.rule.is_empty());
        let counts = all.map(|(name, sums)| {
            let [allow, deny] = super::stats::allowed_and_denied(&sums);
            (name, [allow, deny, sums[SHADOW_DENY]])
        });
        counts.filter(|(_, counts)| counts.iter().any(|count| *count > 0)).collect()
    }
}
