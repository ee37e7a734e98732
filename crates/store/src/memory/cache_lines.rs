//! Cache-line storage under the table, and the only unsafe code of this crate.
//!
//! Slots of 16 bytes, four to a line of 64, in one anonymous mapping: pages that no key has touched cost nothing. A
//! slot changes only by one 128-bit compare-exchange. It is read as two 64-bit loads, because a 128-bit load is itself
//! a locked instruction on processors that do not promise more; the two halves may then be of different instants
//! (torn). A write compares both halves, so it fails after a torn reading; a read without a write reads the meta again.
//!
//! Huge pages save a page walk per decision, but a table with random access on huge pages is resident after a few
//! hundred keys. So they are requested when the table has become dense enough to touch most small pages anyway. A mutex
//! per line was rejected (a preempted holder blocks its neighbors), as was a seqlock (two writes per charge).

#![allow(unsafe_code, reason = "the named home of unsafe code; each use carries its proof")]

use super::slot::SlotValue;
use memmap2::MmapMut;
use portable_atomic::AtomicU128;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots per line.
pub(super) const SLOTS: usize = 4;
/// Bytes per line.
pub(super) const LINE: usize = 64;
const HUGE: usize = 2 << 20;

/// Storage interface of the table. The model checker has its own implementation.
pub(super) trait LineStorage {
    /// Returns the four metas of a line.
    fn metas(&self, line: usize) -> [u64; SLOTS];
    /// Reads one slot, possibly torn.
    fn read(&self, at: usize) -> SlotValue;
    /// Returns the meta of one slot.
    fn meta(&self, at: usize) -> u64;
    /// Replaces `seen` by `new`. Returns false if the slot no longer holds `seen`.
    fn replace(&self, at: usize, seen: SlotValue, new: SlotValue) -> bool;
    /// Replaces the word of `seen` by `word`, whatever the meta is by now. Returns false if the word has changed.
    fn replace_word(&self, at: usize, seen: SlotValue, word: u64) -> bool;
    /// Prefetches a line.
    fn prefetch(&self, line: usize);
    /// Yields to a thread that has to finish its change first.
    fn relax(&self);
}

/// Lines in a private anonymous mapping.
pub(super) struct MmapLines {
    base: *mut AtomicU128,
    lines: usize,
    /// Owner of the memory; accessed only through `base`.
    _map: MmapMut,
}

// SAFETY: `base` points into `_map`, which moves with the struct but whose pages stay, and all access to it is atomic.
unsafe impl Send for MmapLines {}
// SAFETY: as above: shared access is atomic loads and compare-exchanges only.
unsafe impl Sync for MmapLines {}

impl MmapLines {
    pub(super) fn new(lines: usize) -> std::io::Result<Self> {
        let mut map = MmapMut::map_anon(lines * LINE)?;
        // A mapping starts on a page, so every slot is aligned to its 16 bytes.
        let base = map.as_mut_ptr().cast::<AtomicU128>();
        Ok(Self { base, lines, _map: map })
    }

    #[inline]
    fn slot(&self, at: usize) -> &AtomicU128 {
        debug_assert!(at < self.lines * SLOTS);
        // SAFETY: callers take `at` from a line below `lines` (the table computes it by a reduction to that range and
        // allocates its window beyond it); the mapping is `lines * 64` bytes, zeroed, aligned, and lives as long as
        // self; all bit patterns are valid; no `&mut` to it is ever created.
        unsafe { &*self.base.add(at) }
    }

    /// Returns one half of a slot as an atomic of its own. `HALF` is 0 for the lower 64 bits.
    #[cfg(not(miri))]
    #[inline]
    fn half_cell<const HALF: usize>(&self, at: usize) -> &AtomicU64 {
        let half = if cfg!(target_endian = "little") { HALF } else { 1 - HALF };
        let halves = std::ptr::from_ref(self.slot(at)).cast::<AtomicU64>();
        // SAFETY: in bounds and aligned as the slot is. The language does not define accesses of two sizes to the same
        // memory between two of its own atomics; the 128-bit side is machine code (`lock cmpxchg16b`, `casp`, an
        // exclusive pair) or, where there is none, 64-bit atomics under a lock, and every machine that has it keeps
        // concurrent aligned 64-bit accesses single-copy atomic. A pair of loads may see any two instants of the slot,
        // which the table allows for.
        unsafe { &*halves.add(half) }
    }

