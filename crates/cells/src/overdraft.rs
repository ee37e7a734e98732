//! Overdrafts: debts of buckets beyond what their state can represent.
//!
//! A bucket's state is at most its burst in debt, so that a wrong debit denies callers only for a short time. Between
//! cells that is too little where the burst is small beside the rate: with 1,000/s and a burst of 10, two other cells
//! admit 400 in a tick, and of a debit of 400 all but 20 would be forgotten, in every tick. So what does not fit is
//! kept here: how much it is, and the instant at which the bucket is full again. The counter denies until its own state can
//! represent that; then it is debited what is kept here. A refund of another cell is taken off that first, and the rest off
//! the state. The table is bounded; when it is full, the overdraft that ends first is dropped.
//!
//! The instant alone was rejected: a state would be debited what it lacks to it, also what another node of the cell has
//! refunded in the store meanwhile.
//!
//! An instant alone is not a number of units: an overdraft has the scale of the limit that reported it, as a bucket's state
//! has, and a limit with another one (a tier, another revision of the rules) converts what is owed to units and back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, CounterId, Limit, LimitParams, Outcome, Scale, TimeDelta, Timestamp, Verdict};

const MAX: usize = 65_536;
/// More units than any bucket owes.
const MAX_UNITS: u128 = 1 << 42;

/// Debt of a bucket beyond its state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overdraft {
    /// When the bucket is full again, after all of its debt.
    pub(crate) full_at: Timestamp,
    /// The time in which the part of the debt is restored that the state does not have.
    beyond: TimeDelta,
    scale: Scale,
}

impl Overdraft {
    /// Returns the time in which a bucket of this arithmetic restores what is owed.
    pub(crate) fn ahead(&self, time: &BucketTime, now: Timestamp) -> TimeDelta {
        converted(self.full_at.since(now), self.scale, time.scale, u128::div_ceil)
    }

    /// Returns the time in which it restores what the state does not have. Nothing has been restored of that before the state
    /// is full.
    fn beyond(&self, time: &BucketTime, now: Timestamp) -> TimeDelta {
        converted(self.beyond.min(self.full_at.since(now)), self.scale, time.scale, u128::div_ceil)
    }

    /// Returns the units that the state does not have.
    pub(crate) fn units(&self, time: &BucketTime, now: Timestamp) -> u64 {
        time.units_up(self.beyond(time, now))
    }
}

/// Returns the time in which units are restored in another scale than the one in which it takes `time`. `divide` rounds.
fn converted(time: TimeDelta, from: Scale, to: Scale, divide: fn(u128, u128) -> u128) -> TimeDelta {
    if from == to {
        return time;
    }
    let [k, unit, other_k, other_unit] =
        [from.k, from.unit, to.k, to.unit].map(|part| u128::from(part.max(1)));
    let parts = u128::from(time.as_micros()) * k;
    // At most 2^92 and 2^100.
    let (whole, rest) = ((parts / unit).min(MAX_UNITS) * other_unit, divide(parts % unit * other_unit, unit));
    to_delta(divide(whole + rest, other_k))
}

fn to_delta(micros: u128) -> TimeDelta {
    TimeDelta::from_micros(u64::try_from(micros).unwrap_or(u64::MAX / 4).min(u64::MAX / 4))
}

/// Overdrawn buckets.
#[derive(Default)]
pub(crate) struct Overdrafts {
    all: Mutex<HashMap<CounterId, Overdraft>>,
    count: AtomicUsize,
    dropped: AtomicU64,
}

/// The arithmetic of a bucket, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BucketTime {
    k: u64,
    interval: u64,
    scale: Scale,
    /// Maximum time after which a debited bucket is full again: its burst used, and as much owed.
    pub(crate) max_ahead: u64,
}

impl BucketTime {
    /// Returns the arithmetic of a charge's limit, if it is a bucket.
    pub(crate) fn of(charge: &Charge<'_>) -> Option<Self> {
        let LimitParams::Bucket { k, interval, unit, .. } = charge.limit.params() else { return None };
        let mut time =
            Self { k: k.max(1), interval: interval.max(1), scale: Scale { k, unit }, max_ahead: 0 };
        time.max_ahead = time.time(2 * charge.limit.capacity()).as_micros();
        Some(time)
    }

    /// Returns the units that a bucket which is full after `ahead` can still be debited.
    pub(crate) fn room(&self, ahead: TimeDelta) -> u64 {
        self.units(self.max_ahead.saturating_sub(ahead.as_micros()))
    }

    pub(crate) fn units(&self, micros: u64) -> u64 {
        u64::try_from(u128::from(micros) * u128::from(self.k) / u128::from(self.interval)).unwrap_or(u64::MAX)
    }

    /// Returns whether a state can represent a bucket that is full after `ahead`.
    pub(crate) fn is_held(&self, ahead: TimeDelta) -> bool {
        ahead.as_micros() <= self.max_ahead
    }

    /// Returns the units of a time that was rounded up to microseconds; a part of one counts as one.
    fn units_up(&self, time: TimeDelta) -> u64 {
        let parts = u128::from(time.as_micros().saturating_sub(1)) * u128::from(self.k);
        u64::try_from(parts.div_ceil(u128::from(self.interval))).unwrap_or(u64::MAX)
    }

