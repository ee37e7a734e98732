//! Hot counters of a fleet: which counters are so busy that every process should lease them. A server collects what it and
//! the programs that follow it find hot, and hands all of it to each of them. A counter travels as a keyed hash of its scope
//! and values, which only processes of the same installation can compute.
//!
//! A report counts for [`HOT_LIFETIME`]; who still finds the counter hot repeats it. The table is bounded by [`MAX_HOT`], the
//! busiest counters first. Rejected: sending differences, which would need an order of all reports; the whole list is small.

use crate::key_hash::KeyHasher;
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use tollgate_core::{CounterKey, KeyPart, StableHasher, TimeDelta, Timestamp};

/// Maximum number of counters in a report, and in the list.
pub const MAX_HOT: usize = 1_000;

/// How long a counter stays in the list after the last report of it.
pub const HOT_LIFETIME: TimeDelta = TimeDelta::from_secs(10);

/// Names counters alike in every process of an installation.
#[derive(Clone)]
pub struct CounterHasher(hmac::Key);

impl CounterHasher {
    /// Creates the hasher of the installation whose API keys `keys` hashes.
    #[must_use]
    pub fn new(keys: &KeyHasher) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, &keys.counter_secret()))
    }

    /// Returns the name of a counter.
    #[must_use]
    pub fn name(&self, key: &CounterKey<'_>) -> u64 {
        let mut signing = hmac::Context::with_key(&self.0);
        let mut field = |kind: u8, bytes: &[u8]| {
            signing.update(&[kind]);
            signing.update(&(bytes.len() as u64).to_le_bytes());
            signing.update(bytes);
        };
        field(b's', key.scope.label().as_bytes());
        for part in key.parts {
            match part {
                KeyPart::Text(text) | KeyPart::Secret(text) => field(b't', text.as_bytes()),
                KeyPart::Network { address, prefix } => {
                    field(b'n', &address.to_be_bytes());
                    field(b'p', &[*prefix]);
                }
            }
        }
        u64::from_le_bytes(signing.sign().as_ref()[..8].try_into().unwrap_or_default())
    }
}

impl fmt::Debug for CounterHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CounterHasher")
    }
}

/// What a process finds hot by its own traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotReport {
    /// Names of counters, and their units per second at this process.
    pub hot: Vec<(u64, u64)>,
}

/// What all processes find hot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotNames {
    /// Names of counters, in ascending order.
    pub hot: Vec<u64>,
}

impl HotNames {
    /// Returns a number that differs between different lists, and is the same on every node.
    #[must_use]
    pub fn version(&self) -> u64 {
        let mut hasher = StableHasher::default();
        self.hot.iter().for_each(|name| hasher.number(*name));
        hasher.finish()
    }
}

/// The hot counters that a server knows of.
#[derive(Debug, Default)]
pub struct HotTable(Mutex<HashMap<u64, HotEntry>>);

#[derive(Clone, Copy, Debug)]
struct HotEntry {
    rate: u64,
    until: Timestamp,
}

impl HotTable {
    /// Records what a process finds hot.
    pub fn record(&self, reported: impl IntoIterator<Item = (u64, u64)>, now: Timestamp) {
        let until = now + HOT_LIFETIME;
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.extend(reported.into_iter().take(MAX_HOT).map(|(name, rate)| (name, HotEntry { rate, until })));
        if table.len() > MAX_HOT {
            table.retain(|_, entry| now < entry.until);
        }
        if table.len() > MAX_HOT {
            let mut ranks: Vec<(Reverse<u64>, u64)> =
                table.iter().map(|(name, entry)| (Reverse(entry.rate), *name)).collect();
            ranks.sort_unstable();
            ranks[MAX_HOT..].iter().for_each(|(_, name)| {
                table.remove(name);
            });
        }
    }

    /// Returns the busiest counters and their units per second.
    #[must_use]
    pub fn busiest(&self, max: usize, now: Timestamp) -> Vec<(u64, u64)> {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let live = table.iter().filter(|(_, entry)| now < entry.until);
        let mut all: Vec<(u64, u64)> = live.map(|(name, entry)| (*name, entry.rate)).collect();
        all.sort_unstable_by_key(|(name, rate)| (Reverse(*rate), *name));
        all.truncate(max);
        all
    }

    /// Returns the names of all counters that are hot.
    #[must_use]
    pub fn names(&self, now: Timestamp) -> HotNames {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.retain(|_, entry| now < entry.until);
        let mut hot: Vec<u64> = table.keys().copied().collect();
        hot.sort_unstable();
        HotNames { hot }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::Scope;

    const START: Timestamp = Timestamp::from_secs(1_000);

    #[test]
    fn a_counter_is_hot_until_nobody_reports_it() {
        let table = HotTable::default();
        table.record([(7, 2_000)], START);
        table.record([(9, 3_000)], START + TimeDelta::from_secs(4));
        assert_eq!(table.names(START + TimeDelta::from_secs(4)).hot, [7, 9]);
        let later = START + HOT_LIFETIME;
        assert_eq!(table.names(later).hot, [9], "the first report has expired");
        table.record([(9, 3_000)], later);
        assert_eq!(table.names(later + TimeDelta::from_secs(9)).hot, [9]);
        assert!(table.names(later + HOT_LIFETIME).hot.is_empty());
    }

    /// A fleet with more hot keys than fit must lease those that load the store most.
    #[test]
    fn the_busiest_counters_have_a_place() {
        let table = HotTable::default();
        for part in 0..3_u64 {
            table.record((0..1_000).map(|at| (part * 1_000 + at, 10_000 + (at * 3 + part))), START);
        }
        let names = table.names(START).hot;
        assert_eq!(names.len(), MAX_HOT);
        let rate = |name: u64| 10_000 + (name % 1_000) * 3 + name / 1_000;
        assert!(names.iter().all(|name| rate(*name) >= 12_000), "{names:?}");
        // One report alone is bounded too.
        let table = HotTable::default();
        table.record((0..5_000).map(|name| (name, 1)), START);
        assert_eq!(table.names(START).hot.len(), MAX_HOT);
    }

    #[test]
    fn a_list_has_a_version_of_its_own() {
        let lists = [vec![], vec![1], vec![2], vec![1, 2]].map(|hot| HotNames { hot }.version());
        let apart: std::collections::HashSet<u64> = lists.into_iter().collect();
        assert_eq!(apart.len(), 4);
    }

    /// A name tells nothing without the secret, and never joins two counters.
    #[test]
    fn names_are_of_one_counter_and_one_installation() {
        let [own, other] =
            [b"one".as_slice(), b"two"].map(|secret| CounterHasher::new(&KeyHasher::new(secret)));
        let [scope, second] = ["api|user", "api|tenant"].map(Scope::new);
        let name = |hasher: &CounterHasher, scope: &Scope, parts: &[KeyPart<'_>]| {
            hasher.name(&CounterKey { scope, parts })
        };
        let ann = [KeyPart::Text("ann")];
        assert_eq!(name(&own, &scope, &ann), name(&own, &scope, &ann));
        let network = |prefix| [KeyPart::Network { address: 1, prefix }];
        let all = [
            name(&own, &scope, &ann),
            name(&other, &scope, &ann),
            name(&own, &second, &ann),
            name(&own, &scope, &[]),
            name(&own, &scope, &[KeyPart::Text("a"), KeyPart::Text("nn")]),
            name(&own, &scope, &network(128)),
            name(&own, &scope, &network(64)),
        ];
        let apart: std::collections::HashSet<u64> = all.into_iter().collect();
        assert_eq!(apart.len(), all.len());
    }
}
