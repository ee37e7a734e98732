//! Denials that are still in force, answered without a server until their exact end (`clients/conformance/README.md`,
//! section Deny cache). Bounded: the denial stored longest ago makes room. Times are in milliseconds since any fixed point.

use super::result::{CheckReason, CheckResult, ResultSource};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Number of denials that are stored where nothing else is said.
pub(crate) const DEFAULT_ENTRIES: usize = 10_000;
/// Time after which a denial is asked for again, so that raised limits are noticed.
const MAX_AGE_MS: u64 = 300_000;
/// Maximum length of a key, in bytes. Longer ones are few, or somebody invents them.
const MAX_KEY: usize = 4_096;

/// The denials.
#[derive(Debug)]
pub(crate) struct DenyCache {
    max: usize,
    entries: HashMap<String, Entry>,
    /// Keys by the order in which they were stored.
    order: BTreeMap<u64, String>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    place: u64,
    at_ms: u64,
    end_ms: u64,
    cost: u64,
    result: CheckResult,
}

impl DenyCache {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, entries: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }

    /// Returns the denial that is in force for a request of this cost.
    pub(crate) fn lookup(&mut self, key: &str, cost: u64, now_ms: u64) -> Option<CheckResult> {
        let entry = self.entries.get(key)?;
        if now_ms >= entry.end_ms {
            self.remove(key);
            return None;
        }
        if cost < entry.cost || cost == 0 {
            return None;
        }
        let passed = Duration::from_millis(now_ms.saturating_sub(entry.at_ms));
        let left = |time: Option<Duration>| time.map(|time| time.saturating_sub(passed));
        let result = entry.result.clone();
        Some(CheckResult {
            source: ResultSource::Cache,
            reason: CheckReason::Denied,
            retry_after: left(result.retry_after),
            reset_after: left(result.reset_after),
            ..result
        })
    }

    /// Stores a denial of a request that was sent at this time.
    pub(crate) fn store(&mut self, key: String, cost: u64, result: CheckResult, at_ms: u64) {
        let wait = result.retry_after.map_or(0, |wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        if self.max == 0 || wait == 0 || cost == 0 || key.len() > MAX_KEY {
            return;
        }
        self.remove(&key);
        while self.entries.len() >= self.max {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.entries.remove(&oldest);
        }
        let place = self.next;
        self.next += 1;
        self.order.insert(place, key.clone());
        let end_ms = at_ms.saturating_add(wait.min(MAX_AGE_MS));
        self.entries.insert(key, Entry { place, at_ms, end_ms, cost, result });
    }

    /// Forgets the denial of a request.
    pub(crate) fn remove(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.place);
        }
    }

    /// Forgets all denials.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance_cases::load_cases;
    use serde_json::{Value, json};

    fn number(step: &Value, name: &str) -> u64 {
        step[name].as_u64().unwrap_or_else(|| panic!("`{name}` is a number: {step}"))
    }

    /// A denial that is repeated too long locks a caller out; one that is not repeated costs a request.
    #[test]
    fn denials_are_repeated_until_their_exact_end() {
        let data = load_cases("deny-cache");
        assert_eq!(
            (&data["default_max_entries"], &data["max_age_ms"]),
            (&json!(DEFAULT_ENTRIES), &json!(MAX_AGE_MS))
        );
        for sequence in data["sequences"].as_array().filter(|all| !all.is_empty()).expect("sequences") {
            let mut cache = DenyCache::new(usize::try_from(number(sequence, "max_entries")).expect("a size"));
            for step in sequence["steps"].as_array().expect("steps") {
                let (now, about) = (number(step, "at_ms"), format!("{}: {step}", sequence["name"]));
                match (step["event"].as_str(), step["key"].as_str()) {
                    (Some("denied"), Some(key)) => {
                        let millis = |name| Some(Duration::from_millis(number(step, name)));
                        let denial = CheckResult {
                            retry_after: millis("retry_after_ms"),
                            reset_after: millis("reset_ms"),
                            ..CheckResult::by_server(false, CheckReason::Denied)
                        };
                        cache.store(key.to_owned(), number(step, "cost"), denial, now);
                    }
                    (Some("clear"), Some(key)) => cache.remove(key),
                    (Some("clear"), None) => cache.clear(),
                    (Some("lookup"), Some(key)) => {
                        let hit = cache.lookup(key, number(step, "cost"), now).map(|hit| {
                            assert_eq!((hit.source.as_str(), hit.reason.as_str()), ("cache", "denied"), "{about}");
                            let millis = |time: Option<Duration>| time.map(|time| time.as_millis() as u64);
                            json!({"retry_after_ms": millis(hit.retry_after), "reset_ms": millis(hit.reset_after)})
                        });
                        assert_eq!(json!(hit), step["expect"], "{about}");
                        assert_eq!(
                            (cache.entries.len() as u64, cache.order.len()),
                            (number(step, "entries"), cache.entries.len()),
                            "{about}"
                        );
                    }
                    other => panic!("unknown event {other:?}"),
                }
            }
        }
    }

    /// What callers spell must not decide how much memory this takes.
    #[test]
    fn long_keys_are_not_stored() {
        let mut cache = DenyCache::new(10);
        let denial = CheckResult {
            retry_after: Some(Duration::from_secs(1)),
            ..CheckResult::by_server(false, CheckReason::Denied)
        };
        cache.store("k".repeat(MAX_KEY + 1), 1, denial.clone(), 0);
        assert_eq!(cache.entries.len(), 0);
        cache.store("k".repeat(MAX_KEY), 1, denial, 0);
        assert_eq!(cache.entries.len(), 1);
    }
}
