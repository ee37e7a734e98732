//! Figures second by second, for those who look on: an hour of them in memory, and each as it comes for whoever listens.

use crate::latency::Latency;
use serde_json::{Value, json};
use std::collections::VecDeque;
use tollgate_core::Timestamp;

/// Seconds that are kept.
pub(crate) const KEPT: usize = 3_600;

/// Everything that has been counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) allow: u64,
    pub(crate) deny: u64,
    pub(crate) shadow_deny: u64,
    pub(crate) fail_open: u64,
    pub(crate) delayed: u64,
    pub(crate) latency: Latency,
}

/// What one second had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    t: u64,
    allow: u64,
    deny: u64,
    shadow_deny: u64,
    fail_open: u64,
    delayed: u64,
    p50: Option<u64>,
    p99: Option<u64>,
    p999: Option<u64>,
}

impl Step {
    pub(crate) fn json(&self) -> Value {
        json!({
            "t": self.t, "allow": self.allow, "deny": self.deny, "shadow_deny": self.shadow_deny,
            "fail_open": self.fail_open, "delayed": self.delayed,
            "p50_us": self.p50, "p99_us": self.p99, "p999_us": self.p999,
        })
    }
}

/// The last hour.
#[derive(Debug, Default)]
pub(crate) struct Series {
    steps: VecDeque<Step>,
    last: Totals,
}

impl Series {
    /// A second has passed.
    pub(crate) fn tick(&mut self, now: Timestamp, totals: &Totals) -> Step {
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let latency = totals.latency.since(&self.last.latency);
        let step = Step {
            t: now.as_secs(),
            allow: since(totals.allow, self.last.allow),
            deny: since(totals.deny, self.last.deny),
            shadow_deny: since(totals.shadow_deny, self.last.shadow_deny),
            fail_open: since(totals.fail_open, self.last.fail_open),
            delayed: since(totals.delayed, self.last.delayed),
            p50: latency.quantile(0.5),
            p99: latency.quantile(0.99),
            p999: latency.quantile(0.999),
        };
        self.last = *totals;
        self.steps.push_back(step);
        if self.steps.len() > KEPT {
            self.steps.pop_front();
        }
        step
    }

    /// The last so many seconds, as columns.
    pub(crate) fn columns(&self, seconds: usize) -> Value {
        let steps = self.steps.iter().skip(self.steps.len().saturating_sub(seconds));
        let column = |of: fn(&Step) -> Value| steps.clone().map(of).collect::<Vec<Value>>();
        json!({
            "t": column(|step| json!(step.t)),
            "allow": column(|step| json!(step.allow)),
            "deny": column(|step| json!(step.deny)),
            "shadow_deny": column(|step| json!(step.shadow_deny)),
            "fail_open": column(|step| json!(step.fail_open)),
            "delayed": column(|step| json!(step.delayed)),
            "p50_us": column(|step| json!(step.p50)),
            "p99_us": column(|step| json!(step.p99)),
            "p999_us": column(|step| json!(step.p999)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_what_came_in_between_and_the_oldest_go() {
        let mut series = Series::default();
        let totals = |allow| Totals { allow, deny: allow / 10, ..Totals::default() };
        for second in 0..4_000_u64 {
            let step = series.tick(Timestamp::from_secs(second), &totals(second * 100));
            let expected = if second == 0 { 0 } else { 100 };
            assert_eq!((step.allow, step.deny, step.p50), (expected, expected / 10, None));
        }
        assert_eq!(series.steps.len(), KEPT);
        let columns = series.columns(3);
        assert_eq!(columns["t"], json!([3_997, 3_998, 3_999]));
        assert_eq!(columns["allow"], json!([100, 100, 100]));
    }
}
