//! Hot counts: units of counters by their names, in a table that one thread writes to, without a lock and without a locked
//! instruction. The ledger's part for counters that are charged again and again.
//!
//! A name is a seeded hash of 64 bits. Some of them choose a group of slots; the others are the slot's tag, beside a count of
//! 16 bits.
//!
//! **The slot of a counter is computed**, from its name and its group's *order*. When a new counter's slot is taken, the group
//! gets an order by which all of its counters have different slots, and they move. So an addition compares one tag, which nearly
//! always matches: the branch is predicted, and the next decision begins before the cache line has arrived. Rejected: comparing tags
//! until one matches, which mispredicted every second addition with 50,000 counters, for a tenth of a decision's time and more. In a
//! group that is too full for such an order, some counters are in other slots, which are searched.
//!
//! **Counts only grow.** The thread adds by a load and a store; the tick, on another thread, reads them and remembers how
//! much it has reported. If it reset them, the thread would need a locked instruction for each addition. So what is
//! reported is the difference, whatever the thread does meanwhile, and each unit is in exactly one difference.
//!
//! What a slot stands for lies apart, under a lock of its group, which the thread takes for a new counter and the tick to
//! read the group: no other thread does. A slot changes its owner under this lock, and by the thread alone: one whose
//! units are all reported, and that had none in the last tick.
//!
//! The group and the tag identify a counter. Comparing the values as well was rejected: it takes a second cache line. So was
//! one table for all threads: a compare-exchange for each addition costs as much as all else that is done here, and the
//! line of a busy counter moves from core to core.

use crate::charge_codec::SentCounter;
use crate::ledger::{Consumed, SharedCounters};
use std::hint::select_unpredictable;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::Charge;
use tollgate_store::prefetch;

/// Slots of a group: two cache lines. With more of them more groups have no order, with fewer more have no room.
const SLOTS: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 4;
/// Counters of a group from which on none of the orders is likely to do.
const MAX_ORDERED: usize = SLOTS - 2;
/// Bits of a name that choose a group, at most.
const GROUP_BITS: u32 = 13;
/// Slots for each counter that a table is to have room for: then one group in twelve has no order.
const SLOTS_EACH: usize = 2;
/// Groups whose bits are in one number.
const GROUPS_EACH: usize = u64::BITS as usize;
/// Bits of a count.
const COUNT: u64 = 0xffff;

#[derive(Default)]
#[repr(align(64))]
struct Group([AtomicU64; SLOTS]);

impl Group {
    /// Returns the slot with this tag and its count; if there is none, the count is more than a count can be.
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

    /// Returns the units that were counted in a slot.
    fn count(&self, slot: usize) -> u16 {
        (self.0[slot].load(Ordering::Relaxed) & COUNT) as u16
    }

    fn is_free(&self, slot: usize) -> bool {
        self.0[slot].load(Ordering::Relaxed) == 0
    }
}

/// The counters of a group's slots.
#[derive(Default)]
struct Owners {
    /// Of each slot's count, what has been reported.
    reported: [u16; SLOTS],
    /// Slots without units in the last tick, one bit each.
    idle: u16,
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

    /// Returns an order that gives each counter of the group a slot of its own.
    fn order(&self) -> Option<u8> {
        if self.all.len() > MAX_ORDERED {
            return None;
        }
        let are_apart = |order: &u8| {
            let mut taken = 0_u16;
            self.all.iter().all(|owner| {
                let slot = 1 << slot_of(owner.name, *order);
                let is_free = taken & slot == 0;
                taken |= slot;
                is_free
            })
        };
        (0..=u8::MAX).find(are_apart)
    }

    /// Moves each counter to the slot that an order gives it. Called by the table's thread.
    fn arrange(&mut self, group: &Group, order: u8) {
        let slots: [u64; SLOTS] = std::array::from_fn(|slot| group.0[slot].load(Ordering::Relaxed));
        group.0.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        let before = Self { all: Vec::new(), ..*self };
        self.idle = 0;
        for from in (0..SLOTS).filter(|slot| slots[*slot] != 0) {
            let to = slot_of(self.all[usize::from(before.places[from])].name, order);
            group.0[to].store(slots[from], Ordering::Relaxed);
            (self.reported[to], self.places[to]) = (before.reported[from], before.places[from]);
            self.idle |= (before.idle >> from & 1) << to;
        }
    }
}

