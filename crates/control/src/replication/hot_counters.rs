//! Hot counters as a node knows them: what it and its followers report, and what other nodes of the database report.

use serde_json::Value;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tokio::sync::Notify;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_replica::{HOT_LIFETIME, HotNames, HotTable, MAX_HOT};

/// Maximum number of counters in a heartbeat.
pub(crate) const MAX_IN_HEARTBEAT: usize = 100;
/// Time after which a program that has not reported is no longer there.
const FOLLOWER_LIFETIME: TimeDelta = TimeDelta::from_secs(60);

/// What is known of hot counters.
#[derive(Debug, Default)]
pub(crate) struct HotCounters {
    /// Reports of this node and its followers.
    pub(crate) near: HotTable,
    /// What other nodes have reported, and when it was read.
    peers: Mutex<(Vec<u64>, Timestamp)>,
    /// Time of a follower's last report, in microseconds.
    followed_at: AtomicU64,
    /// The heartbeat is out of date.
    pub(crate) changed: Notify,
}

impl HotCounters {
    pub(crate) fn record_follower(&self, reported: impl IntoIterator<Item = (u64, u64)>, now: Timestamp) {
        self.followed_at.store(now.as_micros(), Ordering::Relaxed);
        self.near.record(reported, now);
    }

    /// Returns whether a follower has reported lately.
    pub(crate) fn has_followers(&self, now: Timestamp) -> bool {
        let last = Timestamp::from_micros(self.followed_at.load(Ordering::Relaxed));
        now.since(last) < FOLLOWER_LIFETIME
    }

    /// Returns the counters that are hot anywhere, those near this node first if there are too many.
    pub(crate) fn names(&self, now: Timestamp) -> HotNames {
        let mut names = self.near.names(now);
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if now.since(peers.1) < HOT_LIFETIME {
            let room = MAX_HOT.saturating_sub(names.hot.len());
            let others = peers.0.iter().filter(|name| names.hot.binary_search(name).is_err());
            let others: Vec<u64> = others.copied().take(room).collect();
            names.hot.extend(others);
            names.hot.sort_unstable();
            names.hot.dedup();
        }
        names
    }

    /// Replaces what other nodes have reported.
    pub(crate) fn replace_peers(&self, names: Vec<u64>, now: Timestamp) {
        *self.peers.lock().unwrap_or_else(PoisonError::into_inner) = (names, now);
    }

    /// Adds this node's reports to its heartbeat.
    pub(crate) fn add_to(&self, heartbeat: &mut Value, now: Timestamp) {
        let hot = self.near.busiest(MAX_IN_HEARTBEAT, now);
        if let (false, Some(heartbeat)) = (hot.is_empty(), heartbeat.as_object_mut()) {
            heartbeat.insert("hot".to_owned(), serde_json::json!(hot));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const START: Timestamp = Timestamp::from_secs(1_000);

    /// A counter that two nodes told each other of would otherwise be hot for ever.
    #[test]
    fn what_peers_report_is_not_reported_again() {
        let counters = HotCounters::default();
        counters.replace_peers(vec![3, 1], START);
        let mut heartbeat = json!({"name": "a"});
        counters.add_to(&mut heartbeat, START);
        assert_eq!(heartbeat, json!({"name": "a"}));
        counters.near.record([(2, 900), (1, 500)], START);
        counters.add_to(&mut heartbeat, START);
        assert_eq!(heartbeat, json!({"name": "a", "hot": [[2, 900], [1, 500]]}));
        assert!(heartbeat.to_string().contains("\"hot\":[["), "the statement finds it");
        assert_eq!(counters.names(START).hot, [1, 2, 3]);
        let later = START + HOT_LIFETIME;
        assert_eq!(counters.names(later - TimeDelta::from_micros(1)).hot, [1, 2, 3]);
        assert!(counters.names(later).hot.is_empty());
    }

    #[test]
    fn the_list_is_bounded_and_this_node_goes_first() {
        let counters = HotCounters::default();
        counters.near.record((0..900).map(|name| (name, 1)), START);
        counters.replace_peers((850..2_000).collect(), START);
        let names = counters.names(START).hot;
        assert_eq!(names, (0..1_000).collect::<Vec<u64>>());
    }
}
