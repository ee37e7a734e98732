//! Kept consumption: what this process has counted of each counter and slot, and what of it the database does not have
//! yet. No I/O.
//!
//! A row is an absolute value with a sequence number; the database takes the one with the greater number. A written row
//! may be forgotten to make room: what comes later begins a row of its own, with another `part`, and readers add the
//! parts. While the database is unavailable rows are kept and merged up to a bound; beyond it the smallest of a few
//! gives way and is counted.

use super::CounterDigest;
use super::slots::Slot;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use tollgate_core::Timestamp;

/// Number of rows compared when one must give way.
const SAMPLE: usize = 8;
/// Maximum units of a row, so that sums over many rows do not overflow.
const MAX_UNITS: i64 = 1 << 53;

type Key = (CounterDigest, Timestamp);

/// A row of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurableRow {
    /// Counter.
    pub counter: CounterDigest,
    /// Start of the slot.
    pub slot: Timestamp,
    /// Distinguishes rows of one process about the same counter and slot; readers add them.
    pub part: i64,
    /// Units that requests of this process have taken, less refunds.
    pub units: i64,
    /// Units that other cells have reported to this process.
    pub reported: i64,
    /// Last use.
    pub last_at: Timestamp,
    /// Instant from which the row no longer counts.
    pub expires: Timestamp,
    /// Number of the last change; of two values of a row, the one with the greater number is right.
    pub seq: i64,
}

impl DurableRow {
    fn size(&self) -> u64 {
        self.units.unsigned_abs().saturating_add(self.reported.unsigned_abs())
    }
}

#[derive(Debug)]
struct Entry {
    row: DurableRow,
    written: i64,
    /// By how much the units and those that others have reported are rounded up. Without it each reservation that is
    /// canceled a moment later would count as a unit.
    rounded_up: (u32, u32),
}

/// Adds parts of a unit, of which this many are one, to units that are rounded up by a fraction of one, in 2^32ths.
fn add(units: &mut i64, rounded_up: &mut u32, more: i64, parts: u64) {
    let fractions = (i128::from(more) << u32::BITS) / i128::from(parts.max(1));
    let exact = (i128::from(*units) << u32::BITS) - i128::from(*rounded_up) + fractions;
    let most = i128::from(MAX_UNITS) << u32::BITS;
    let exact = exact.clamp(-most, most);
    let whole = -(-exact >> u32::BITS);
    *units = whole as i64;
    *rounded_up = ((whole << u32::BITS) - exact) as u32;
}

/// Rows of this process.
#[derive(Debug)]
pub struct Kept {
    entries: HashMap<Key, Entry, RandomState>,
    /// Rows that may have to be written.
    unwritten: Vec<Key>,
    seq: i64,
    most: usize,
    dropped: u64,
}

impl Kept {
    /// Creates it for at most this many rows.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { entries: HashMap::default(), unwritten: Vec::new(), seq: 0, most: most.max(1), dropped: 0 }
    }

    /// Adds what was consumed of a counter at `now`: units of this process, and those that other cells have reported.
    pub fn add(&mut self, counter: CounterDigest, slot: Slot, units: (i64, i64), now: Timestamp) {
        self.add_parts(counter, slot, units, 1, now);
    }

    /// The same in parts of a unit, of which this many are one: refunds of buckets are. A row has whole units, rounded up.
    pub fn add_parts(
        &mut self,
        counter: CounterDigest,
        slot: Slot,
        (units, reported): (i64, i64),
        parts: u64,
        now: Timestamp,
    ) {
        let key = (counter, slot.start);
        let size = units.unsigned_abs().saturating_add(reported.unsigned_abs()) / parts.max(1);
        if !self.entries.contains_key(&key) && !self.make_room(size) {
            return;
        }
        self.seq += 1;
        let seq = self.seq;
        let entry = self.entries.entry(key).or_insert_with(|| Entry {
            row: DurableRow {
                counter,
                slot: slot.start,
                part: seq,
                units: 0,
                reported: 0,
                last_at: now,
                expires: slot.expires,
                seq: 0,
            },
            written: 0,
            rounded_up: (0, 0),
        });
        if entry.row.seq == entry.written {
            self.unwritten.push(key);
        }
        let Entry { row, rounded_up, .. } = entry;
        row.seq = seq;
        add(&mut row.units, &mut rounded_up.0, units, parts);
        add(&mut row.reported, &mut rounded_up.1, reported, parts);
        row.last_at = row.last_at.max(now);
        row.expires = row.expires.max(slot.expires);
    }

    /// Makes room for a row of this size. Returns whether there is.
    fn make_room(&mut self, size: u64) -> bool {
        if self.entries.len() < self.most {
            return true;
        }
        // Written rows are only kept to be added to. Not while most are unwritten: each new row would pass over all.
        if self.unwritten.len() < self.most / 4 * 3 {
            self.entries.retain(|_, entry| entry.row.seq != entry.written);
        }
        if self.entries.len() < self.most {
            return true;
        }
        let smallest = self.entries.iter().take(SAMPLE).map(|(key, entry)| (entry.row.size(), *key)).min();
        match smallest {
            Some((less, key)) if less < size => {
                self.entries.remove(&key);
                self.unwritten.retain(|waiting| *waiting != key);
                self.dropped = self.dropped.saturating_add(less);
                true
            }
            _ => {
                self.dropped = self.dropped.saturating_add(size);
                false
            }
        }
    }

    /// Returns up to `limit` rows to write.
    #[must_use]
    pub fn pending(&self, limit: usize) -> Vec<DurableRow> {
        let rows = self.unwritten.iter().take(limit).filter_map(|key| self.entries.get(key));
        rows.map(|entry| entry.row.clone()).collect()
    }

    /// Records that rows are written.
    pub fn record_written(&mut self, rows: &[DurableRow]) {
        for row in rows {
            if let Some(entry) = self.entries.get_mut(&(row.counter, row.slot))
                && entry.row.part == row.part
            {
                entry.written = entry.written.max(row.seq);
            }
        }
        // What has changed again waits behind the others.
        let first = rows.len().min(self.unwritten.len());
        self.unwritten.rotate_left(first);
        self.forget_written();
    }

    /// Drops rows that no longer count at `now`.
    pub fn forget(&mut self, now: Timestamp) {
        self.entries.retain(|_, entry| entry.row.expires > now);
        self.forget_written();
    }

    fn forget_written(&mut self) {
        let entries = &self.entries;
        self.unwritten.retain(|key| entries.get(key).is_some_and(|entry| entry.row.seq > entry.written));
    }

    /// Returns the number of rows that are not written.
    #[must_use]
    pub fn unwritten(&self) -> usize {
        self.unwritten.len()
    }

    /// Returns the number of rows in memory.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the units that were dropped because there were too many unwritten rows.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }
}