/// Units by name, of one thread.
pub(crate) struct HotCounts {
    groups: Box<[Group]>,
    /// The order of each group.
    orders: Box<[AtomicU8]>,
    owners: Box<[Mutex<Owners>]>,
    /// Groups that have had a counter, one bit each: the tick reads no others. Only the thread writes them.
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

/// Returns the slot in which a counter is by the order of its group.
#[inline(always)]
const fn slot_of(name: u64, order: u8) -> usize {
    // An odd number for each order, all far from each other.
    let factor = (2 * order as u32 + 1).wrapping_mul(0x9e37_79b1);
    (((name >> 32) as u32).wrapping_mul(factor) >> (u32::BITS - SLOT_BITS)) as usize
}

/// The slot in which a counter is unless its group has no order. Only the table's thread adds to it.
#[derive(Clone, Copy)]
pub(crate) struct Home<'a>(&'a AtomicU64);

impl Home<'_> {
    /// Adds units to a counter. Returns false if it is not here, or its count has no room for them.
    #[inline(always)]
    pub(crate) fn add(self, name: u64, units: u64) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        // More than a count if the tags differ.
        let count = seen ^ tag(name);
        let has_room = count <= COUNT && units <= COUNT - count;
        if has_room {
            self.0.store(seen + units, Ordering::Relaxed);
        }
        has_room
    }
}

impl HotCounts {
    /// Creates room for about this many counters.
    pub(crate) fn new(most: usize) -> Self {
        // The largest power of two.
        let groups = 1_usize << (most.saturating_mul(SLOTS_EACH) / SLOTS).max(1).ilog2().min(GROUP_BITS);
        Self {
            groups: (0..groups).map(|_| Group::default()).collect(),
            orders: (0..groups).map(|_| AtomicU8::new(0)).collect(),
            owners: (0..groups).map(|_| Mutex::default()).collect(),
            used: (0..groups.div_ceil(GROUPS_EACH)).map(|_| AtomicU64::new(0)).collect(),
            shared: Mutex::default(),
        }
    }

    /// Returns the index of the group of a name.
    #[inline]
    fn place(&self, name: u64) -> usize {
        name as usize & (self.groups.len() - 1)
    }

    fn owners(&self, place: usize) -> MutexGuard<'_, Owners> {
        self.owners[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the scope and limit of a charge, shared with other counters.
    pub(crate) fn shared(&self, charge: &Charge<'_>) -> Arc<SentCounter> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).of(charge)
    }

    /// Returns the slot in which a counter is unless its group has no order, and starts reading it.
    #[inline(always)]
    pub(crate) fn home(&self, name: u64) -> Home<'_> {
        let place = self.place(name);
        let slot = &self.groups[place].0[slot_of(name, self.orders[place].load(Ordering::Relaxed))];
        prefetch(slot);
        Home(slot)
    }

