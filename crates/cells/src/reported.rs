//! What a batch reports of each counter: its entries added up before anything is debited.
//!
//! A counter's state is at most its limit in debt. If a debit beyond that were applied first and the refund beside it
//! after, the refund would take off units that the debit never added: what this cell and others have consumed. A sender
//! may report a counter twice in one batch, and under several limits while one is changed.

use crate::message::Batch;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use tollgate_core::{CounterId, CounterKey, Limit, LimitParams};

/// What a batch reports of one counter.
#[derive(Debug, PartialEq)]
pub(crate) struct Reported {
    pub(crate) id: CounterId,
    /// Units of all its entries, by the limit that applies; negative if more was refunded.
    pub(crate) units: i64,
    /// The entry whose limit applies.
    pub(crate) entry: usize,
    /// Its other entries.
    others: Vec<usize>,
}

impl Reported {
    /// Returns its entries.
    pub(crate) fn entries(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::once(self.entry).chain(self.others.iter().copied())
    }
}

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
pub(crate) fn add_up(batch: &Batch, is_wanted: impl Fn(usize) -> bool) -> Vec<Reported> {
    let Batch { counters, entries, .. } = batch;
    let units: Vec<Unit> = counters.iter().map(|counter| unit(&counter.limit)).collect();
    let mut all: Vec<Reported> = Vec::with_capacity(entries.len());
    let mut found: HashMap<(CounterId, Unit), usize, RandomState> =
        HashMap::with_capacity_and_hasher(entries.len(), RandomState::default());
    let mut parts = Vec::new();
    for (at, entry) in entries.iter().enumerate().filter(|(at, _)| is_wanted(*at)) {
        let place = entry.counter as usize;
        let Some(counter) = counters.get(place) else { continue };
        parts.clear();
        entry.values.add_to(&mut parts);
        let id = CounterKey { scope: &counter.scope, parts: &parts }.id();
        match found.entry((id, units[place])) {
            Entry::Occupied(known) => all[*known.get()].others.push(at),
            Entry::Vacant(new) => {
                new.insert(all.len());
                all.push(Reported { id, units: entry.units, entry: at, others: Vec::new() });
            }
        }
    }
    let limit = |at: usize| &counters[entries[at].counter as usize].limit;
    for one in all.iter_mut().filter(|one| !one.others.is_empty()) {
        sum(one, |at| (entries[at].units, limit(at).parts_of_unit()));
    }
    all
}

/// Adds up the entries of a counter. `entry` returns the units of one, and how many of these are one of the counter: a
/// refund may be in parts of a unit.
fn sum(one: &mut Reported, entry: impl Fn(usize) -> (i64, u64)) {
    let finest = one.entries().map(|at| entry(at).1).max().unwrap_or(1);
    let in_finest = |at: usize| {
        let (units, parts) = entry(at);
        i128::from(units) * i128::from(finest / parts.max(1))
    };
    let total: i128 = one.entries().map(in_finest).sum();
    // The limit of most of the units: what was consumed is in whole ones, rounded up, and refunds in the finest.
    let size = |at: &usize| match total < 0 {
        true => (entry(*at).1, -in_finest(*at)),
        false => (0, in_finest(*at)),
    };
    if let Some(at) = (0..one.others.len()).max_by_key(|at| size(&one.others[*at]))
        && size(&one.others[at]) > size(&one.entry)
    {
        std::mem::swap(&mut one.others[at], &mut one.entry);
    }
    let each = i128::from(finest / entry(one.entry).1.max(1));
    let units = if total < 0 { total / each } else { (total + each - 1) / each };
    one.units = i64::try_from(units).unwrap_or(if total < 0 { i64::MIN } else { i64::MAX });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charge_codec::SentCounter;
    use crate::key_values::KeyValues;
    use crate::message::BatchEntry;
    use tollgate_core::{Algorithm, KeyPart, LimitSpec, Rate, Scope, TimeDelta};

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
        let all = add_up(&batch, |at| at != 1);
        let found: Vec<_> =
            all.iter().map(|one| (one.units, one.entry, one.entries().collect::<Vec<_>>())).collect();
        let expected = [(1_000, 0, vec![0, 2]), (11, 4, vec![4, 3]), (-4, 6, vec![6, 5])];
        assert_eq!(found, expected);
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
        for (units, refund, expected) in [(5, -38, (2, 1)), (5, -50, (0, 1)), (3, -38, (-8, 0))] {
            let all = add_up(&batch(units, refund), |_| true);
            assert_eq!((all.len(), (all[0].units, all[0].entry)), (1, expected), "{units} {refund}");
        }
    }
}
