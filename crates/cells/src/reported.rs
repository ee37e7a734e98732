//! What a batch reports of each counter: its entries added up before anything is debited.
//!
//! A counter's state is at most its limit in debt. If a debit beyond that were applied first and the refund beside it
//! after, the refund would take off units that the debit never added: what this cell and others have consumed. A sender
//! may report a counter twice in one batch, and under several limits while one is changed. Refunds of a log say when their
//! units were taken. Only what was taken a moment ago is added up with what was consumed: of another one, the log would keep
//! the units of then instead of those of now, and forget them too early.

use crate::message::Batch;
use foldhash::fast::RandomState;
use std::cmp::Reverse;
use std::hash::BuildHasher;
use std::ops::Range;
use tollgate_core::{CounterId, CounterKey, KeyPart, Limit, LimitParams, TimeDelta, Timestamp};

/// What a batch reports of one counter.
#[derive(Debug, PartialEq)]
pub(crate) struct Reported {
    pub(crate) id: CounterId,
    /// Units of all its entries, by the limit that applies; negative if more was refunded.
    pub(crate) units: i64,
    /// The entry whose limit applies.
    pub(crate) entry: usize,
    /// Where the values of its key are in the list of all.
    pub(crate) parts: Range<usize>,
    /// Its other entries.
    others: Vec<usize>,
}

impl Reported {
    /// Returns its entries.
    pub(crate) fn entries(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::once(self.entry).chain(self.others.iter().copied())
    }
}

/// What a batch reports.
pub(crate) struct Reports<'a> {
    /// By counter.
    pub(crate) counters: Vec<Reported>,
    /// Values of their keys: read once from what was received.
    pub(crate) parts: Vec<KeyPart<'a>>,
}

/// Microseconds. What is reported may be so old anyway.
const A_MOMENT: u64 = 1_000_000;

/// What makes units comparable: a bucket's scale. Units of other limits are units.
type Unit = (u64, u64);

fn unit(limit: &Limit) -> Unit {
    match limit.params() {
        LimitParams::Bucket { k, unit, .. } => (k, unit),
        _ => (0, 0),
    }
}

/// Adds up the entries of a batch that `is_wanted`, by counter, in the order of their first entries. Buckets of different
/// scales are not added up: they are there only while a limit is changed.
pub(crate) fn add_up(batch: &Batch, is_wanted: impl Fn(usize) -> bool) -> Reports<'_> {
    let Batch { counters, entries, .. } = batch;
    let units: Vec<Unit> = counters.iter().map(|counter| unit(&counter.limit)).collect();
    let mut all: Vec<Reported> = Vec::with_capacity(entries.len());
    let mut places = Places::new(entries.len());
    let mut parts: Vec<KeyPart<'_>> = Vec::with_capacity(entries.len());
    for (at, entry) in entries.iter().enumerate().filter(|(at, _)| is_wanted(*at)) {
        let place = entry.counter as usize;
        let Some(counter) = counters.get(place) else { continue };
        let first = parts.len();
        entry.values.add_to(&mut parts);
        let id = CounterKey { scope: &counter.scope, parts: &parts[first..] }.id();
        let is_same =
            |known: &Reported| known.id == id && units[entries[known.entry].counter as usize] == units[place];
        match places.find_or_insert(id, all.len(), |known| is_same(&all[known])) {
            Some(known) => {
                parts.truncate(first);
                all[known].others.push(at);
            }
            None => {
                let parts = first..parts.len();
                all.push(Reported { id, units: entry.units, entry: at, parts, others: Vec::new() });
            }
        }
    }
    let limit = |at: usize| &counters[entries[at].counter as usize].limit;
    let mut refunds = Vec::new();
    for one in all.iter_mut().filter(|one| !one.others.is_empty()) {
        if one.entries().any(|at| limit(at).refunds_of().is_some()) {
            // Times of a log are shifted by the key's phase.
            let (made_at, hash) = (Timestamp::from_micros(batch.made_at.unwrap_or(0)), one.id.1);
            let made_at = |at| made_at + limit(at).phase(hash);
            let age = |at| limit(at).refunds_of().map(|taken| made_at(at).since(taken)).unwrap_or_default();
            refunds.extend(split_refunds(one, |at| (entries[at].units, age(at))));
        } else {
            sum(one, |at| (entries[at].units, worth(limit(at))));
        }
    }
    all.extend(refunds);
    Reports { counters: all, parts }
}

/// Where counters are in a list, by their ids. The list has the ids, so that this takes four bytes for each: a map with a copy
/// of each id does not stay in the nearest caches.
struct Places {
    /// One more than the place; zero if there is none. At least half of them are.
    slots: Vec<u32>,
    /// An odd number, so that no choice of keys crowds some of the slots.
    factor: u64,
}

