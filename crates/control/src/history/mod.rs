//! History: what each rule and the busiest callers did, kept for weeks in the database, for the dashboard.
//!
//! A node counts in memory; once a minute, in the background, it writes what the minute had (`write`), and no request
//! waits for that. Minutes stay for two days and are then summed, over all nodes, into steps of ten minutes, until
//! the retention ends (`compact`). So the table is bounded by rules × (2,880 × nodes + 144 per day of retention),
//! whatever the traffic; of callers it has only the busiest of each step. A reader gets steps that suit its range
//! (`read`).
//!
//! Rejected: a row for each second (a month is 2.6 million rows per rule), and one blob for each minute (a rule's
//! graph would read the whole table).

pub(crate) mod compact;
pub(crate) mod read;
pub(crate) mod write;

use ring::digest;

/// Length of a fresh step, in seconds.
pub(crate) const MINUTE: i64 = 60;
/// Length of a compacted step, in seconds.
pub(crate) const COARSE: i64 = 600;
/// How long fresh steps are kept, in seconds.
pub(crate) const FRESH: i64 = 2 * 86_400;
/// Callers of one step: those with the most requests, and as many pairs of caller and rule with denials.
pub(crate) const MAX_CALLERS: usize = 50;

/// Counts of one series in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryCounts {
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
}

/// Latency of one step in microseconds: the 50th, 99th and 99.9th percentile.
pub type HistoryLatency = [Option<u64>; 3];

/// What a series counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HistoryOf {
    /// All requests.
    All,
    /// One rule: domain and name.
    Rule(String, String),
    /// One caller, by its id.
    Caller(u64),
    /// One caller at one rule.
    CallerAtRule(u64, String, String),
}

impl HistoryOf {
    /// Returns the columns `rule` and `caller`.
    fn columns(&self) -> (i64, i64) {
        match self {
            Self::All => (0, 0),
            Self::Rule(domain, rule) => (rule_id(domain, rule), 0),
            Self::Caller(caller) => (0, caller.cast_signed()),
            Self::CallerAtRule(caller, domain, rule) => (rule_id(domain, rule), caller.cast_signed()),
        }
    }
}

/// Returns a stable id of a rule, which is never 0: nodes name rules without asking each other.
fn rule_id(domain: &str, rule: &str) -> i64 {
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(&(domain.len() as u64).to_be_bytes());
    hash.update(domain.as_bytes());
    hash.update(rule.as_bytes());
    let first = hash.finish().as_ref().first_chunk().map_or(0, |bytes| i64::from_be_bytes(*bytes));
    first.max(i64::MIN + 1).abs().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules of two domains may share a name, and a name may continue a domain.
    #[test]
    fn rules_have_ids_of_their_own() {
        let ids = [("a", "b"), ("a", "c"), ("b", "a"), ("ab", ""), ("", "ab")].map(|(d, r)| rule_id(d, r));
        for (at, id) in ids.iter().enumerate() {
            assert!(*id > 0);
            assert!(!ids[..at].contains(id), "{id}");
        }
        assert_eq!(rule_id("a", "b"), ids[0]);
    }
}