    /// Adds units to a counter that is here, in any slot. Returns whether they were added: not if its count has no room for
    /// them. Called by the table's thread alone, as [`Self::insert`] is.
    pub(crate) fn add(&self, name: u64, units: u64) -> bool {
        let group = &self.groups[self.place(name)];
        let (slot, _) = group.find(tag(name));
        Home(&group.0[slot]).add(name, units)
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
        let place = self.place(name);
        let (group, mut owners) = (&self.groups[place], self.owners(place));
        let first = tag(name) | units;
        let (slot, count) = group.find(tag(name));
        if let Ok(count) = u16::try_from(count) {
            owners.carry(slot, count);
            group.0[slot].store(first, Ordering::Relaxed);
            return true;
        }
        let has_room =
            || room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1)).is_ok();
        let own = slot_of(name, self.orders[place].load(Ordering::Relaxed));
        let mut slots = (0..SLOTS).map(|at| at ^ own);
        let free = slots.clone().find(|slot| group.is_free(*slot)).filter(|_| has_room());
        let Some(slot) = free.or_else(|| slots.find(|slot| owners.can_leave(*slot, group.count(*slot))))
        else {
            return false;
        };
        let used = &self.used[place / GROUPS_EACH];
        used.store(used.load(Ordering::Relaxed) | 1 << (place % GROUPS_EACH), Ordering::Relaxed);
        owners.replace(slot, free.is_some(), Owner { name, consumed: consumed() });
        group.0[slot].store(first, Ordering::Relaxed);
        if slot != own
            && let Some(order) = owners.order()
        {
            owners.arrange(group, order);
            self.orders[place].store(order, Ordering::Relaxed);
        }
        true
    }

    /// Reports the units of each counter of several tables since the last call. All tables of a ledger have the same number of
    /// groups, so that a counter is in the same one everywhere: `report` receives the group first, one group after the other.
    pub(crate) fn drain(tables: &[&Self], mut report: impl FnMut(usize, u64, &Consumed, i64)) {
        let words = tables.iter().map(|table| table.used.len()).max().unwrap_or(0);
        for at in 0..words {
            let used = |table: &&Self| table.used.get(at).map_or(0, |used| used.load(Ordering::Relaxed));
            let mut left = tables.iter().map(used).fold(0, |all, used| all | used);
            while left != 0 {
                let place = at * GROUPS_EACH + left.trailing_zeros() as usize;
                for table in tables {
                    table.drain_group(place, &mut |name, consumed, units| {
                        report(place, name, consumed, units);
                    });
                }
                left &= left - 1;
            }
        }
    }

    fn drain_group(&self, place: usize, report: &mut impl FnMut(u64, &Consumed, i64)) {
        let (group, mut owners) = (&self.groups[place], self.owners(place));
        let Owners { reported, idle, places, all } = &mut *owners;
        let counts: [u16; SLOTS] = std::array::from_fn(|slot| group.count(slot));
        *idle = (0..SLOTS).fold(0, |idle, slot| idle | u16::from(!group.is_free(slot)) << slot);
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
        // Few groups for many names, so that slots change hands all the time.
        let (counter, room, writing) = (counter(), AtomicUsize::new(1_000), AtomicUsize::new(4));
        let tables: Vec<HotCounts> = (0..4).map(|_| HotCounts::new(32)).collect();
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

    /// Without it most additions search the group.
    #[test]
    fn counters_that_have_room_are_in_slots_that_are_computed() {
        let (counts, counter, room) = (HotCounts::new(4_096), counter(), AtomicUsize::new(10_000));
        let names: Vec<u64> = (0..4_096_u64).map(|at| SplitMix64::new(at).next_u64()).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(counts.insert(*name, 1, &room, || consumed(&counter, *name)), "{at}");
            assert!(at % 97 != 0 || !drained(&counts).is_empty(), "moved between two ticks");
        }
        drained(&counts);
        let at_home = names.iter().filter(|name| counts.home(**name).add(**name, 1)).count();
        assert!(at_home > 4_000, "{at_home} of 4,096");
        let searched = names.iter().filter(|name| counts.add(**name, 1)).count();
        assert_eq!(searched, 4_096, "the others are found");
        let mut units: Vec<i64> = drained(&counts).into_iter().map(|(_, units)| units).collect();
        units.sort_unstable();
        let expected = [vec![1; 4_096 - at_home], vec![2; at_home]].concat();
        assert_eq!(units, expected);
    }

    /// Without it a busy counter's units spill into the tag of another, or end at 65,535.
    #[test]
    fn a_full_count_begins_anew_and_nothing_is_lost() {
        let (counts, counter, room) = (HotCounts::new(16), counter(), AtomicUsize::new(100));
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
        // One group. By no order do these names differ, and those of the next round do by most.
        for spread in [20, 60] {
            let (counts, counter, room) = (HotCounts::new(8), counter(), AtomicUsize::new(100));
            let name = |at: u64| at << 20 | at << spread;
            let insert = |at: u64| counts.insert(name(at), 1, &room, || consumed(&counter, name(at)));
            let add = |at: u64| counts.add(name(at), 1);
            let inserted = (1..=20).filter(|at| insert(*at)).count();
            assert_eq!(inserted, 16, "the slots of a group");
            assert_eq!(drained(&counts).len(), 16);
            assert!(!insert(21), "all had units in the last tick");
            assert!((1..=4).chain(9..=16).all(add));
            assert_eq!(drained(&counts).len(), 12);
            assert!(add(5), "idle, and used again before another wants its slot");
            assert_eq!((21..=30).filter(|at| insert(*at)).count(), 3);
            let mut names: Vec<u64> = drained(&counts).into_iter().map(|(name, _)| name).collect();
            names.sort_unstable();
            let mut expected: Vec<u64> = [5, 21, 22, 23].map(name).to_vec();
            expected.sort_unstable();
            assert_eq!(names, expected);
            assert!((1..=4).chain(9..=16).all(add), "they are still there");
        }
    }

    /// Without it a counter that moves to another slot keeps it although it is idle.
    #[test]
    fn idle_counters_that_move_still_give_way() {
        let (counts, counter, room) = (HotCounts::new(8), counter(), AtomicUsize::new(6));
        let insert = |at: u64| {
            let name = SplitMix64::new(at).next_u64();
            counts.insert(name, 1, &room, || consumed(&counter, name))
        };
        assert!((0..6).all(insert) && !insert(6));
        assert_eq!((drained(&counts).len(), drained(&counts).len()), (6, 0));
        assert!((6..12).all(insert) && !insert(12));
        assert_eq!(drained(&counts).len(), 6);
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