    /// Loads one half of a slot.
    #[inline]
    fn half<const HALF: usize>(&self, at: usize) -> u64 {
        #[cfg(miri)]
        return (self.slot(at).load(Ordering::SeqCst) >> (64 * HALF)) as u64;
        #[cfg(not(miri))]
        self.half_cell::<HALF>(at).load(Ordering::SeqCst)
    }

    /// Requests huge pages from now on, for memory that is not yet touched.
    pub(super) fn prefer_huge(&self) -> bool {
        self.advise(0, self.lines * LINE, Advice::Prefer)
    }

    /// Collapses the `n`-th two megabytes into a huge page, if the system can. Returns false when there are no more.
    pub(super) fn collapse(&self, n: usize) -> bool {
        let base = self.base as usize;
        let start = base.next_multiple_of(HUGE) - base + n * HUGE;
        let within = start + HUGE <= self.lines * LINE;
        // Two megabytes that are untouched cannot be collapsed, and will be huge when they are touched.
        if within {
            self.advise(start, HUGE, Advice::Collapse);
        }
        within
    }

    pub(super) fn bytes(&self) -> usize {
        self.lines * LINE
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    fn advise(&self, start: usize, length: usize, advice: Advice) -> bool {
        let advice = match advice {
            Advice::Prefer => libc::MADV_HUGEPAGE,
            Advice::Collapse => MADV_COLLAPSE,
        };
        // SAFETY: the range lies in our mapping; both advices preserve its contents.
        unsafe { libc::madvise(self.base.cast::<u8>().add(start).cast(), length, advice) == 0 }
    }

    #[cfg(not(all(target_os = "linux", not(miri))))]
    fn advise(&self, _: usize, _: usize, _: Advice) -> bool {
        false
    }
}

/// Linux's number, the same on every machine. `libc` has it for glibc alone; static builds use musl.
#[cfg(all(target_os = "linux", not(miri)))]
const MADV_COLLAPSE: libc::c_int = 25;

#[derive(Clone, Copy)]
enum Advice {
    Prefer,
    Collapse,
}

/// Starts reading the first cache line of a value, so that it is near when it is needed; no effect where the processor's
/// instruction is not known.
///
/// ```
/// let counters = [0_u64; 8];
/// tollgate_store::prefetch(&counters[0]);
/// ```
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, for memory that a reference shows to be there.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

impl LineStorage for MmapLines {
    #[inline]
    fn metas(&self, line: usize) -> [u64; SLOTS] {
        let at = line * SLOTS;
        [self.half::<1>(at), self.half::<1>(at + 1), self.half::<1>(at + 2), self.half::<1>(at + 3)]
    }

    #[inline]
    fn read(&self, at: usize) -> SlotValue {
        // The word first: see `Table::find`.
        let word = self.half::<0>(at);
        SlotValue { meta: self.half::<1>(at), word }
    }

    #[inline]
    fn meta(&self, at: usize) -> u64 {
        self.half::<1>(at)
    }

    #[inline]
    fn replace(&self, at: usize, seen: SlotValue, new: SlotValue) -> bool {
        let whole = |slot: SlotValue| u128::from(slot.meta) << 64 | u128::from(slot.word);
        // Sequentially consistent: "no slot of one name twice" rests on one order of all writes (see `table`).
        self.slot(at).compare_exchange(whole(seen), whole(new), Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    #[inline]
    fn replace_word(&self, at: usize, seen: SlotValue, word: u64) -> bool {
        // Where the 128-bit side takes a lock, a concurrent 64-bit exchange outside the lock would be lost.
        #[cfg(not(miri))]
        if AtomicU128::is_always_lock_free() {
            let cell = self.half_cell::<0>(at);
            return cell.compare_exchange(seen.word, word, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        }
        self.replace(at, seen, SlotValue { word, ..seen })
    }

    #[inline]
    fn prefetch(&self, line: usize) {
        prefetch(self.slot(line * SLOTS));
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}
