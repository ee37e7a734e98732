//! Lock-free hash table of counters in fixed memory, whose slots free themselves.
//!
//! A name's home line and the few lines after it are its window; it lives in one slot of its window and never moves. A
//! filled slot is found by its fingerprint, also when it has expired: an expired state is as good as none.
//!
//! **A name is never in two filled slots.** Two threads that miss the same name would each fill a slot of their own
//! choice. So a new key first *reserves* a slot (one compare-exchange, with a number never used before), then scans the
//! window once more, and only then fills the slot (another compare-exchange, from that very reservation). In the second
//! scan a filled slot of the name makes it withdraw, and another thread's reservation of the name is canceled. Proof:
//! let x and y be filled, x reserved before y. y's second scan came after x was reserved, so it saw x filled (y
//! withdraws), x reserved (y cancels it, and x's filling fails, since no later reservation has its number), or x gone
//! (its filling fails). So one of them is not filled. This needs one order of all writes and scans: they are
//! sequentially consistent. No thread waits for another that has stopped; `loom_model` checks it all with loom.
//!
//! **A full window** gives up a slot that has expired; otherwise the one whose key has used least of its limit, if that
//! is below the protection threshold; otherwise none, and the insertion fails.
//!
//! Rejected: moving slots (cuckoo, robin hood), because a key in flight is in two places or none; a lock per line, see
//! `cache_lines`.

use super::cache_lines::{LineStorage, SLOTS};
use super::slot::{SlotValue, fingerprint, has_fingerprint, is_filled_with};
use super::stats::{Counts, Event};
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::Timestamp;

/// Lines per window. Of a million keys in a table of two million slots, with four lines 1,181 found no free slot and
/// evicted another; with six, 122. A known key is in its home line nine times out of ten, so only new keys pay for
/// more.
pub(super) const WINDOW: usize = 6;

pub(super) struct Table<L> {
    lines: L,
    /// Number of home lines; the mapping has `window - 1` more.
    homes: usize,
    window: usize,
    /// Minimum pressure of keys that are not evicted while they live.
    protected: u16,
    reservations: AtomicU64,
}

/// Result of inserting a new key into its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Insertion {
    /// Inserted into this slot.
    Filled(usize),
    /// Another thread was faster, perhaps with the same name: the lookup must be repeated.
    Raced,
    /// Every slot of the window is protected.
    Full,
}

impl<L: LineStorage> Table<L> {
    /// Creates a table over all of `lines`, of which there are `count`.
    pub(super) fn new(lines: L, count: usize, mark: u16) -> Self {
        let window = WINDOW.min(count);
        Self { lines, homes: count + 1 - window, window, protected: mark, reservations: AtomicU64::new(1) }
    }

    pub(super) fn slots(&self) -> usize {
        (self.homes + self.window - 1) * SLOTS
    }

    pub(super) fn lines(&self) -> &L {
        &self.lines
    }

    /// Returns the home line: the upper bits of the name, scaled to the number of home lines. No power of two is
    /// needed, so the table fills its cap.
    #[inline]
    fn home(&self, name: u64) -> usize {
        ((u128::from(name) * self.homes as u128) >> 64) as usize
    }

    #[inline]
    pub(super) fn prefetch(&self, name: u64) {
        self.lines.prefetch(self.home(name));
    }

    /// Returns the filled slot of a name.
    #[inline(always)]
    pub(super) fn find(&self, name: u64) -> Option<(usize, SlotValue)> {
        let home = self.home(name);
        match self.find_in(home, fingerprint(name)) {
            Some(found) => Some(found),
            None => self.find_beyond(home, name),
        }
    }

    #[inline(always)]
    fn find_in(&self, line: usize, fingerprint: u64) -> Option<(usize, SlotValue)> {
        let metas = self.lines.metas(line);
        // All four are compared before the one branch: which slot matches cannot be predicted.
        let mut matches = 0_u32;
        for (slot, meta) in metas.iter().enumerate() {
            matches |= u32::from(has_fingerprint(*meta, fingerprint)) << slot;
        }
        if matches == 0 {
            return None;
        }
        let slot = matches.trailing_zeros() as usize;
        let at = line * SLOTS + slot;
        let seen = self.lines.read(at);
        // The meta is read again after the word: a name that is there before and after was there in between, so the
        // word belongs to it. A reservation does not count.
        is_filled_with(seen.meta, fingerprint).then_some((at, seen))
    }

    #[inline(never)]
    fn find_beyond(&self, home: usize, name: u64) -> Option<(usize, SlotValue)> {
        (home + 1..home + self.window).find_map(|line| self.find_in(line, fingerprint(name)))
    }

    /// Returns whether a slot still has this meta, so that the reading of it was not torn.
    #[inline]
    pub(super) fn is_unchanged(&self, at: usize, seen: SlotValue) -> bool {
        self.lines.meta(at) == seen.meta
    }

