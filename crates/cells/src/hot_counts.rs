//! Hot counts: units of counters by their names, added without a lock. The ledger's part for counters that are charged
//! again and again.
//!
//! A name is a seeded hash of 64 bits. Some of them choose a set, which is a cache line of eight slots; the others are the
//! slot's tag, beside a count of 16 bits: name and count change in one step, so a slot that is given to another counter
//! never gets units of the one before. What the name stands for lies apart, under a lock that only a new counter and the
//! tick take. A counter that finds no slot, or whose count is full, is counted elsewhere.
//!
//! The set and the tag identify a counter: 48 bits of the hash and those that choose the set. Comparing the values as well was rejected: it takes a
//! second cache line, and a lock that both of them are read under.

use crate::ledger::Consumed;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SLOTS: usize = 8;
/// Bits of a count.
const COUNT: u64 = 0xffff;

/// One cache line.
#[derive(Default)]
#[repr(align(64))]
struct Set([AtomicU64; SLOTS]);

/// The counters of a set's slots; none as long as nothing was in it.
type Owners = Option<Box<[Option<Consumed>; SLOTS]>>;

/// Units by name.
pub(crate) struct HotCounts {
    sets: Box<[Set]>,
    owners: Box<[Mutex<Owners>]>,
}

/// Returns the tag of a name; none is zero, which is a free slot.
#[inline]
const fn tag(name: u64) -> u64 {
    let tag = name & !COUNT;
    if tag == 0 { COUNT + 1 } else { tag }
}

impl HotCounts {
    /// Creates room for at most this many counters.
    pub(crate) fn new(most: usize) -> Self {
        let sets = match most / SLOTS {
            0 => 0,
            // The largest power of two.
            sets => 1 << sets.ilog2().min(16),
        };
        Self {
            sets: (0..sets).map(|_| Set::default()).collect(),
            owners: (0..sets).map(|_| Mutex::default()).collect(),
        }
    }

    #[inline]
    fn place(&self, name: u64) -> usize {
        name as usize & self.sets.len().wrapping_sub(1)
    }