impl Places {
    /// Creates room for this many counters.
    fn new(most: usize) -> Self {
        let slots = (2 * most).next_power_of_two().max(2);
        Self { slots: vec![0; slots], factor: RandomState::default().hash_one(1_u8) | 1 }
    }

    /// Returns where a counter is. If it is nowhere, its place is `next`.
    fn find_or_insert(&mut self, id: CounterId, next: usize, is_it: impl Fn(usize) -> bool) -> Option<usize> {
        let bits = self.slots.len().trailing_zeros();
        let mut at = ((id.0 ^ id.1).wrapping_mul(self.factor) >> (u64::BITS - bits)) as usize;
        loop {
            match self.slots[at] {
                0 => {
                    self.slots[at] = next as u32 + 1;
                    return None;
                }
                known if is_it(known as usize - 1) => return Some(known as usize - 1),
                _ => at = (at + 1) & (self.slots.len() - 1),
            }
        }
    }
}

/// Returns what one unit of a limit is worth, in the measure that all limits of a scale have: a refund may be in parts of a
/// unit.
fn worth(limit: &Limit) -> u64 {
    match limit.params() {
        LimitParams::Bucket { interval, .. } => interval.max(1),
        _ => 1,
    }
}

/// Adds up the entries of a counter in the finest parts of a unit that one of them has: in whole ones, a charge that was
/// canceled a moment later would be rounded up to a unit. `entry` returns the units of one, and what each is worth.
fn sum(one: &mut Reported, entry: impl Fn(usize) -> (i64, u64)) {
    let total = |at: usize| i128::from(entry(at).0) * i128::from(entry(at).1);
    let all = one.entries().map(total).fold(0, i128::saturating_add);
    // The limit that counts in the finest parts, and of these that of most of the units.
    let size = |at: &usize| (Reverse(entry(*at).1), total(*at).saturating_mul(all.signum()));
    if let Some(at) = (0..one.others.len()).max_by_key(|at| size(&one.others[*at]))
        && size(&one.others[at]) > size(&one.entry)
    {
        std::mem::swap(&mut one.others[at], &mut one.entry);
    }
    // What is consumed is rounded up, and what is refunded down, where parts do not divide each other.
    let finest = i128::from(entry(one.entry).1);
    let units = all / finest + i128::from(all > 0 && all % finest > 0);
    one.units = i64::try_from(units).unwrap_or(if all < 0 { i64::MIN } else { i64::MAX });
}

