//! Ledger: what this process has counted for each hour, and what of it the database does not have yet. No I/O.
//!
//! A row is an absolute value with a sequence number, and is written as such. A written row of an hour that has ended is
//! dropped; should the hour be corrected later (a reservation that is settled), the correction is a row of its own,
//! with another `part`. So the ledger may forget a row at any time once it is written.
//!
//! While the database is unavailable, rows are kept up to a bound. Beyond it new callers are counted together.

use crate::billing::meter::{Entry, OTHERS};
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_replica::{KeyHash, KeyHasher};

/// Maximum number of rows.
pub(crate) const MAX_ROWS: usize = 200_000;
/// Maximum units of a row, so that sums over many rows do not overflow, and every JSON reader has the exact number.
const MAX_UNITS: i64 = 1 << 53;
/// Maximum length of a text, in characters.
const MAX_TEXT: usize = 256;
/// Display text of [`OTHERS`].
const OTHERS_TEXT: &str = "(others)";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RowKey {
    hour: i64,
    domain: Box<str>,
    rule: Box<str>,
    meter: Box<str>,
    key: Box<str>,
    caller: Box<str>,
}

#[derive(Debug)]
struct Row {
    hash: KeyHash,
    text: Box<str>,
    units: i64,
    requests: i64,
    part: i64,
    /// Number of the last change.
    seq: i64,
    /// Number of the last change that is written.
    written: i64,
}

/// A row to write.
#[derive(Clone, Debug)]
pub(crate) struct PendingRow {
    key: Arc<RowKey>,
    pub(crate) hour: i64,
    pub(crate) caller: KeyHash,
    pub(crate) caller_key: String,
    pub(crate) caller_text: String,
    pub(crate) domain: String,
    pub(crate) rule: String,
    pub(crate) meter: String,
    pub(crate) part: i64,
    pub(crate) units: i64,
    pub(crate) requests: i64,
    pub(crate) seq: i64,
}

/// Returns a caller for display, from its key and value.
pub type DisplayCaller = Box<dyn Fn(&str, &str) -> String + Send + Sync>;

/// Rows of this process.
pub(crate) struct Ledger {
    hasher: KeyHasher,
    display: DisplayCaller,
    rows: HashMap<Arc<RowKey>, Row, foldhash::fast::RandomState>,
    /// Rows that may have to be written.
    unwritten: Vec<Arc<RowKey>>,
    seq: i64,
    max_rows: usize,
    /// Units that could not be attributed to a caller.
    pub(crate) unattributed: u64,
    /// Units that were dropped because they could not be written for too long.
    pub(crate) dropped: u64,
}

impl Ledger {
    pub(crate) fn new(hasher: KeyHasher, display: DisplayCaller, max_rows: usize) -> Self {
        let (rows, unwritten) = (HashMap::default(), Vec::new());
        Self { hasher, display, rows, unwritten, seq: 0, max_rows, unattributed: 0, dropped: 0 }
    }

    /// Adds what a thread has counted.
    pub(crate) fn add(&mut self, entry: &Entry) {
        let mut key = RowKey {
            hour: entry.hour,
            domain: entry.domain.clone(),
            rule: entry.rule.clone(),
            meter: entry.meter.clone(),
            key: entry.key.clone(),
            caller: entry.caller.clone(),
        };
        // Written rows are only kept to be added to; what comes later begins a row of its own. Not while most are
        // unwritten: each caller would pass over all of them.
        if self.rows.len() >= self.max_rows && self.unwritten.len() < self.max_rows / 4 * 3 {
            self.rows.retain(|_, row| row.seq != row.written);
        }
        if self.rows.len() >= self.max_rows && !self.rows.contains_key(&key) {
            (key.key, key.caller) = (OTHERS.0.into(), OTHERS.1.into());
        }
        let is_others = (&*key.key, &*key.caller) == OTHERS;
        if is_others {
            self.unattributed = self.unattributed.saturating_add(entry.units.unsigned_abs());
        }
        self.seq += 1;
        let seq = self.seq;
        let key = Arc::new(key);
        let row = self.rows.entry(Arc::clone(&key)).or_insert_with(|| Row {
            hash: if is_others { KeyHash([0; 32]) } else { self.hasher.hash(&key.caller) },
            text: match is_others {
                true => OTHERS_TEXT.into(),
                false => clean(&(self.display)(&key.key, &key.caller)).into(),
            },
            units: 0,
            requests: 0,
            part: seq,
            seq: 0,
            written: 0,
        });
        if row.seq == row.written {
            self.unwritten.push(key);
        }
        row.seq = seq;
        row.units = row.units.saturating_add(entry.units).clamp(-MAX_UNITS, MAX_UNITS);
        row.requests = row.requests.saturating_add(entry.requests).clamp(-MAX_UNITS, MAX_UNITS);
    }

    /// Returns the number of rows that are not written.
    pub(crate) fn unwritten(&self) -> usize {
        self.unwritten.len()
    }

