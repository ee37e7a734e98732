//! Overdrafts: debts of buckets beyond what their state can represent.
//!
//! A bucket's state is at most its burst in debt, so that a wrong debit denies callers only for a short time. Between
//! cells that is too little where the burst is small beside the rate: with 1,000/s and a burst of 10, two other cells
//! admit 400 in a tick, and of a debit of 400 all but 20 would be forgotten, in every tick. So what does not fit is
//! kept here as the instant at which the bucket is full again, and the counter denies until its own state can represent
//! that; then it is debited the rest. A refund moves the instant back first, and reaches the state only where that is
//! then able to represent the debt. The table is bounded; when it is full, the overdraft that ends first is dropped.
//!
//! An instant alone is not a number of units: an overdraft has the scale of the limit that reported it, as a bucket's state
//! has, and a limit with another one (a tier, another revision of the rules) converts what is owed to units and back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Charge, Cost, CounterId, Limit, LimitParams, Outcome, Scale, TimeDelta, Timestamp, Verdict,
};

const MAX: usize = 65_536;
/// More units than any bucket owes.
const MAX_UNITS: u128 = 1 << 42;

/// Debt of a bucket, with what its state has of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overdraft {
    /// When the bucket is full again.
    pub(crate) full_at: Timestamp,
    scale: Scale,
}

impl Overdraft {
    /// Returns the time in which a bucket of this arithmetic restores what is owed.
    pub(crate) fn ahead(&self, time: &BucketTime, now: Timestamp) -> TimeDelta {
        converted(self.full_at.since(now), self.scale, time.scale, u128::div_ceil)
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

    /// Returns what turns a state with this much room into one that is full after `ahead`, if it can be. It refunds at most
    /// `refunded` units: what a state owes more was not part of the overdraft.
    pub(crate) fn settling(&self, ahead: TimeDelta, room: u64, refunded: u64) -> Cost {
        let held = self.units(self.max_ahead).saturating_sub(room);
        let owed = if ahead == TimeDelta::ZERO { 0 } else { self.units(ahead.as_micros()).saturating_add(1) };
        match owed.checked_sub(held) {
            Some(missing) => Cost::new(missing),
            None => match (held - owed).min(refunded) {
                0 => Cost::PEEK,
                units => Cost::refund(units),
            },
        }
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
        let known =
            all.get(&id).filter(|known| known.full_at > now).map(|known| now + known.ahead(time, now));
        let full_at = known.map_or(otherwise, |full_at| full_at + more).min(latest);
        if known.is_some_and(|known| known >= full_at) {
            return;
        }
        if all.len() >= MAX && !all.contains_key(&id) {
            let soonest = all.iter().take(8).min_by_key(|(_, one)| one.full_at).map(|(id, _)| *id);
            soonest.and_then(|id| all.remove(&id));
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        all.insert(id, Overdraft { full_at, scale: time.scale });
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Returns the number of overdrafts that were dropped because there were too many.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Moves the instant at which a bucket is full again back by `less`, a time of `time`.
    pub(crate) fn shorten(&self, id: CounterId, time: &BucketTime, less: TimeDelta) {
        if let Some(known) = self.lock().get_mut(&id) {
            known.full_at = known.full_at - converted(less, time.scale, known.scale, |units, by| units / by);
        }
    }

    /// Ends an overdraft. Returns whether there was one.
    pub(crate) fn remove(&self, id: CounterId) -> bool {
        let mut all = self.lock();
        let is_known = all.remove(&id).is_some();
        self.count.store(all.len(), Ordering::Relaxed);
        is_known
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
    Outcome { verdict: Verdict::Denied { retry_after: spare.map(wait) }, remaining: 0, reset_after: ahead }
}
