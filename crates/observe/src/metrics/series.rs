//! Time series per second: one hour of decision counts and latencies in memory, for the stats API and its event stream.

use crate::metrics::latency::Latency;
use serde_json::{Value, json};
use std::collections::VecDeque;
use tollgate_core::Timestamp;

/// Number of seconds stored.
pub(crate) const MAX_STEPS: usize = 3_600;

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) allow: u64,
    pub(crate) deny: u64,
    pub(crate) shadow_deny: u64,
    pub(crate) fail_open: u64,
    pub(crate) delayed: u64,
    /// Requests that no limit applied to.
    pub(crate) unmatched: u64,
    pub(crate) latency: Latency,
}

/// Stats of one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SecondStats {
    t: u64,
    allow: u64,
    deny: u64,
    shadow_deny: u64,
    fail_open: u64,
    delayed: u64,
    unmatched: u64,
    p50: Option<u64>,
    p99: Option<u64>,
    p999: Option<u64>,
}

impl SecondStats {
    pub(crate) fn json(&self) -> Value {
        json!({
            "t": self.t, "allow": self.allow, "deny": self.deny, "shadow_deny": self.shadow_deny,
            "fail_open": self.fail_open, "delayed": self.delayed, "unmatched": self.unmatched,
            "p50_us": self.p50, "p99_us": self.p99, "p999_us": self.p999,
        })
    }
}

/// The last hour, one entry per second.
#[derive(Debug, Default)]
pub(crate) struct Series {
    steps: VecDeque<SecondStats>,
    last: Totals,
}

impl Series {
    /// Adds the second that ended at `now` and returns its stats.
    pub(crate) fn tick(&mut self, now: Timestamp, totals: &Totals) -> SecondStats {
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let latency = totals.latency.since(&self.last.latency);
        let step = SecondStats {
            t: now.as_secs(),
            allow: since(totals.allow, self.last.allow),
            deny: since(totals.deny, self.last.deny),
            shadow_deny: since(totals.shadow_deny, self.last.shadow_deny),
            fail_open: since(totals.fail_open, self.last.fail_open),
            delayed: since(totals.delayed, self.last.delayed),
            unmatched: since(totals.unmatched, self.last.unmatched),
            p50: latency.quantile(0.5),
            p99: latency.quantile(0.99),
            p999: latency.quantile(0.999),
        };
        self.last = *totals;
        self.steps.push_back(step);
        if self.steps.len() > MAX_STEPS {
            self.steps.pop_front();
        }
        step
    }

    /// Returns the last `seconds` entries as columns.
    pub(crate) fn columns(&self, seconds: usize) -> Value {
        let steps = self.steps.iter().skip(self.steps.len().saturating_sub(seconds));
        let column = |of: fn(&SecondStats) -> Value| steps.clone().map(of).collect::<Vec<Value>>();
        json!({
            "t": column(|step| json!(step.t)),
            "allow": column(|step| json!(step.allow)),
            "deny": column(|step| json!(step.deny)),
            "shadow_deny": column(|step| json!(step.shadow_deny)),
            "fail_open": column(|step| json!(step.fail_open)),
            "delayed": column(|step| json!(step.delayed)),
            "unmatched": column(|step| json!(step.unmatched)),
            "p50_us": column(|step| json!(step.p50)),
            "p99_us": column(|step| json!(step.p99)),
            "p999_us": column(|step| json!(step.p999)),
        })
    }
}

/// Seconds over which a rule's rate is averaged.
const RATE: usize = 10;

/// Recent counts of all rules, for their current rates.
#[derive(Debug, Default)]
pub(crate) struct RuleRates {
    /// Counts of each rule by slot at a time, oldest first.
    past: VecDeque<(Timestamp, Vec<[u64; 2]>)>,
}

impl RuleRates {
    /// Adds the counts at `now`.
    pub(crate) fn tick(&mut self, now: Timestamp, counts: Vec<[u64; 2]>) {
        self.past.push_back((now, counts));
        if self.past.len() > RATE + 1 {
            self.past.pop_front();
        }
    }

    /// Returns the allowed and denied requests per second of a slot, averaged over the last seconds.
    pub(crate) fn rate(&self, slot: usize) -> [f64; 2] {
        let (Some(first), Some(last)) = (self.past.front(), self.past.back()) else { return [0.0; 2] };
        let seconds = last.0.since(first.0).as_micros() as f64 / 1e6;
        let at = |counts: &[[u64; 2]], of: usize| counts.get(slot).map_or(0, |counts| counts[of]);
        [0, 1].map(|of| {
            let grown = at(&last.1, of).saturating_sub(at(&first.1, of));
            if seconds > 0.0 { grown as f64 / seconds } else { 0.0 }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_last_seconds_alone() {
        let mut rates = RuleRates::default();
        assert_eq!(rates.rate(0), [0.0; 2]);
        for second in 0..100_u64 {
            // 100 per second at first, then none; a rule that is added later gets its slot then.
            let mut counts = vec![[second.min(50) * 100, second]];
            if second > 80 {
                counts.push([second * 7, 0]);
            }
            rates.tick(Timestamp::from_secs(1_000 + second), counts);
            if second == 40 {
                assert_eq!((rates.rate(0), rates.rate(1)), ([100.0, 1.0], [0.0; 2]));
            }
        }
        assert_eq!((rates.rate(0), rates.rate(1), rates.rate(2)), ([0.0, 1.0], [7.0, 0.0], [0.0; 2]));
        assert_eq!(rates.past.len(), RATE + 1);
    }

    #[test]
    fn steps_are_differences_and_the_oldest_are_dropped() {
        let mut series = Series::default();
        let totals = |allow| Totals { allow, deny: allow / 10, ..Totals::default() };
        for second in 0..4_000_u64 {
            let step = series.tick(Timestamp::from_secs(second), &totals(second * 100));
            let expected = if second == 0 { 0 } else { 100 };
            assert_eq!((step.allow, step.deny, step.p50), (expected, expected / 10, None));
        }
        assert_eq!(series.steps.len(), MAX_STEPS);
        let columns = series.columns(3);
        assert_eq!(columns["t"], json!([3_997, 3_998, 3_999]));
        assert_eq!(columns["allow"], json!([100, 100, 100]));
    }
}