/// Takes what was consumed of a log off its refunds of units that were taken a moment ago, the newest first. Returns the
/// other refunds; the last of those that were reduced stays with what reduced it, because a report is applied as a whole or
/// not at all. `entry` returns the units of one, and how long ago they were taken.
fn split_refunds(one: &mut Reported, entry: impl Fn(usize) -> (i64, TimeDelta)) -> Vec<Reported> {
    let units = |at: &usize| i128::from(entry(*at).0);
    let (mut refunds, mut reduced): (Vec<usize>, Vec<usize>) = one.entries().partition(|at| units(at) < 0);
    reduced.sort_by_key(|at| Reverse(units(at)));
    refunds.sort_by_key(|at| entry(*at).1);
    let mut total: i128 = reduced.iter().map(units).sum();
    let mut refunds = refunds.into_iter().peekable();
    while let Some(next) = refunds
        .next_if(|at| reduced.is_empty() || (total > 0 && entry(*at).1 <= TimeDelta::from_micros(A_MOMENT)))
    {
        total += units(&next);
        reduced.push(next);
    }
    // What is left was consumed under the first, or refunded by the last.
    let at = if total > 0 { 0 } else { reduced.len() - 1 };
    one.entry = reduced.swap_remove(at);
    one.others = reduced;
    one.units = i64::try_from(total).unwrap_or(if total < 0 { i64::MIN } else { i64::MAX });
    let apart = |at| {
        let (units, parts) = (entry(at).0, one.parts.clone());
        Reported { id: one.id, units, entry: at, parts, others: Vec::new() }
    };
    refunds.map(apart).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charge_codec::SentCounter;
    use crate::key_values::KeyValues;
    use crate::message::BatchEntry;
    use tollgate_core::{Algorithm, LimitSpec, Rate, Scope};

    fn counter(per_day: u64) -> SentCounter {
        let spec = LimitSpec::new(Algorithm::FixedWindow, Rate::per(per_day, TimeDelta::from_secs(86_400)));
        SentCounter { scope: Scope::new("api|key"), limit: spec.build().expect("valid") }
    }

    fn entry(counter: u32, value: &str, units: i64) -> BatchEntry {
        BatchEntry { counter, values: KeyValues::new(&[KeyPart::Text(value)]), units }
    }

    #[test]
    fn each_counter_is_reported_once_under_the_limit_of_most_of_its_units() {
        let batch = Batch {
            counters: vec![counter(1_000), counter(2_000)],
            entries: vec![
                entry(0, "a", 4_000),
                entry(0, "b", 1),
                entry(1, "a", -3_000),
                entry(0, "c", 5),
                entry(1, "c", 6),
                entry(0, "d", 5),
                entry(0, "d", -9),
            ],
            ..Batch::default()
        };
        let all = add_up(&batch, |at| at != 1).counters;
        let found: Vec<_> =
            all.iter().map(|one| (one.units, one.entry, one.entries().collect::<Vec<_>>())).collect();
        let expected = [(1_000, 0, vec![0, 2]), (11, 4, vec![4, 3]), (-4, 6, vec![6, 5])];
        assert_eq!(found, expected);
    }

    /// Without it units that were taken a minute ago are looked for among those of an hour ago, where few are logged, and stay
    /// counted for a period.
    #[test]
    fn refunds_of_a_log_keep_their_times() {
        let spec = LimitSpec::new(Algorithm::SlidingLog, Rate::per(100, TimeDelta::from_secs(86_400)));
        let taken = SentCounter { scope: Scope::new("api|key"), limit: spec.build().expect("valid") };
        let refunded = |at| SentCounter {
            limit: taken.limit.refunding(Some(Timestamp::from_secs(at))),
            ..taken.clone()
        };
        let counters = vec![taken.clone(), refunded(10), refunded(30), refunded(20)];
        let added_up = |units: [i64; 4]| {
            let entries = (0..).zip(units).map(|(counter, units)| entry(counter, "a", units)).collect();
            let made_at = Some(31_000_000);
            let batch = Batch { counters: counters.clone(), entries, made_at, ..Batch::default() };
            let all = add_up(&batch, |at| units[at] != 0).counters;
            let mut found: Vec<usize> = all.iter().flat_map(Reported::entries).collect();
            found.sort_unstable();
            assert!(found.into_iter().eq((0..4).filter(|at| units[*at] != 0)), "each entry once");
            all.iter().map(|one| (one.units, one.entry)).collect::<Vec<_>>()
        };
        // Of the times 10, 30 and 20 only the second is a moment ago.
        assert_eq!(added_up([0, -5, -2, -3]), [(-2, 2), (-3, 3), (-5, 1)]);
        assert_eq!(added_up([1, -5, -2, -3]), [(-1, 2), (-3, 3), (-5, 1)]);
        assert_eq!(added_up([2, -5, -2, -3]), [(0, 2), (-3, 3), (-5, 1)]);
        assert_eq!(added_up([12, -5, -2, -3]), [(10, 0), (-3, 3), (-5, 1)]);
    }

    /// Without it a reservation that is canceled some time later erases all that other cells have consumed.
    #[test]
    fn a_refund_in_parts_of_a_unit_is_taken_off_whole_units() {
        let spec = LimitSpec::new(Algorithm::Gcra, Rate::per(10, TimeDelta::from_secs(3_600)));
        let whole = SentCounter { scope: Scope::new("api|key"), limit: spec.build().expect("valid") };
        let parts = SentCounter { limit: whole.limit.in_parts(10).expect("parts"), ..whole.clone() };
        let batch = |units, refund| Batch {
            counters: vec![whole.clone(), parts.clone()],
            entries: vec![entry(1, "a", refund), entry(0, "a", units)],
            ..Batch::default()
        };
        for (units, refund, expected) in [(5, -38, (12, 0)), (5, -50, (0, 0)), (3, -38, (-8, 0))] {
            let all = add_up(&batch(units, refund), |_| true).counters;
            assert_eq!((all.len(), (all[0].units, all[0].entry)), (1, expected), "{units} {refund}");
        }
        // Parts that do not divide each other: 1 + 7/8 - 5/12 units are 17.5 twelfths.
        let [eighths, twelfths] = [8, 12]
            .map(|of| SentCounter { limit: whole.limit.in_parts(of).expect("parts"), ..whole.clone() });
        let batch = |sign: i64| Batch {
            counters: vec![whole.clone(), eighths.clone(), twelfths.clone()],
            entries: vec![entry(0, "a", sign), entry(1, "a", 7 * sign), entry(2, "a", -5 * sign)],
            ..Batch::default()
        };
        for (sign, expected) in [(1, 18), (-1, -17)] {
            assert_eq!(add_up(&batch(sign), |_| true).counters[0].units, expected, "{sign}");
        }
    }
}