    fn owners(&self, place: usize) -> MutexGuard<'_, Owners> {
        self.owners[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds units to a counter that is here. Returns whether they were added.
    #[inline]
    pub(crate) fn add(&self, name: u64, units: i64) -> bool {
        let Some(Set(slots)) = self.sets.get(self.place(name)) else { return false };
        let Ok(units @ 0..=COUNT) = u64::try_from(units) else { return false };
        let tag = tag(name);
        for slot in slots {
            let mut seen = slot.load(Ordering::Relaxed);
            while seen & !COUNT == tag && (seen & COUNT) + units <= COUNT {
                match slot.compare_exchange_weak(seen, seen + units, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return true,
                    Err(now) => seen = now,
                }
            }
        }
        false
    }

    /// Adds units to a counter that is new here. Returns whether there was room for it; a counter that another thread has
    /// added meanwhile has none.
    pub(crate) fn insert(&self, name: u64, units: i64, owner: impl FnOnce() -> Consumed) -> bool {
        let place = self.place(name);
        let Some(Set(slots)) = self.sets.get(place) else { return false };
        let Ok(units @ 0..=COUNT) = u64::try_from(units) else { return false };
        let (mut owners, tag) = (self.owners(place), tag(name));
        let seen = slots.each_ref().map(|slot| slot.load(Ordering::Relaxed));
        let Some(free) = seen.iter().position(|seen| *seen == 0) else { return false };
        if seen.iter().any(|seen| seen & !COUNT == tag) {
            return false;
        }
        owners.get_or_insert_default()[free] = Some(owner());
        // A slot is given away and taken back under the lock alone.
        slots[free].store(tag | units, Ordering::Relaxed);
        true
    }

    /// Takes all units. A counter without any since the last call leaves its slot.
    pub(crate) fn drain_into(&self, all: &mut Vec<Consumed>) {
        for (place, Set(slots)) in self.sets.iter().enumerate() {
            if slots.iter().all(|slot| slot.load(Ordering::Relaxed) == 0) {
                continue;
            }
            let mut owners = self.owners(place);
            let Some(owners) = owners.as_mut() else { continue };
            for (slot, owner) in slots.iter().zip(owners.iter_mut()).filter(|(_, owner)| owner.is_some()) {
                let units = slot.fetch_and(!COUNT, Ordering::Relaxed) & COUNT;
                let Some(consumed) = owner else { continue };
                if units > 0 {
                    all.push(Consumed { units: units.cast_signed(), ..consumed.clone() });
                    continue;
                }
                let idle = slot.load(Ordering::Relaxed) & !COUNT;
                if slot.compare_exchange(idle, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                    *owner = None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charge_codec::SentCounter;
    use crate::key_values::KeyValues;
    use std::collections::HashMap;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
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

    /// Without it units are lost, counted twice, or reported for another counter when slots change their owners.
    #[test]
    fn every_unit_is_reported_once_and_for_its_counter() {
        // Few sets for many names, so that slots change hands all the time.
        let (counts, counter, is_over) = (HotCounts::new(64), counter(), AtomicBool::new(false));
        let names: Vec<u64> = (0..200_u64).map(|at| SplitMix64::new(at).next_u64()).collect();
        let (mut expected, mut found): (HashMap<u64, i64>, HashMap<u64, i64>) = Default::default();
        let mut collect = |all: Vec<Consumed>| {
            for one in all {
                *found.entry(name_of(&one)).or_default() += one.units;
            }
        };
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4)
                .map(|seed| {
                    let (counts, counter, names) = (&counts, &counter, &names);
                    scope.spawn(move || {
                        let (mut rng, mut added) = (SplitMix64::new(seed), HashMap::<u64, i64>::new());
                        for _ in 0..10_000 {
                            let (name, units) =
                                (names[rng.below(200) as usize], 1 + rng.below(3).cast_signed());
                            if counts.add(name, units)
                                || counts.insert(name, units, || consumed(counter, name))
                            {
                                *added.entry(name).or_default() += units;
                            }
                        }
                        added
                    })
                })
                .collect();
            let drainer = scope.spawn(|| {
                let mut all = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    counts.drain_into(&mut all);
                }
                all
            });
            for writer in writers {
                for (name, units) in writer.join().expect("no panic") {
                    *expected.entry(name).or_default() += units;
                }
            }
            is_over.store(true, Ordering::Relaxed);
            collect(drainer.join().expect("no panic"));
        });
        let mut rest = Vec::new();
        counts.drain_into(&mut rest);
        collect(rest);
        assert_eq!(found, expected);
        assert!(expected.len() > 100, "{} counters had a slot", expected.len());
    }

    /// Without it a busy counter's units spill into the name of another.
    #[test]
    fn what_does_not_fit_is_not_added() {
        let (counts, counter, mut all) = (HotCounts::new(8), counter(), Vec::new());
        assert!(!counts.add(7 << 16, 1), "not there yet");
        assert!(counts.insert(7 << 16, 65_000, || consumed(&counter, 7 << 16)));
        assert!(counts.add(7 << 16, 535) && !counts.add(7 << 16, 1), "full");
        assert!(!counts.add(7 << 16, -1) && !counts.insert(8 << 16, 65_536, || consumed(&counter, 8)));
        counts.drain_into(&mut all);
        assert_eq!(all.iter().map(|one| (name_of(one), one.units)).collect::<Vec<_>>(), [(7 << 16, 65_535)]);
        assert!(counts.add(7 << 16, 1), "it keeps its slot");
        let inserted = (0..10).filter(|at| counts.insert(at << 20, 1, || consumed(&counter, *at))).count();
        assert_eq!(inserted, 7, "the others are taken");
        for _ in 0..2 {
            counts.drain_into(&mut all);
        }
        assert!(counts.insert(9 << 30, 1, || consumed(&counter, 9)), "idle ones have left");
        assert!(!HotCounts::new(7).insert(1, 1, || consumed(&counter, 1)), "without sets nothing is kept");
    }
}
