//! Hot counts: units of counters by their names, in a table that one thread writes to, without a lock and without a locked
//! instruction. The ledger's part for counters that are charged again and again.
//!
//! A name is a seeded hash of 64 bits. Some of them choose a set, which is a cache line of eight slots; the others are the
//! slot's tag, beside a count of 16 bits. A counter that finds no room in its set is in another one of the same group.
//!
//! Three more bits choose the slot that is tried first: comparing the eight tags of a set takes longer than all else that is done
//! here. Rejected: to compare all eight at once and without a branch, which gains 4 ns of 38 with 50,000 counters, where that slot is
//! another's every third time, and loses 4 of 14 with 1,000.
//!
//! **Counts only grow.** The thread adds by a load and a store; the tick, on another thread, reads them and remembers how
//! much it has reported. If it reset them, the thread would need a locked instruction for each addition. So what is
//! reported is the difference, whatever the thread does meanwhile, and each unit is in exactly one difference.
//!
//! What a slot stands for lies apart, under a lock of its set, which the thread takes for a new counter and the tick to
//! read the set: no other thread does. A slot changes its owner under this lock, and by the thread alone: one whose
//! units are all reported, and that had none in the last tick.
//!
//! The set and the tag identify a counter. Comparing the values as well was rejected: it takes a second cache line. So was
//! one table for all threads: a compare-exchange for each addition costs as much as all else that is done here, and the
//! line of a busy counter moves from core to core.

use crate::charge_codec::SentCounter;
use crate::ledger::{Consumed, SharedCounters};
use std::hint::select_unpredictable;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::Charge;
use tollgate_store::prefetch;

const SLOTS: usize = 8;
/// Bits of a name that choose a set, at most. Twice as many sets were not faster: they take more of the nearest caches.
const SET_BITS: u32 = 13;
/// Sets whose bits are in one number.
const SETS_EACH: usize = u64::BITS as usize;
/// Sets of a group, which take what one of them has no room for.
const GROUP: usize = 4;
/// The first set of each group.
const GROUPS: u64 = 0x1111_1111_1111_1111;
/// Bits of a count.
const COUNT: u64 = 0xffff;

/// One cache line.
#[derive(Default)]
#[repr(align(64))]
struct Set([AtomicU64; SLOTS]);

impl Set {
    /// Returns the slot with this tag and its count; if there is none, the count is more than a count can be.
    #[inline(always)]
    fn find(&self, tag: u64) -> (usize, u64) {
        let (mut found, mut count) = (0, u64::MAX);
        for (at, slot) in self.0.iter().enumerate() {
            // The count, if the tags are the same.
            let own = slot.load(Ordering::Relaxed) ^ tag;
            found = select_unpredictable(own <= COUNT, at, found);
            count = count.min(own);
        }
        (found, count)
    }

    /// Adds units to a counter of this set. Returns false if it is in none of the slots, or its count has no room for them. Only the
    /// table's thread adds.
    #[inline(never)]
    fn add(&self, name: u64, units: u64) -> bool {
        let (slot, count) = self.find(tag(name));
        let has_room = units <= COUNT && count <= COUNT - units;
        if has_room {
            self.0[slot].store((tag(name) | count) + units, Ordering::Relaxed);
        }
        has_room
    }

    /// Returns the units that were counted in a slot.
    fn count(&self, slot: usize) -> u16 {
        (self.0[slot].load(Ordering::Relaxed) & COUNT) as u16
    }

    fn is_free(&self, slot: usize) -> bool {
        self.0[slot].load(Ordering::Relaxed) == 0
    }
}

/// The counters of a set's slots.
#[derive(Default)]
struct Owners {
    /// Of each slot's count, what has been reported.
    reported: [u16; SLOTS],
    /// Slots without units in the last tick, one bit each.
    idle: u8,
    /// Where each slot's counter is in the list. One that is free has none yet.
    places: [u8; SLOTS],
    all: Vec<Owner>,
}

struct Owner {
    name: u64,
    /// Its units are those for which the count had no room.
    consumed: Consumed,
}

impl Owners {
    /// Returns whether a slot's counter can leave it: all its units are reported, and it had none in the last tick.
    fn can_leave(&self, slot: usize, count: u16) -> bool {
        self.idle >> slot & 1 == 1 && self.reported[slot] == count
    }

    /// Gives a slot, whose count begins anew, to a counter. `is_free` is whether it had none before.
    fn replace(&mut self, slot: usize, is_free: bool, owner: Owner) {
        (self.reported[slot], self.idle) = (0, self.idle & !(1 << slot));
        if is_free {
            self.places[slot] = self.all.len() as u8;
            self.all.push(owner);
        } else {
            self.all[usize::from(self.places[slot])] = owner;
        }
    }

