//! Late peers: a cell whose report of consumption does not come is assumed to go on at its last rate.
//!
//! The units that its overdue reports would have contained are kept free when a request is decided: the counter is
//! charged with a burst that is smaller by them. Nothing is written, so nothing has to be undone or can be counted twice
//! when the report comes: it is debited like any other, and the assumption ends with it. A cell that keeps units free
//! admits a subset of what it would admit without, so the bound of `shared` holds as it is.
//!
//! What is assumed of a peer's counter is the smallest of
//! - the rate of its last two reports, whichever is smaller: one burst is no rate;
//! - what the limit could have given: its burst, less what the other cells have reported and still counts;
//! - that rate for the time in which a burst is restored, or since the window began: what was used before counts no
//!   longer. So a peer that uses a quarter of the rate leaves this cell three quarters of a burst, and of the rate.
//!
//! The assumption begins when a report is one interval late and ends with the silence time, after which the cells decide by
//! their shares (`regional`).
//!
//! Rejected: debiting the assumed units in advance and the difference later. A peer that pauses and then consumes all at
//! once would find the units restored at the others that were debited for it before, so the bound would grow by what was
//! assumed; and refunding only what time has not restored counts the rest twice, wherever the burst is short.

use crate::message::Hello;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tollgate_core::{Charge, CounterId, Limit, TimeDelta, Timestamp};

/// Maximum number of counters in the reports of all senders.
const MAX_COUNTERS: usize = 131_072;
/// Maximum number of processes whose reports are remembered.
const MAX_SENDERS: usize = 1_024;

/// One report: units by counter, in the time that it covers.
#[derive(Debug, Default)]
struct Report {
    covers: TimeDelta,
    /// Units in the order in which they came. Almost every report is forgotten before its sender is late: only then are they
    /// looked up.
    listed: Vec<(CounterId, u64)>,
    /// Units of a late sender, and of one whose counters do not all find room.
    units: HashMap<CounterId, u64, RandomState>,
}

impl Report {
    /// Returns the number of counters that it takes room for: twice that of one that is listed twice.
    fn len(&self) -> usize {
        self.listed.len() + self.units.len()
    }

    /// Begins a new report.
    fn reset(&mut self, covers: TimeDelta) {
        self.covers = covers;
        // The memory of the list is used again, that of the map is needed seldom.
        self.listed.clear();
        self.units = HashMap::default();
    }

    /// Makes the units of all counters known to [`Self::units_in`].
    fn index(&mut self) {
        for (id, units) in self.listed.drain(..) {
            let known = self.units.entry(id).or_default();
            *known = known.saturating_add(units);
        }
    }

    /// Adds units where there is no room for all as they come: each counter once, and no more than `room` new ones.
    #[cold]
    fn add_known(&mut self, units: &mut dyn Iterator<Item = (CounterId, u64)>, room: usize) {
        let most = self.len() + room;
        self.index();
        for (id, units) in units {
            // Of what finds no room nothing is assumed.
            if self.units.len() < most || self.units.contains_key(&id) {
                let known = self.units.entry(id).or_default();
                *known = known.saturating_add(units);
            }
        }
    }

    /// Returns the units that this report's rate gives a counter in `span`.
    fn units_in(&self, id: CounterId, span: TimeDelta) -> u64 {
        let units = self.units.get(&id).copied().unwrap_or(0);
        scaled(units, span, self.covers)
    }
}

/// A process of another cell.
#[derive(Debug)]
struct Sender {
    cell: String,
    /// When its last report came.
    reported_at: Timestamp,
    last: Report,
    before: Report,
    /// Time of its reports that are overdue; zero if none is.
    overdue: TimeDelta,
}

/// The last reports of other cells, and which of them are late.
#[derive(Debug, Default)]
pub(crate) struct LatePeers {
    senders: RwLock<HashMap<u64, Sender, RandomState>>,
    late: AtomicUsize,
}

impl LatePeers {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<u64, Sender, RandomState>> {
        self.senders.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<u64, Sender, RandomState>> {
        self.senders.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of processes that are late.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.late.load(Ordering::Relaxed)
    }

