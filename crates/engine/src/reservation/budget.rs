//! Bytes that the reservations of this node may take, fair between callers.
//!
//! While there is room, everybody has it. When there is none, the caller that holds the most makes room: its oldest
//! reservation is forgotten (it stays as charged, like one that has expired), or it is refused if it is the one that
//! asks. So a caller that floods the table pays for it alone, and one that holds less than every other always finds
//! room. Rejected: a fixed share for each caller, because their number is unknown.

use std::collections::{BTreeSet, HashMap};
use tollgate_core::{RecordName, Timestamp};

/// Bytes of an entry here and in a record table, besides the record.
const OVERHEAD: usize = 512;

/// The records of a reservation.
pub(super) type Names = [Option<RecordName>; 2];

#[derive(Debug)]
pub(super) struct FairBudget {
    most: usize,
    used: usize,
    entries: HashMap<RecordName, Entry>,
    callers: HashMap<u64, Share>,
    /// Callers by the bytes they hold.
    by_bytes: BTreeSet<(usize, u64)>,
    expiries: BTreeSet<(Timestamp, RecordName)>,
}

#[derive(Debug)]
struct Entry {
    caller: u64,
    names: Names,
    bytes: usize,
    until: Timestamp,
    number: u64,
}

#[derive(Debug, Default)]
struct Share {
    bytes: usize,
    /// Entries in the order of their making.
    oldest: BTreeSet<(u64, RecordName)>,
    made: u64,
}

impl FairBudget {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            used: 0,
            entries: HashMap::new(),
            callers: HashMap::new(),
            by_bytes: BTreeSet::new(),
            expiries: BTreeSet::new(),
        }
    }

    /// Takes `bytes` for a caller's records until they expire. Returns the records that must be removed for it; `None`
    /// if the caller's share is used.
    pub(super) fn take(
        &mut self,
        caller: u64,
        names: Names,
        bytes: usize,
        until: Timestamp,
        now: Timestamp,
    ) -> Option<Vec<RecordName>> {
        let name = names[0]?;
        let bytes = bytes + OVERHEAD;
        while let Some((_, gone)) = self.expiries.first().copied().filter(|(until, _)| *until <= now) {
            self.release(gone);
        }
        let own = self.callers.get(&caller).map_or(0, |share| share.bytes);
        let mut evicted = Vec::new();
        while self.used + bytes > self.most {
            let (held, largest) = self.by_bytes.last().copied()?;
            if largest == caller || own + bytes > held {
                return None;
            }
            let oldest = self.callers.get(&largest).and_then(|share| share.oldest.first().copied());
            evicted.extend(self.release(oldest?.1)?.into_iter().flatten());
        }
        let share = self.callers.entry(caller).or_default();
        self.by_bytes.remove(&(share.bytes, caller));
        share.bytes += bytes;
        share.made += 1;
        let number = share.made;
        share.oldest.insert((number, name));
        self.by_bytes.insert((share.bytes, caller));
        self.used += bytes;
        self.expiries.insert((until, name));
        self.entries.insert(name, Entry { caller, names, bytes, until, number });
        Some(evicted)
    }

    /// Gives back what the records of a reservation took.
    pub(super) fn release(&mut self, name: RecordName) -> Option<Names> {
        let Entry { caller, names, bytes, until, number } = self.entries.remove(&name)?;
        self.expiries.remove(&(until, name));
        self.used -= bytes;
        let share = self.callers.get_mut(&caller)?;
        self.by_bytes.remove(&(share.bytes, caller));
        share.bytes -= bytes;
        share.oldest.remove(&(number, name));
        if share.bytes == 0 {
            self.callers.remove(&caller);
        } else {
            self.by_bytes.insert((share.bytes, caller));
        }
        Some(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(number: u64) -> RecordName {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        RecordName(bytes)
    }

    const LATER: Timestamp = Timestamp::from_secs(100);

    /// Without it one tenant that reserves and never settles locks out or forgets everybody else.
    #[test]
    fn a_flood_is_paid_for_by_the_flooder() {
        let mut budget = FairBudget::new(100 * (OVERHEAD + 100));
        for honest in 0..10 {
            assert_eq!(
                budget.take(honest, [Some(name(honest)), None], 100, LATER, Timestamp::ZERO),
                Some(vec![])
            );
        }
        let flood =
            (1_000..2_000).map(|n| budget.take(99, [Some(name(n)), None], 100, LATER, Timestamp::ZERO));
        assert_eq!(flood.filter(Option::is_some).count(), 90);
        // Who holds less finds room, at the flooder's price.
        let evicted = budget.take(3, [Some(name(500)), Some(name(501))], 100, LATER, Timestamp::ZERO);
        assert_eq!(evicted, Some(vec![name(1_000)]));
        assert!((0..10).all(|honest| budget.entries.contains_key(&name(honest))));
        // What has expired makes room by itself.
        let last = budget.take(99, [Some(name(3_000)), None], 100, LATER, LATER);
        assert_eq!((last, budget.entries.len()), (Some(vec![]), 1));
    }

    proptest! {
        /// Without it the sums drift away from the entries, and the bound with them.
        #[test]
        fn never_more_than_the_bound(steps in prop::collection::vec((0_u64..5, 0_usize..2_000, 0_u64..60, any::<bool>()), 1..200)) {
            let mut budget = FairBudget::new(8_000);
            for (number, (caller, bytes, at, release)) in steps.into_iter().enumerate() {
                let now = Timestamp::from_secs(at);
                let _ = budget.take(caller, [Some(name(number as u64)), None], bytes, now + tollgate_core::TimeDelta::from_secs(9), now);
                if release {
                    let _ = budget.release(name(number as u64 / 2));
                }
                prop_assert!(budget.used <= budget.most);
                prop_assert_eq!(budget.used, budget.entries.values().map(|entry| entry.bytes).sum::<usize>());
                prop_assert_eq!(budget.used, budget.callers.values().map(|share| share.bytes).sum::<usize>());
                prop_assert_eq!(budget.by_bytes.len(), budget.callers.len());
                prop_assert_eq!(budget.expiries.len(), budget.entries.len());
            }
        }
    }
}
