//! Shared networks: networks on which many callers are all near their limits, as one client with many keys or one office
//! behind NAT.

use std::collections::HashMap;
use tollgate_core::{TimeDelta, Timestamp};

/// Maximum number of tracked networks, and of callers on each.
const MAX_NETWORKS: usize = 1_024;
const MAX_KEYS: usize = 64;
/// Time after which a caller is forgotten.
const WINDOW: TimeDelta = TimeDelta::from_secs(300);
/// Minimum number of callers on a listed network.
const MIN_KEYS: usize = 5;

#[derive(Debug, Default)]
pub(super) struct SharedNetworkTracker {
    networks: HashMap<String, HashMap<u64, LastSeen>>,
    swept: Timestamp,
}

#[derive(Clone, Copy, Debug)]
struct LastSeen {
    seen: Timestamp,
    near: Option<Timestamp>,
}

/// A network whose callers are all near their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedNetwork {
    pub(crate) network: String,
    pub(crate) keys: usize,
    pub(crate) near: usize,
}

impl SharedNetworkTracker {
    pub(super) fn record(&mut self, network: &str, id: u64, near: bool, at: Timestamp) {
        if !self.networks.contains_key(network) {
            // A network is tracked only once a caller on it is near its limit.
            if !near || self.networks.len() >= MAX_NETWORKS {
                return;
            }
            self.networks.insert(network.to_owned(), HashMap::new());
        }
        let Some(keys) = self.networks.get_mut(network) else { return };
        if keys.len() >= MAX_KEYS && !keys.contains_key(&id) {
            return;
        }
        let last = keys.entry(id).or_insert(LastSeen { seen: at, near: None });
        last.seen = at;
        if near {
            last.near = Some(at);
        }
    }

    pub(super) fn rotate(&mut self, now: Timestamp) {
        if now.since(self.swept) < TimeDelta::from_secs(10) {
            return;
        }
        self.swept = now;
        self.networks.retain(|_, keys| {
            keys.retain(|_, last| now.since(last.seen) <= WINDOW);
            keys.values().any(|last| last.near.is_some_and(|at| now.since(at) <= WINDOW))
        });
    }

    pub(super) fn top_n(&self, now: Timestamp, max: usize) -> Vec<SharedNetwork> {
        let fresh = |at: Timestamp| now.since(at) <= WINDOW;
        let counted = self.networks.iter().map(|(network, keys)| SharedNetwork {
            network: network.clone(),
            keys: keys.values().filter(|last| fresh(last.seen)).count(),
            near: keys.values().filter(|last| last.near.is_some_and(fresh)).count(),
        });
        let mut all: Vec<SharedNetwork> =
            counted.filter(|shared| shared.keys >= MIN_KEYS && shared.near == shared.keys).collect();
        all.sort_by(|a, b| b.keys.cmp(&a.keys).then_with(|| a.network.cmp(&b.network)));
        all.truncate(max);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_secs(1_000 + secs)
    }

    /// An office with one busy caller is not listed; five callers that are all near their limits are.
    #[test]
    fn only_networks_whose_callers_are_all_near_are_listed() {
        let mut shared = SharedNetworkTracker::default();
        for id in 0..6 {
            shared.record("10.0.0.0/24", id, true, at(0));
            shared.record("10.0.1.0/24", id, id == 0, at(0));
            shared.record("10.0.2.0/24", id % 3, true, at(0));
        }
        let suspect = SharedNetwork { network: "10.0.0.0/24".to_owned(), keys: 6, near: 6 };
        assert_eq!(shared.top_n(at(1), 10), [suspect]);
        assert_eq!(shared.top_n(at(301), 10), [], "forgotten");
        // Memory is bounded whatever the traffic.
        for id in 0..100_000_u64 {
            shared.record(&format!("n{}", id % 5_000), id, true, at(2));
        }
        assert_eq!(shared.networks.len(), MAX_NETWORKS);
        assert!(shared.networks.values().all(|keys| keys.len() <= MAX_KEYS));
        shared.rotate(at(400));
        assert!(shared.networks.is_empty());
    }

    /// Busy networks are seen all the time: one that was near a limit once must not take the slot of one that is near now.
    #[test]
    fn networks_no_longer_near_a_limit_are_dropped() {
        let mut shared = SharedNetworkTracker::default();
        for network in 0..MAX_NETWORKS {
            shared.record(&format!("old{network}"), 1, true, at(0));
        }
        for now in [200, 400] {
            (0..MAX_NETWORKS).for_each(|network| shared.record(&format!("old{network}"), 1, false, at(now)));
            shared.rotate(at(now));
        }
        (0..5).for_each(|id| shared.record("new", id, true, at(401)));
        assert_eq!(shared.top_n(at(402), 10).len(), 1);
    }
}
