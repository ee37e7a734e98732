//! Values of signals that nodes share: one record with the highest value of each signal, and until when it counts.
//!
//! A node writes only what is higher than the record has, or what the record no longer has, so that the number of writes does
//! not grow with the number of nodes.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::SharedSignal;

/// Most values in a record, and most bytes that are read.
const MAX_VALUES: usize = 1_024;
pub(super) const MAX_BYTES: usize = 256 << 10;

/// A value, and until when it counts, in microseconds of the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Value(f64, u64);

/// Values by domain and signal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Values(BTreeMap<String, BTreeMap<String, Value>>);

impl Values {
    /// Reads a record. One that cannot be read has no values.
    pub(super) fn read(record: &[u8]) -> Self {
        if record.len() > MAX_BYTES {
            return Self::default();
        }
        serde_json::from_slice(record).unwrap_or_default()
    }

    pub(super) fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Removes what no longer counts.
    pub(super) fn expire(&mut self, now: Timestamp) {
        for signals in self.0.values_mut() {
            signals.retain(|_, value| now.as_micros() < value.1);
        }
        self.0.retain(|_, signals| !signals.is_empty());
    }

    /// Adds a value that this node has reported.
    pub(super) fn add(&mut self, signal: SharedSignal, now: Timestamp) {
        let until = (now + signal.lasts).as_micros();
        self.raise(signal.domain, signal.signal, Value(signal.value, until));
    }

    /// Adds the values of `own` that are higher, or that are not here. Returns whether there are any.
    pub(super) fn merge(&mut self, own: &Self) -> bool {
        let mut has_changed = false;
        for (domain, signals) in &own.0 {
            for (signal, value) in signals {
                has_changed |= self.raise(domain.clone(), signal.clone(), *value);
            }
        }
        has_changed
    }

    fn raise(&mut self, domain: String, signal: String, value: Value) -> bool {
        let is_full = self.0.values().map(BTreeMap::len).sum::<usize>() >= MAX_VALUES;
        let known = self.0.get(&domain).and_then(|signals| signals.get(&signal));
        let is_higher = known.map_or(!is_full, |known| (known.0, known.1) < (value.0, value.1));
        if is_higher {
            self.0.entry(domain).or_default().insert(signal, value);
        }
        is_higher
    }

    /// Returns the values that this node has not recorded yet: not those that are here as `own` has written them, which it has recorded when
    /// they were reported, nor as it has `seen` them before. A report makes one step on each node.
    pub(super) fn signals(&self, own: &Self, seen: &Self) -> Vec<SharedSignal> {
        let all = self.0.iter().flat_map(|(domain, signals)| {
            let has = move |known: &Self, signal: &str, value: &Value| {
                known.0.get(domain).and_then(|known| known.get(signal)) == Some(value)
            };
            let is_new = move |(signal, value): &(&String, &Value)| {
                !has(own, signal, value) && !has(seen, signal, value)
            };
            signals.iter().filter(is_new).map(move |(signal, value)| SharedSignal {
                domain: domain.clone(),
                signal: signal.clone(),
                value: value.0,
                lasts: TimeDelta::ZERO,
            })
        });
        all.collect()
    }

    /// Returns when the last value ceases to count.
    pub(super) fn last(&self) -> Timestamp {
        let until = self.0.values().flat_map(BTreeMap::values).map(|value| value.1).max();
        Timestamp::from_micros(until.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal(name: &str, value: f64) -> SharedSignal {
        let lasts = TimeDelta::from_secs(5);
        SharedSignal { domain: "d".to_owned(), signal: name.to_owned(), value, lasts }
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_secs(1_000 + seconds)
    }

    #[test]
    fn the_highest_value_stays_until_it_expires() {
        let (mut record, mut own) = (Values::default(), Values::default());
        own.add(signal("q", 100.0), at(0));
        assert!(record.merge(&own) && !record.merge(&own), "once");
        let mut other = Values::default();
        other.add(signal("q", 40.0), at(3));
        assert!(!record.merge(&other), "a lower value is not written");
        record.expire(at(5));
        assert_eq!(record, Values::default());
        assert!(record.merge(&other), "until the higher one has expired");
        assert_eq!(
            (record.signals(&Values::default(), &Values::default())[0].value, record.last()),
            (40.0, at(8))
        );
        // The same value again lasts longer.
        other.add(signal("q", 40.0), at(4));
        assert!(record.merge(&other));
        assert_eq!(record.last(), at(9));
    }

    /// Otherwise one report would make two steps on the node that received it.
    #[test]
    fn a_node_does_not_read_its_own_value_as_that_of_another() {
        let (mut record, mut own, mut other) = (Values::default(), Values::default(), Values::default());
        own.add(signal("q", 100.0), at(0));
        record.merge(&own);
        let none = Values::default();
        assert_eq!(record.signals(&own, &none), []);
        assert_eq!(record.signals(&other, &none).len(), 1, "others do");
        let seen = record.clone();
        assert_eq!(record.signals(&other, &seen), [], "once");
        other.add(signal("q", 120.0), at(1));
        record.merge(&other);
        assert_eq!(record.signals(&own, &seen)[0].value, 120.0);
        assert_eq!(record.signals(&other, &seen), []);
        // The same value is reported again.
        let seen = record.clone();
        other.add(signal("q", 120.0), at(3));
        record.merge(&other);
        assert_eq!(record.signals(&own, &seen).len(), 1);
    }

    #[test]
    fn records_are_read_as_they_were_written_and_bounded() {
        let mut values = Values::default();
        (0..2_000).for_each(|n| values.add(signal(&format!("s{n}"), 1e300), at(0)));
        assert_eq!(values.signals(&Values::default(), &Values::default()).len(), MAX_VALUES);
        let bytes = values.write();
        assert!(bytes.len() < MAX_BYTES);
        assert_eq!(Values::read(&bytes), values);
        for wrong in [&b""[..], b"{\"d\": 1}", b"\xff", &vec![b' '; MAX_BYTES + 1]] {
            assert_eq!(Values::read(wrong), Values::default());
        }
    }
}