    /// Returns up to `limit` rows to write.
    pub(crate) fn pending(&self, limit: usize) -> Vec<PendingRow> {
        let pending = self.unwritten.iter().take(limit).filter_map(|key| {
            let row = self.rows.get(key)?;
            Some(PendingRow {
                key: Arc::clone(key),
                hour: key.hour,
                caller: row.hash,
                caller_key: clean(&key.key),
                caller_text: row.text.to_string(),
                domain: clean(&key.domain),
                rule: clean(&key.rule),
                meter: clean(&key.meter),
                part: row.part,
                units: row.units,
                requests: row.requests,
                seq: row.seq,
            })
        });
        pending.collect()
    }

    /// Records that rows are written.
    pub(crate) fn record_written(&mut self, rows: &[PendingRow]) {
        for written in rows {
            if let Some(row) = self.rows.get_mut(&written.key) {
                row.written = row.written.max(written.seq);
            }
        }
        let rows = &self.rows;
        self.unwritten.retain(|key| rows.get(key).is_some_and(|row| row.seq > row.written));
    }

    /// Drops the written rows of hours before `current`, and those before `oldest` in any case: the database would take
    /// them for hours that it has added up already.
    pub(crate) fn forget(&mut self, current: i64, oldest: i64) {
        let dropped = &mut self.dropped;
        self.rows.retain(|key, row| {
            let is_written = row.seq == row.written;
            if key.hour < oldest && !is_written {
                *dropped = dropped.saturating_add(row.units.unsigned_abs());
            }
            key.hour >= oldest && (key.hour >= current || !is_written)
        });
        let rows = &self.rows;
        self.unwritten.retain(|key| rows.contains_key(key));
    }
}

/// Returns a text that every database and reader takes: without control characters, and of bounded length.
pub(crate) fn clean(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::billing::meter::ThreadMeter;
    use tollgate_core::Timestamp;
    use tollgate_engine::{Consumption, Meter};

    fn ledger(max_rows: usize) -> Ledger {
        let display = Box::new(|key: &str, value: &str| format!("{key}={value}\0"));
        Ledger::new(KeyHasher::new(b"secret"), display, max_rows)
    }

    fn add(ledger: &mut Ledger, caller: &str, hour: u64, units: i64) {
        let meter = ThreadMeter::default();
        let at = Timestamp::from_secs(hour * 3_600 + 1);
        meter.record(&Consumption {
            domain: "d",
            rule: "r",
            meter: "cost",
            key: "k",
            caller,
            units,
            requests: 1,
            at,
        });
        meter.drain(|entry| ledger.add(entry));
    }

    /// What the database holds after these writes: the rows by key, each as last written.
    fn sum(written: &[PendingRow]) -> i64 {
        let mut rows: HashMap<(i64, String, i64), (i64, i64)> = HashMap::new();
        for row in written {
            let kept = rows.entry((row.hour, row.caller_text.clone(), row.part)).or_default();
            if kept.0 < row.seq {
                *kept = (row.seq, row.units);
            }
        }
        rows.values().map(|(_, units)| units).sum()
    }

    #[test]
    fn repeated_and_reordered_writes_count_once() {
        let (mut ledger, mut written) = (ledger(100), Vec::new());
        add(&mut ledger, "a", 5, 10);
        let lost = ledger.pending(100);
        add(&mut ledger, "a", 5, -4);
        add(&mut ledger, "b", 5, 1);
        let batch = ledger.pending(100);
        assert_eq!(batch.len(), 2);
        written.extend(batch.clone());
        written.extend(batch.clone());
        // The first write arrives last.
        written.extend(lost);
        ledger.record_written(&batch);
        assert_eq!((ledger.unwritten(), sum(&written)), (0, 7));
        // The hour has ended and is forgotten; a correction of it is a row of its own.
        ledger.forget(6 * 3_600, 0);
        assert!(ledger.rows.is_empty());
        add(&mut ledger, "a", 5, -2);
        written.extend(ledger.pending(100));
        assert_eq!(sum(&written), 5);
        assert_eq!(written[0].caller_text, "k=a", "no control characters");
    }

    #[test]
    fn an_outage_takes_bounded_memory_and_no_unit() {
        let (mut ledger, mut written) = (ledger(3), Vec::new());
        for n in 0..10 {
            add(&mut ledger, &format!("caller {n}"), 5, 1);
        }
        add(&mut ledger, "caller 0", 5, 1);
        ledger.forget(9 * 3_600, 0);
        assert_eq!((ledger.rows.len(), ledger.unattributed), (4, 7));
        let batch = ledger.pending(2);
        assert_eq!(batch.len(), 2);
        ledger.record_written(&batch);
        written.extend(batch);
        assert_eq!(ledger.unwritten(), 2);
        written.extend(ledger.pending(100));
        assert_eq!(sum(&written), 11);
        assert!(written.iter().any(|row| row.caller_text == OTHERS_TEXT && row.units == 7));
        // Too old to be written.
        ledger.forget(9 * 3_600, 6 * 3_600);
        assert_eq!((ledger.unwritten(), ledger.rows.len()), (0, 0));
        assert!(ledger.dropped > 0);
    }
}