    /// Keeps the units of a slot whose count begins anew.
    fn carry(&mut self, slot: usize, count: u16) {
        let units = count - std::mem::take(&mut self.reported[slot]);
        let consumed = &mut self.all[usize::from(self.places[slot])].consumed;
        consumed.units = consumed.units.saturating_add(i64::from(units));
    }
}

/// Units by name, of one thread.
pub(crate) struct HotCounts {
    sets: Box<[Set]>,
    owners: Box<[Mutex<Owners>]>,
    /// Sets that have had a counter, one bit each: the tick reads no others. Only the thread writes them.
    used: Box<[AtomicU64]>,
    /// Scopes and limits that its counters share. Only the thread takes this lock.
    shared: Mutex<SharedCounters>,
}

/// Returns the tag of a name; none is zero, which is a free slot.
#[inline]
const fn tag(name: u64) -> u64 {
    let tag = name & !COUNT;
    if tag == 0 { COUNT + 1 } else { tag }
}

/// The set in which a counter is unless it was full. Only the table's thread adds to it.
#[derive(Clone, Copy)]
pub(crate) struct Home<'a>(&'a Set);

impl Home<'_> {
    /// Adds units to a counter of this set. Returns false if it is not there, or its count has no room for them.
    #[inline(always)]
    pub(crate) fn add(self, name: u64, units: u64) -> bool {
        let slot = &self.0.0[preferred(name)];
        let seen = slot.load(Ordering::Relaxed);
        // More than a count if the tags differ.
        let count = seen ^ tag(name);
        if count <= COUNT && units <= COUNT - count {
            slot.store(seen + units, Ordering::Relaxed);
            return true;
        }
        self.0.add(name, units)
    }
}

/// Returns the slot in which a counter is unless it was taken.
#[inline]
const fn preferred(name: u64) -> usize {
    (name >> SET_BITS) as usize % SLOTS
}

impl HotCounts {
    /// Creates room for about this many counters.
    pub(crate) fn new(most: usize) -> Self {
        // The largest power of two, and at least a group.
        let sets = 1_usize << (most / SLOTS).max(GROUP).ilog2().min(SET_BITS);
        Self {
            sets: (0..sets).map(|_| Set::default()).collect(),
            owners: (0..sets).map(|_| Mutex::default()).collect(),
            used: (0..sets.div_ceil(SETS_EACH)).map(|_| AtomicU64::new(0)).collect(),
            shared: Mutex::default(),
        }
    }

    /// Returns the index of the set of a name.
    #[inline]
    fn place(&self, name: u64) -> usize {
        name as usize & (self.sets.len() - 1)
    }

    fn owners(&self, place: usize) -> MutexGuard<'_, Owners> {
        self.owners[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the scope and limit of a charge, shared with other counters.
    pub(crate) fn shared(&self, charge: &Charge<'_>) -> Arc<SentCounter> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).of(charge)
    }

    /// Returns the set in which a counter is unless it was full, and starts reading it.
    #[inline(always)]
    pub(crate) fn home(&self, name: u64) -> Home<'_> {
        let set = &self.sets[self.place(name)];
        prefetch(set);
        Home(set)
    }

    /// Adds units to a counter that is here. Returns whether they were added: not if its count has no room for them. Called
    /// by the table's thread alone, as [`Self::insert`] is.
    pub(crate) fn add(&self, name: u64, units: u64) -> bool {
        let home = self.place(name);
        self.home(name).add(name, units) || (1..GROUP).any(|other| self.sets[home ^ other].add(name, units))
    }

