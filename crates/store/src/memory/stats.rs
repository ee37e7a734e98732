//! Memory store statistics.
//!
//! Only rare events are counted (a new key, an eviction, a shared counter): a charge of a known key touches no
//! statistic. Counters are striped by name, so that threads rarely write the same cache line.

use std::sync::atomic::{AtomicU64, Ordering};

/// Statistics of the store at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Maximum bytes for counters.
    pub bytes_cap: u64,
    /// Slots of the table, 16 bytes each.
    pub slots: u64,
    /// Slots with a live counter, estimated from a sample.
    pub live: u64,
    /// New keys that got a slot.
    pub inserted: u64,
    /// New keys that got a slot whose state had expired.
    pub reused: u64,
    /// New keys that evicted a live key that had used less than half of its limit; the usage of that key is lost.
    pub evicted: u64,
    /// Charges that found no slot and went to a counter shared with other new keys of the same limit.
    pub overflowed: u64,
    /// Shared counters that were evicted for others: too many limits overflow at once.
    pub overflow_evicted: u64,
    /// Wide counters.
    pub wide: u64,
    /// Bytes of wide counters.
    pub wide_bytes: u64,
    /// Live wide counters that were evicted for new keys.
    pub wide_evicted: u64,
    /// Charges of wide counters that went to a shared counter.
    pub wide_overflowed: u64,
    /// Charges of wide counters that were denied because there was no memory left for their state.
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
    /// Counts an event of a name. Returns how many such events its stripe has seen.
    pub(super) fn record(&self, name: u64, event: Event) -> u64 {
        self.0[name as usize % STRIPES].0[event as usize].fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn total(&self, event: Event) -> u64 {
        self.0.iter().map(|stripe| stripe.0[event as usize].load(Ordering::Relaxed)).sum()
    }
}
