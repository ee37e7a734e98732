//! Requests of domains without rules: counted, listed and logged once a minute, because a misspelled domain is a limit that
//! does not exist.
//!
//! Clients choose the names, so their number and length are bounded; the count is exact whatever they are. The caller
//! passes the time and the count, which the recorder keeps with all others.

use std::collections::BTreeMap;
use tollgate_core::{TimeDelta, Timestamp};

/// The maximum number of domains without rules that are listed.
const MAX_DOMAINS: usize = 20;
/// The maximum length of a listed name, in characters.
const MAX_NAME: usize = 128;
/// Minimum time between two messages.
const LOG_INTERVAL: TimeDelta = TimeDelta::from_secs(60);

/// Estimated requests by domain, and what has been logged.
#[derive(Debug, Default)]
pub(crate) struct UnknownDomains {
    requests: BTreeMap<Box<str>, u64>,
    logged: Option<(Timestamp, u64)>,
}

impl UnknownDomains {
    /// Counts sampled requests of a domain without rules.
    pub(crate) fn record(&mut self, domain: &str, weight: u64) {
        let end = domain.char_indices().nth(MAX_NAME).map_or(domain.len(), |(at, _)| at);
        let domain = &domain[..end];
        if self.requests.len() < MAX_DOMAINS || self.requests.contains_key(domain) {
            *self.requests.entry(domain.into()).or_default() += weight;
        }
    }

    /// Returns the domains with the estimated number of requests, most requests first.
    pub(crate) fn list(&self) -> Vec<(Box<str>, u64)> {
        let mut all: Vec<_> =
            self.requests.iter().map(|(domain, requests)| (domain.clone(), *requests)).collect();
        all.sort_by_key(|(_, requests)| std::cmp::Reverse(*requests));
        all
    }

    /// Returns the number of requests since the last message, if one is due. `total` is the exact count since startup.
    pub(crate) fn due(&mut self, now: Timestamp, total: u64) -> Option<u64> {
        let (last, before) = self.logged.unwrap_or_default();
        let is_early = self.logged.is_some() && now.since(last) < LOG_INTERVAL;
        if total <= before || is_early {
            return None;
        }
        self.logged = Some((now, total));
        Some(total - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator must learn of it at once, and a flood must not fill the log.
    #[test]
    fn a_message_is_due_at_once_and_then_once_a_minute() {
        let mut domains = UnknownDomains::default();
        let at = Timestamp::from_secs;
        assert_eq!(domains.due(at(100), 0), None);
        assert_eq!(domains.due(at(101), 3), Some(3));
        assert_eq!(domains.due(at(160), 500), None, "within the minute");
        assert_eq!(domains.due(at(161), 500), Some(497));
        assert_eq!(domains.due(at(300), 500), None, "nothing new");
    }

    /// Strangers choose the names.
    #[test]
    fn names_are_bounded_in_number_and_length() {
        let mut domains = UnknownDomains::default();
        for n in 0..1_000 {
            domains.record(&format!("{n}{}", "é".repeat(10_000)), 1);
        }
        domains.record("0", 5);
        let list = domains.list();
        assert_eq!(list.len(), MAX_DOMAINS);
        assert!(list.iter().all(|(name, _)| name.chars().count() <= MAX_NAME));
    }
}