    #[inline]
    pub(super) fn replace(&self, at: usize, seen: SlotValue, new: SlotValue) -> bool {
        self.lines.replace(at, seen, new)
    }

    /// Replaces `seen` by `new`. If only the word changes, only the word is compared and exchanged, at half the cost.
    /// That cannot detect that the slot has changed owners since it was found, if the new owner's word happens to be
    /// the same. A word that expired is never the same (the new one is later), so this takes an eviction between two
    /// instructions of this thread and equal words; the evicted key's charge, which would have been lost a moment
    /// earlier, then counts against the new owner. No request is admitted above a limit.
    #[inline(always)]
    pub(super) fn update(&self, at: usize, seen: SlotValue, new: SlotValue) -> bool {
        if new.meta == seen.meta && seen.word != 0 {
            return self.lines.replace_word(at, seen, new.word);
        }
        self.lines.replace(at, seen, new)
    }

    /// Returns whether a new key would find a slot.
    pub(super) fn has_room(&self, name: u64, now: Timestamp) -> bool {
        !matches!(self.choose(name, now), Choice::None)
    }

    /// Inserts a new key into its window.
    #[cold]
    pub(super) fn insert(&self, name: u64, now: Timestamp, new: SlotValue, counts: &Counts) -> Insertion {
        let (at, seen) = match self.choose(name, now) {
            Choice::Slot(at, seen) => (at, seen),
            Choice::Taken => return Insertion::Raced,
            Choice::None => return Insertion::Full,
        };
        let mine = SlotValue::reservation(name, self.reservations.fetch_add(1, Ordering::Relaxed));
        if !self.replace(at, seen, mine) {
            return Insertion::Raced;
        }
        if !self.is_alone(name, at) {
            // Fails if the reservation was canceled: then there is nothing to withdraw.
            self.replace(at, mine, SlotValue::EMPTY);
            return Insertion::Raced;
        }
        if !self.replace(at, mine, new) {
            // Two threads that cancel each other in lockstep could go on for long: let the other one finish.
            self.lines.relax();
            return Insertion::Raced;
        }
        counts.record(name, Event::Inserted);
        if seen.meta != 0 && !seen.is_reservation() {
            counts.record(name, if seen.is_free(now) { Event::Reused } else { Event::Evicted });
        }
        Insertion::Filled(at)
    }

    /// Scans the window again. Returns whether no other filled slot has this name; reservations by other threads are
    /// canceled.
    fn is_alone(&self, name: u64, mine: usize) -> bool {
        for at in self.window_of(name).filter(|at| *at != mine) {
            loop {
                let seen = self.lines.read(at);
                if !seen.belongs_to(name) {
                    break;
                }
                if !seen.is_reservation() {
                    return false;
                }
                if self.replace(at, seen, SlotValue::EMPTY) {
                    break;
                }
            }
        }
        true
    }

    fn window_of(&self, name: u64) -> std::ops::Range<usize> {
        let home = self.home(name);
        home * SLOTS..(home + self.window) * SLOTS
    }

    /// Returns the slot that a new key should take.
    fn choose(&self, name: u64, now: Timestamp) -> Choice {
        let mut free = None;
        let mut least: Option<(u8, Timestamp, usize, SlotValue)> = None;
        for at in self.window_of(name) {
            let seen = self.lines.read(at);
            if seen.belongs_to(name) {
                // A reservation is taken over in place.
                return if seen.is_reservation() { Choice::Slot(at, seen) } else { Choice::Taken };
            }
            if free.is_some() || seen.is_reservation() {
                continue;
            }
            if seen.is_free(now) {
                free = Some((at, seen));
                continue;
            }
            let (pressure, expires) = seen.eviction_rank(now);
            let cheaper = least.is_none_or(|(p, e, ..)| (pressure, expires) < (p, e));
            if cheaper && u16::from(pressure) < self.protected {
                least = Some((pressure, expires, at, seen));
            }
        }
        match (free, least) {
            (Some((at, seen)), _) | (None, Some((_, _, at, seen))) => Choice::Slot(at, seen),
            (None, None) => Choice::None,
        }
    }

    /// Returns how many of `sample` slots spread over the table are filled and live.
    pub(super) fn sample_live(&self, sample: usize, now: Timestamp) -> usize {
        let sample = sample.min(self.slots());
        let spread = |i: usize| (i as u128 * self.slots() as u128 / sample as u128) as usize;
        (0..sample)
            .map(|i| self.lines.read(spread(i)))
            .filter(|seen| !seen.is_free(now) && !seen.is_reservation())
            .count()
    }
}

enum Choice {
    Slot(usize, SlotValue),
    Taken,
    None,
}