    /// Returns the time that units take to be restored, rounded up.
    pub(crate) fn time(&self, units: u64) -> TimeDelta {
        to_delta((u128::from(units) * u128::from(self.interval)).div_ceil(u128::from(self.k)))
    }
}

impl Overdrafts {
    fn lock(&self) -> MutexGuard<'_, HashMap<CounterId, Overdraft>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no bucket is overdrawn; cheap, for every request.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn get(&self, id: CounterId) -> Option<Overdraft> {
        if self.is_empty() { None } else { self.lock().get(&id).copied() }
    }

    /// Moves the instant at which a bucket is full again by `more`, or sets it to `otherwise` if it is not overdrawn; never
    /// beyond `latest`. All are times of `time`. A debt that is beyond that already stays as it is.
    pub(crate) fn extend(
        &self,
        id: CounterId,
        time: &BucketTime,
        more: TimeDelta,
        (otherwise, latest): (Timestamp, Timestamp),
        now: Timestamp,
    ) {
        let mut all = self.lock();
        let known = all.get(&id).filter(|known| known.full_at > now);
        let known = known.map(|known| (now + known.ahead(time, now), known.beyond(time, now)));
        let (full_at, beyond) = match known {
            None => (otherwise.min(latest), more),
            Some((before, beyond)) => {
                let full_at = (before + more).min(latest);
                if full_at <= before {
                    return;
                }
                (full_at, TimeDelta::from_micros(beyond.as_micros() + full_at.since(before).as_micros()))
            }
        };
        if all.len() >= MAX && !all.contains_key(&id) {
            let soonest = all.iter().take(8).min_by_key(|(_, one)| one.full_at).map(|(id, _)| *id);
            soonest.and_then(|id| all.remove(&id));
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        all.insert(id, Overdraft { full_at, beyond, scale: time.scale });
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Returns the number of overdrafts that were dropped because there were too many.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Moves the instant at which a bucket is full again back by `less`, a time of `time`, which was refunded to its state.
    pub(crate) fn shorten(&self, id: CounterId, time: &BucketTime, less: TimeDelta) {
        if let Some(known) = self.lock().get_mut(&id) {
            known.full_at = known.full_at - converted(less, time.scale, known.scale, |units, by| units / by);
        }
    }

    /// The same for what was refunded of the part that the state does not have.
    pub(crate) fn reduce(&self, id: CounterId, time: &BucketTime, less: TimeDelta) {
        if let Some(known) = self.lock().get_mut(&id) {
            let less = converted(less, time.scale, known.scale, |units, by| units / by);
            known.full_at = known.full_at - less;
            known.beyond = TimeDelta::from_micros(known.beyond.as_micros().saturating_sub(less.as_micros()));
        }
    }

    /// Ends an overdraft. Returns whether there was one.
    pub(crate) fn remove(&self, id: CounterId) -> bool {
        let mut all = self.lock();
        let is_known = all.remove(&id).is_some();
        self.count.store(all.len(), Ordering::Relaxed);
        is_known
    }

    /// Keeps an overdraft that was removed, and could not be debited.
    pub(crate) fn put_back(&self, id: CounterId, known: Overdraft) {
        let mut all = self.lock();
        all.entry(id).or_insert(known);
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Drops what has ended: a bucket that is full again owes nothing.
    pub(crate) fn sweep(&self, now: Timestamp) {
        if !self.is_empty() {
            let mut all = self.lock();
            all.retain(|_, one| one.full_at > now);
            self.count.store(all.len(), Ordering::Relaxed);
        }
    }
}

/// Returns the limit by which a bucket's state shows how much more it can be debited: that with twice the burst, where a state
/// of both has the same form. What it says is right whichever limit has written the state.
pub(crate) fn whole_bucket(limit: &Limit) -> Option<Limit> {
    let (whole, parts) = (limit.in_whole_units(), limit.parts_of_unit().max(1));
    let twice = whole.with_rate(whole.rate().clone(), Some(whole.capacity().saturating_mul(2))).ok()?;
    let is_same = twice.packed().is_some() == limit.packed().is_some();
    if is_same { twice.in_parts(parts) } else { None }
}

/// Returns the denial of a charge whose bucket is overdrawn. What is owed drains as the limit drains it that reported it.
pub(crate) fn denial(charge: &Charge<'_>, time: &BucketTime, known: &Overdraft, now: Timestamp) -> Outcome {
    let ahead = known.full_at.since(now);
    let spare = charge.limit.capacity().checked_sub(charge.cost.units());
    let restored = |units| converted(time.time(units), time.scale, known.scale, |units, by| units / by);
    let wait = |units| TimeDelta::from_micros(ahead.as_micros().saturating_sub(restored(units).as_micros()));
    let next_after = charge.limit.capacity().checked_sub(1).map(wait).unwrap_or_default();
    Outcome {
        verdict: Verdict::Denied { retry_after: spare.map(wait) },
        remaining: 0,
        next_after,
        reset_after: ahead,
    }
}