    /// Records a report that has been applied. `covers` is the time in which its units were consumed: zero if it continues
    /// the report before it, `None` if the sender does not say. `ids` are those of the charges' counters.
    pub(crate) fn on_report(
        &self,
        from: &Hello,
        covers: Option<TimeDelta>,
        charges: &[Charge<'_>],
        ids: &[CounterId],
        now: Timestamp,
    ) {
        let mut senders = self.write();
        let Some(covers) = covers else {
            senders.remove(&from.incarnation);
            return self.recount(&senders);
        };
        if senders.len() >= MAX_SENDERS && !senders.contains_key(&from.incarnation) {
            return;
        }
        let known: usize = senders.values().map(|one| one.last.len() + one.before.len()).sum();
        let room = MAX_COUNTERS.saturating_sub(known);
        let sender = senders.entry(from.incarnation).or_insert_with(|| Sender {
            cell: from.cell.clone(),
            reported_at: now,
            last: Report::default(),
            before: Report::default(),
            overdue: TimeDelta::ZERO,
        });
        if covers > TimeDelta::ZERO {
            // The memory of the report before the last is used again.
            std::mem::swap(&mut sender.before, &mut sender.last);
            sender.last.reset(covers);
        }
        (sender.reported_at, sender.overdue) = (now, TimeDelta::ZERO);
        let units = |charge: &Charge<'_>| match charge.limit.parts_of_unit() {
            0 | 1 => charge.cost.units(),
            parts => charge.cost.units().div_ceil(parts),
        };
        let taken = charges.iter().zip(ids).filter(|(charge, _)| !charge.cost.is_refund());
        let mut units = taken.map(|(charge, id)| (*id, units(charge)));
        match charges.len() <= room {
            true => sender.last.listed.extend(units),
            false => sender.last.add_known(&mut units, room),
        }
        self.recount(&senders);
    }

    /// Looks who is late. Called once in a tick, so that a counter's limit changes no more often. `is_silent` is whether a
    /// cell does not answer: what it consumes is not of this cell's share.
    pub(crate) fn refresh(
        &self,
        tick: TimeDelta,
        silence: TimeDelta,
        is_silent: impl Fn(&str) -> bool,
        now: Timestamp,
    ) {
        if self.read().is_empty() {
            return;
        }
        let mut senders = self.write();
        senders.retain(|_, sender| now.since(sender.reported_at) <= silence);
        for sender in senders.values_mut() {
            let interval = sender.last.covers.max(tick).min(silence);
            let age = now.since(sender.reported_at);
            let is_late = age.as_micros() > 2 * interval.as_micros() && !is_silent(&sender.cell);
            let overdue = if is_late { age.as_micros() - interval.as_micros() } else { 0 };
            sender.overdue = TimeDelta::from_micros(overdue);
            if is_late {
                sender.last.index();
                sender.before.index();
            }
        }
        self.recount(&senders);
    }

    fn recount(&self, senders: &HashMap<u64, Sender, RandomState>) {
        let late = senders.values().filter(|sender| sender.overdue > TimeDelta::ZERO).count();
        self.late.store(late, Ordering::Relaxed);
    }

    /// Returns whether a late peer may have used a counter.
    pub(crate) fn has(&self, id: CounterId) -> bool {
        let is_used = |sender: &Sender| {
            sender.overdue > TimeDelta::ZERO
                && sender.last.units.contains_key(&id)
                && sender.before.units.contains_key(&id)
        };
        self.count() > 0 && self.read().values().any(is_used)
    }

    /// Returns the units of a charge's counter that late peers have used since their last reports, if they go on as
    /// before.
    pub(crate) fn expected(&self, charge: &Charge<'_>, now: Timestamp) -> u64 {
        let (id, counts) = (charge.key.id(), counting_time(charge, now));
        let late = |sender: &&Sender| sender.overdue > TimeDelta::ZERO;
        let of = |sender: &Sender| {
            let span = sender.overdue.min(counts);
            sender.last.units_in(id, span).min(sender.before.units_in(id, span))
        };
        self.read().values().filter(late).map(of).fold(0, u64::saturating_add)
    }
}

/// Returns the time for which what a late peer uses counts, at most: until it is restored, or since the window began.
fn counting_time(charge: &Charge<'_>, now: Timestamp) -> TimeDelta {
    let limit: &Limit = charge.limit;
    let rate = limit.rate();
    let restored = scaled(rate.period.length().as_micros(), micros(limit.capacity()), micros(rate.count));
    let restored = TimeDelta::from_micros(restored.min(u64::MAX / 4));
    match limit.window(now, charge.key.stable_hash()) {
        Some((start, _)) => restored.min(now.since(start)),
        None => restored,
    }
}

const fn micros(number: u64) -> TimeDelta {
    TimeDelta::from_micros(number)
}

/// Returns `units · part ÷ whole`.
fn scaled(units: u64, part: TimeDelta, whole: TimeDelta) -> u64 {
    let product = u128::from(units) * u128::from(part.as_micros());
    u64::try_from(product / u128::from(whole.as_micros().max(1))).unwrap_or(u64::MAX)
}
