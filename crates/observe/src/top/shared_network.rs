//! Addresses that many callers share who are all near their limits: one person with many keys, or one office behind a gate.

use std::collections::HashMap;
use tollgate_core::{Span, Timestamp};

/// Networks that are watched at once, and callers in each.
const MOST: usize = 1_024;
const MOST_KEYS: usize = 64;
/// How long somebody is remembered.
const LOOK_BACK: Span = Span::from_secs(300);
/// So many callers on one network are many.
const MANY: usize = 5;

#[derive(Debug, Default)]
pub(super) struct Shared {
    networks: HashMap<String, HashMap<u64, Last>>,
    swept: Timestamp,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    seen: Timestamp,
    near: Option<Timestamp>,
}

/// A network whose callers are all near their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedAddress {
    pub(crate) network: String,
    pub(crate) keys: usize,
    pub(crate) near: usize,
}

impl Shared {
    pub(super) fn see(&mut self, network: &str, id: u64, near: bool, at: Timestamp) {
        if !self.networks.contains_key(network) {
            // Only where somebody is near is it worth the room.
            if !near || self.networks.len() >= MOST {
                return;
            }
            self.networks.insert(network.to_owned(), HashMap::new());
        }
        let Some(keys) = self.networks.get_mut(network) else { return };
        if keys.len() >= MOST_KEYS && !keys.contains_key(&id) {
            return;
        }
        let last = keys.entry(id).or_insert(Last { seen: at, near: None });
        last.seen = at;
        if near {
            last.near = Some(at);
        }
    }

    pub(super) fn turn(&mut self, now: Timestamp) {
        if now.since(self.swept) < Span::from_secs(10) {
            return;
        }
        self.swept = now;
        self.networks.retain(|_, keys| {
            keys.retain(|_, last| now.since(last.seen) <= LOOK_BACK);
            keys.values().any(|last| last.near.is_some_and(|at| now.since(at) <= LOOK_BACK))
        });
    }

    pub(super) fn told(&self, now: Timestamp, most: usize) -> Vec<SharedAddress> {
        let fresh = |at: Timestamp| now.since(at) <= LOOK_BACK;
        let counted = self.networks.iter().map(|(network, keys)| SharedAddress {
            network: network.clone(),
            keys: keys.values().filter(|last| fresh(last.seen)).count(),
            near: keys.values().filter(|last| last.near.is_some_and(fresh)).count(),
        });
        let mut all: Vec<SharedAddress> =
            counted.filter(|shared| shared.keys >= MANY && shared.near == shared.keys).collect();
        all.sort_by(|a, b| b.keys.cmp(&a.keys).then_with(|| a.network.cmp(&b.network)));
        all.truncate(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_secs(1_000 + secs)
    }

    /// An office with one busy caller is no suspicion; five callers, all near their limits, are.
    #[test]
    fn only_networks_where_all_are_near_are_told() {
        let mut shared = Shared::default();
        for id in 0..6 {
            shared.see("10.0.0.0/24", id, true, at(0));
            shared.see("10.0.1.0/24", id, id == 0, at(0));
            shared.see("10.0.2.0/24", id % 3, true, at(0));
        }
        let suspect = SharedAddress { network: "10.0.0.0/24".to_owned(), keys: 6, near: 6 };
        assert_eq!(shared.told(at(1), 10), [suspect]);
        assert_eq!(shared.told(at(301), 10), [], "forgotten");
        // Whatever comes, the memory is bounded.
        for id in 0..100_000_u64 {
            shared.see(&format!("n{}", id % 5_000), id, true, at(2));
        }
        assert_eq!(shared.networks.len(), MOST);
        assert!(shared.networks.values().all(|keys| keys.len() <= MOST_KEYS));
        shared.turn(at(400));
        assert!(shared.networks.is_empty());
    }

    /// On a busy server somebody is always there: who was near once must not take the room of those who are now.
    #[test]
    fn networks_where_nobody_is_near_any_more_make_room() {
        let mut shared = Shared::default();
        for network in 0..MOST {
            shared.see(&format!("old{network}"), 1, true, at(0));
        }
        for now in [200, 400] {
            (0..MOST).for_each(|network| shared.see(&format!("old{network}"), 1, false, at(now)));
            shared.turn(at(now));
        }
        (0..5).for_each(|id| shared.see("new", id, true, at(401)));
        assert_eq!(shared.told(at(402), 10).len(), 1);
    }
}
