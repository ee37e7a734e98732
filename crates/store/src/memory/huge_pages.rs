//! Huge pages for the table.
//!
//! Keys fall on random pages: with huge pages from the start, a few hundred keys would make half a gigabyte resident;
//! with small pages throughout, every decision over millions of keys walks the page table. So the table starts on small
//! pages. When it has inserted a new key for every other small page (all of which are then touched, or soon will be),
//! huge pages are requested for the rest, and existing pages are collapsed, two megabytes at a time, by the requests
//! that insert new keys. Each such step takes about a tenth of a millisecond, and there is one for every two megabytes
//! once in the life of the store. A separate thread was rejected: a library should not start threads to save so little.

use super::cache_lines::MmapLines;
use super::packed_counters::PackedCounters;
use super::stats::Event;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// When to use huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HugePages {
    /// Once there are keys on most small pages. A small server stays small.
    #[default]
    WhenDense,
    /// From the start: the full cap is resident after a few hundred keys.
    Always,
    /// Never.
    Never,
}

const SMALL_PAGE: usize = 4096;
/// New keys between two checks.
const PACE: u64 = 32;

pub(super) struct Pages {
    /// Number of new keys at which the table counts as dense; `u64::MAX` once no work is left.
    dense_at: AtomicU64,
    /// Index of the next two megabytes to collapse.
    next: AtomicUsize,
    /// New keys since the last check.
    pace: AtomicU64,
}

impl Pages {
    pub(super) fn new(when: HugePages, lines: &MmapLines) -> Self {
        let dense = (lines.bytes() / SMALL_PAGE / 2) as u64;
        let dense_at = match when {
            HugePages::WhenDense => dense,
            HugePages::Always => {
                lines.prefer_huge();
                u64::MAX
            }
            HugePages::Never => u64::MAX,
        };
        Self { dense_at: AtomicU64::new(dense_at), next: AtomicUsize::new(0), pace: AtomicU64::new(0) }
    }

    /// Advances the use of huge pages; called when new keys may have been inserted.
    #[inline]
    pub(super) fn grown(&self, counters: &PackedCounters<MmapLines>) {
        if self.dense_at.load(Ordering::Relaxed) != u64::MAX {
            self.step(counters);
        }
    }

    #[cold]
    fn step(&self, counters: &PackedCounters<MmapLines>) {
        if !self.pace.fetch_add(1, Ordering::Relaxed).is_multiple_of(PACE) {
            return;
        }
        if counters.counts.total(Event::Inserted) < self.dense_at.load(Ordering::Relaxed) {
            return;
        }
        let lines = counters.keys.lines();
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        let more = if next == 0 { lines.prefer_huge() } else { lines.collapse(next - 1) };
        if !more {
            self.dense_at.store(u64::MAX, Ordering::Relaxed);
        }
    }
}
