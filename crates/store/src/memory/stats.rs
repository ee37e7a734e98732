//! Memory store statistics.
//!
//! Only what is out of the ordinary is counted (a newcomer, an eviction, a shared counter): a charge of a known key
//! touches none of it. Counters are striped by name, so that threads seldom write the same line.

use std::sync::atomic::{AtomicU64, Ordering};

/// A snapshot of the store's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The most bytes that counters can take.
    pub bytes_cap: u64,
    /// Slots of the table, each 16 bytes.
    pub slots: u64,
    /// Slots that hold a live counter, estimated from a sample.
    pub live: u64,
    /// Newcomers that got a slot.
    pub inserted: u64,
    /// Of these, into a slot whose state had expired.
    pub reused: u64,
    /// Of these, into a slot of a live key that had used less than half of its limit, and has now forgotten it.
    pub evicted: u64,
    /// Charges that found no slot and went to a counter shared with other newcomers of the same limit.
    pub overflowed: u64,
    /// Shared counters that were given up for others: too many limits overflow at once.
    pub overflow_evicted: u64,
    /// Counters that live aside.
    pub wide: u64,
    /// Bytes that they take.
    pub wide_bytes: u64,
    /// Live counters aside that were given up for newcomers.
    pub wide_evicted: u64,
    /// Charges aside that went to a shared counter.
    pub wide_overflowed: u64,
    /// Charges aside that were denied because there was no memory left for what they would add.
    pub wide_denied: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    Inserted,
    Reused,
    Evicted,
    Overflowed,
    WideEvicted,
    WideOverflowed,
    WideDenied,
}

const EVENTS: usize = 8;
const STRIPES: usize = 16;

#[derive(Default)]
#[repr(align(64))]
struct Stripe([AtomicU64; EVENTS]);

#[derive(Default)]
pub(super) struct Counts([Stripe; STRIPES]);

impl Counts {
    /// Counts an event of a name; returns how often its stripe has seen it.
    pub(super) fn record(&self, name: u64, event: Event) -> u64 {
        self.0[name as usize % STRIPES].0[event as usize].fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn total(&self, event: Event) -> u64 {
        self.0.iter().map(|stripe| stripe.0[event as usize].load(Ordering::Relaxed)).sum()
    }
}