    /// Adds units to a counter whose count is full or that is new here, if there is room for it; `room` is the number of
    /// counters that may still be added to the tables of all threads. Returns whether they were added.
    pub(crate) fn insert(
        &self,
        name: u64,
        units: u64,
        room: &AtomicUsize,
        consumed: impl FnOnce() -> Consumed,
    ) -> bool {
        if !(1..=COUNT).contains(&units) {
            return false;
        }
        let home = self.place(name);
        // Only this thread takes more than one of the locks.
        let mut owners: [_; GROUP] =
            std::array::from_fn(|other| (&self.sets[home ^ other], self.owners(home ^ other)));
        let first = tag(name) | units;
        for (set, owners) in &mut owners {
            let (slot, count) = set.find(tag(name));
            if let Ok(count) = u16::try_from(count) {
                owners.carry(slot, count);
                set.0[slot].store(first, Ordering::Relaxed);
                return true;
            }
        }
        let has_room =
            || room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1)).is_ok();
        let slots = || (0..SLOTS).map(|at| at ^ preferred(name));
        let mut taken = None;
        for (at, (set, _)) in owners.iter().enumerate() {
            taken = taken.or_else(|| slots().find(|slot| set.is_free(*slot)).map(|slot| (at, slot)));
        }
        taken = taken.filter(|_| has_room());
        for (at, (set, owners)) in owners.iter().enumerate() {
            let can_leave = |slot: &usize| owners.can_leave(*slot, set.count(*slot));
            taken = taken.or_else(|| slots().find(can_leave).map(|slot| (at, slot)));
        }
        let Some((at, slot)) = taken else { return false };
        let place = home ^ at;
        let used = &self.used[place / SETS_EACH];
        used.store(used.load(Ordering::Relaxed) | 1 << (place % SETS_EACH), Ordering::Relaxed);
        let (set, owners) = &mut owners[at];
        owners.replace(slot, set.is_free(slot), Owner { name, consumed: consumed() });
        set.0[slot].store(first, Ordering::Relaxed);
        true
    }

    /// Reports the units of each counter of several tables since the last call. All tables of a ledger have the same number of
    /// sets, so that a counter is in the same group of them everywhere: `report` receives the group first, one group after the
    /// other.
    pub(crate) fn drain(tables: &[&Self], mut report: impl FnMut(usize, u64, &Consumed, i64)) {
        let words = tables.iter().map(|table| table.used.len()).max().unwrap_or(0);
        for at in 0..words {
            let used = |table: &&Self| table.used.get(at).map_or(0, |used| used.load(Ordering::Relaxed));
            let mut left = tables.iter().map(used).fold(0, |all, used| all | used);
            // All sets of a group.
            left |= left >> 1;
            left = (left | left >> 2) & GROUPS;
            while left != 0 {
                let group = at * SETS_EACH + left.trailing_zeros() as usize;
                let sets = group..group + GROUP;
                for (table, place) in
                    tables.iter().flat_map(|table| sets.clone().map(move |place| (table, place)))
                {
                    table.drain_set(place, &mut |name, consumed, units| {
                        report(group, name, consumed, units);
                    });
                }
                left &= left - 1;
            }
        }
    }

    fn drain_set(&self, place: usize, report: &mut impl FnMut(u64, &Consumed, i64)) {
        let (set, mut owners) = (&self.sets[place], self.owners(place));
        let Owners { reported, idle, places, all } = &mut *owners;
        let counts: [u16; SLOTS] = std::array::from_fn(|slot| set.count(slot));
        *idle = (0..SLOTS).fold(0, |idle, slot| idle | u8::from(!set.is_free(slot)) << slot);
        if counts == *reported {
            return;
        }
        for slot in (0..SLOTS).filter(|slot| counts[*slot] > reported[*slot]) {
            let Owner { name, consumed } = &mut all[usize::from(places[slot])];
            let counted = i64::from(counts[slot] - reported[slot]);
            let units = std::mem::take(&mut consumed.units).saturating_add(counted);
            *idle &= !(1 << slot);
            report(*name, consumed, units);
        }
        *reported = counts;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_values::KeyValues;
    use std::collections::HashMap;
    use tollgate_core::conformance::SplitMix64;
    use tollgate_core::{Algorithm, KeyPart, LimitSpec, Rate, Scope, TimeDelta};

    fn counter() -> Arc<SentCounter> {
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(5, TimeDelta::from_secs(1)));
        Arc::new(SentCounter { scope: Scope::new("s"), limit: limit.build().expect("valid") })
    }

    fn consumed(counter: &Arc<SentCounter>, name: u64) -> Consumed {
        let values = KeyValues::new(&[KeyPart::Text(&name.to_string())]);
        Consumed { counter: Arc::clone(counter), values, units: 0 }
    }

    fn name_of(consumed: &Consumed) -> u64 {
        match consumed.values.parts()[0] {
            KeyPart::Text(text) => text.parse().expect("a name"),
            part => panic!("{part:?}"),
        }
    }

    fn drained(counts: &HotCounts) -> Vec<(u64, i64)> {
        let mut all = Vec::new();
        HotCounts::drain(&[counts], |_, name, consumed, units| {
            assert_eq!(name_of(consumed), name, "of its own counter");
            all.push((name, units));
        });
        all
    }

    /// Without it units are lost, counted twice, or reported for another counter when slots change their owners.
    #[test]
    fn every_unit_is_reported_once_and_for_its_counter() {
        // Few sets for many names, so that slots change hands all the time.
        let (counter, room, writing) = (counter(), AtomicUsize::new(1_000), AtomicUsize::new(4));
        let tables: Vec<HotCounts> = (0..4).map(|_| HotCounts::new(64)).collect();
        let names: Vec<u64> = (0..200_u64).map(|at| SplitMix64::new(at).next_u64()).collect();
        let write = |counts: &HotCounts, seed| {
            let (mut rng, mut added) = (SplitMix64::new(seed), HashMap::<u64, i64>::new());
            for _ in 0..20_000 {
                let (name, units) = (names[rng.below(200) as usize], 1 + rng.below(30) * rng.below(30));
                if counts.add(name, units) || counts.insert(name, units, &room, || consumed(&counter, name)) {
                    *added.entry(name).or_default() += units.cast_signed();
                }
            }
            writing.fetch_sub(1, Ordering::Relaxed);
            added
        };
        let drain = || {
            let mut found = HashMap::<u64, i64>::new();
            let mut is_last = false;
            while !is_last {
                is_last = writing.load(Ordering::Relaxed) == 0;
                for (name, units) in tables.iter().flat_map(drained) {
                    assert!(units > 0);
                    *found.entry(name).or_default() += units;
                }
            }
            found
        };
        std::thread::scope(|scope| {
            let (write, drainer) = (&write, scope.spawn(drain));
            let writers: Vec<_> = tables
                .iter()
                .zip(0..)
                .map(|(counts, seed)| scope.spawn(move || write(counts, seed)))
                .collect();
            let mut expected = HashMap::<u64, i64>::new();
            for (name, units) in writers.into_iter().flat_map(|writer| writer.join().expect("no panic")) {
                *expected.entry(name).or_default() += units;
            }
            let mut found = drainer.join().expect("no panic");
            // What was written while the drainer passed for the last time.
            for (name, units) in tables.iter().flat_map(drained) {
                *found.entry(name).or_default() += units;
            }
            assert_eq!(found, expected);
            assert!(expected.len() > 100, "{} counters had a slot", expected.len());
        });
    }

    /// Without it a busy counter's units spill into the tag of another, or end at 65,535.
    #[test]
    fn a_full_count_begins_anew_and_nothing_is_lost() {
        let (counts, counter, room) = (HotCounts::new(32), counter(), AtomicUsize::new(100));
        let name = 7 << 16;
        let insert = |units| counts.insert(name, units, &room, || consumed(&counter, name));
        assert!(!counts.add(name, 1), "not there yet");
        assert!(!insert(65_536) && insert(65_000));
        assert!(counts.add(name, 535) && !counts.add(name, 1), "full");
        assert!(insert(7) && counts.add(name, 2));
        assert_eq!(drained(&counts), [(name, 65_544)]);
        assert!(counts.add(name, 1) && insert(65_535) && insert(3), "it keeps its slot");
        assert_eq!(drained(&counts), [(name, 65_539)]);
        assert_eq!(drained(&counts), []);
        assert!(!counts.add(name, u64::MAX) && counts.add(name, 1), "no overflow");
        assert_eq!(drained(&counts), [(name, 1)]);
    }

    /// Without it counters that were used once keep others out for ever, or those in use give way.
    #[test]
    fn idle_counters_give_way_and_others_do_not() {
        let (counts, counter, room) = (HotCounts::new(32), counter(), AtomicUsize::new(100));
        let insert = |name: u64| counts.insert(name, 1, &room, || consumed(&counter, name));
        let inserted = (1..=40).filter(|at| insert(at << 20)).count();
        assert_eq!(inserted, 32, "the sets of a group");
        assert_eq!(drained(&counts).len(), 32);
        assert!(!insert(41 << 20), "all had units in the last tick");
        assert!((17..=32).all(|at| counts.add(at << 20, 1)));
        assert!((1..=8).all(|at| counts.add(at << 20, 1)));
        assert_eq!(drained(&counts).len(), 24);
        assert!(
            (9..=9).all(|at| counts.add(at << 20, 1)),
            "idle, and used again before another wants its slot"
        );
        let inserted = (41..=60).filter(|at| insert(at << 20)).count();
        assert_eq!(inserted, 7);
        let mut names: Vec<u64> = drained(&counts).into_iter().map(|(name, _)| name >> 20).collect();
        names.sort_unstable();
        assert_eq!(names, [vec![9], (41..=47).collect()].concat());
        assert!((1..=8).all(|at| counts.add(at << 20, 1)), "they are still there");
    }

    /// Without it the tables of many threads take memory without a bound.
    #[test]
    fn all_tables_together_have_a_bound() {
        let (counter, room) = (counter(), AtomicUsize::new(3));
        let tables: Vec<HotCounts> = (0..2).map(|_| HotCounts::new(64)).collect();
        let insert = |table: usize, at: u64| {
            tables[table].insert(at << 20 | at, 1, &room, || consumed(&counter, at << 20 | at))
        };
        assert!(insert(0, 1) && insert(0, 2) && insert(1, 1) && !insert(1, 2) && !insert(0, 3));
        assert_eq!(tables.iter().flat_map(drained).count(), 3);
        drained(&tables[0]);
        // Another takes the place of an idle one.
        let replaced = (3..40).filter(|at| insert(0, *at)).count();
        assert!((1..=2).contains(&replaced), "{replaced}");
    }
}
