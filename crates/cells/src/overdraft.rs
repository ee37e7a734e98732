//! Overdrafts: debts of buckets beyond what their state can represent.
//!
//! A bucket's state is at most its burst in debt, so that a wrong debit denies callers only for a short time. Between
//! cells that is too little where the burst is small beside the rate: with 1,000/s and a burst of 10, two other cells
//! admit 400 in a tick, and of a debit of 400 all but 20 would be forgotten, in every tick. So what does not fit is
//! kept here as the instant at which the bucket is full again, and the counter denies until its own state can represent
//! that; then it is debited the rest. A refund moves the instant back first, and reaches the state only where that is
//! then able to represent the debt. The table is bounded; when it is full, the overdraft that ends first is dropped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Charge, Cost, CounterId, LimitParams, Outcome, TimeDelta, Timestamp, Verdict};

const MAX: usize = 65_536;

/// Overdrawn buckets, and when each is full again.
#[derive(Default)]
pub(crate) struct Overdrafts {
    full_at: Mutex<HashMap<CounterId, Timestamp>>,
    count: AtomicUsize,
    dropped: AtomicU64,
}

/// The arithmetic of a bucket, in microseconds.
pub(crate) struct BucketTime {
    k: u64,
    interval: u64,
    /// Maximum time after which a debited bucket is full again: its burst used, and as much owed.
    pub(crate) max_ahead: u64,
}

impl BucketTime {
    /// Returns the arithmetic of a charge's limit, if it is a bucket.
    pub(crate) fn of(charge: &Charge<'_>) -> Option<Self> {
        let LimitParams::Bucket { k, interval, .. } = charge.limit.params() else { return None };
        let mut time = Self { k: k.max(1), interval: interval.max(1), max_ahead: 0 };
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

    /// Returns what turns a state with this much room into one that is full after `ahead`, if it can be.
    pub(crate) fn settling(&self, ahead: TimeDelta, room: u64) -> Cost {
        let held = self.units(self.max_ahead).saturating_sub(room);
        let owed = if ahead == TimeDelta::ZERO { 0 } else { self.units(ahead.as_micros()).saturating_add(1) };
        if owed >= held { Cost::new(owed - held) } else { Cost::refund(held - owed) }
    }

    /// Returns the time that units take to be restored, rounded up.
    pub(crate) fn time(&self, units: u64) -> TimeDelta {
        let micros = (u128::from(units) * u128::from(self.interval)).div_ceil(u128::from(self.k));
        TimeDelta::from_micros(u64::try_from(micros).unwrap_or(u64::MAX / 4).min(u64::MAX / 4))
    }
}

impl Overdrafts {
    fn lock(&self) -> MutexGuard<'_, HashMap<CounterId, Timestamp>> {
        self.full_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no bucket is overdrawn; cheap, for every request.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn get(&self, id: CounterId) -> Option<Timestamp> {
        if self.is_empty() { None } else { self.lock().get(&id).copied() }
    }

    /// Moves the instant at which a bucket is full again by `more`, or sets it to `otherwise` if it is not overdrawn; never
    /// beyond `latest`.
    pub(crate) fn extend(
        &self,
        id: CounterId,
        more: TimeDelta,
        (otherwise, latest): (Timestamp, Timestamp),
        now: Timestamp,
    ) {
        let mut all = self.lock();
        let known = all.get(&id).filter(|full_at| **full_at > now).copied();
        let full_at = known.map_or(otherwise, |full_at| full_at + more).min(latest);
        if all.len() >= MAX && !all.contains_key(&id) {
            let soonest = all.iter().take(8).min_by_key(|(_, at)| **at).map(|(id, _)| *id);
            soonest.and_then(|id| all.remove(&id));
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        all.insert(id, full_at);
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// Returns the number of overdrafts that were dropped because there were too many.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Moves the instant at which a bucket is full again back by `less`.
    pub(crate) fn shorten(&self, id: CounterId, less: TimeDelta) {
        if let Some(full_at) = self.lock().get_mut(&id) {
            *full_at = *full_at - less;
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
            all.retain(|_, full_at| *full_at > now);
            self.count.store(all.len(), Ordering::Relaxed);
        }
    }
}

/// Returns the denial of a charge whose bucket is full again only at `full_at`.
pub(crate) fn denial(charge: &Charge<'_>, time: &BucketTime, full_at: Timestamp, now: Timestamp) -> Outcome {
    let ahead = full_at.since(now);
    let spare = charge.limit.capacity().checked_sub(charge.cost.units());
    let wait = |units| TimeDelta::from_micros(ahead.as_micros().saturating_sub(time.time(units).as_micros()));
    Outcome { verdict: Verdict::Denied { retry_after: spare.map(wait) }, remaining: 0, reset_after: ahead }
}
