//! Refunds: how much of an old charge may still be undone.
//!
//! Units are replenished over time. Refunding the same units a second time would create units: a bucket that has
//! refilled and then been spent by other requests must not be refilled again by a late refund. The amount computed here
//! is safe whatever happened in between; it is exact when the refund follows immediately, and falls to zero as units
//! are replenished. Rejected: recording each charge to refund exactly its own rest, because it needs memory for each
//! charge.
//!
//! A log knows when each unit was taken. It counts one for a period and then forgets it, and a refund removes the very
//! units that were logged, however late. A bucket that was in use before a charge restores those units first; but a refund
//! of them would bring this charge's forward, which nothing records, so its own count from when it was made.
//!
//! A bucket refills in time, not in units: [`Limit::refund`] returns to the microsecond what it has not refilled, so that
//! a unit which takes an hour to come back is not lost to the first moment of it.

use crate::algorithm::bucket::Bucket;
use crate::algorithm::sliding_window::window_start;
use crate::cost::Cost;
use crate::limit::{Limit, Shape};
use crate::rate::Rate;
use crate::time::{TimeDelta, Timestamp};

impl Limit {
    /// Returns whether units that were taken ahead can be returned to a counter that resets after `reset_after`: for
    /// buckets, only if no later charge was applied. Windows accept returns regardless of later charges.
    #[must_use]
    pub fn can_return(&self, full_at: Timestamp, now: Timestamp, reset_after: TimeDelta) -> bool {
        match self.shape {
            // If units are replenished faster than one per microsecond, two instants cannot be distinguished.
            Shape::Bucket(bucket) => bucket.interval >= bucket.k && now + reset_after == full_at,
            // Never taken ahead.
            Shape::Stepped(..) => false,
            _ => true,
        }
    }

    /// Returns the refund of `unused` of the `units` that were taken at `taken`; `None` if time has refilled them all. It
    /// is in units of the returned limit, which charges the same counter: in fractions of a unit where a bucket has
    /// refilled a part of one.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, State, TimeDelta, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_hour(nonzero!(5))).build()?;
    /// let (mut state, taken) = (State::default(), Timestamp::from_secs(1_000));
    /// let _ = limit.step(&mut state, taken, Cost::ONE);
    /// let later = taken + TimeDelta::from_secs(100);
    /// let (finer, cost) = limit.refund(1, 1, taken, later).ok_or(tollgate_core::LimitError::TooSlow)?;
    /// assert_eq!(finer.step(&mut state, later, cost).reset_after, TimeDelta::ZERO);
    /// assert_eq!(limit.step(&mut state, later, Cost::PEEK).remaining, 5);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn refund(&self, units: u64, unused: u64, taken: Timestamp, now: Timestamp) -> Option<(Self, Cost)> {
        let (Shape::Bucket(bucket) | Shape::Stepped(bucket, _)) = self.shape else {
            let units = self.refundable(units, taken, now).min(unused);
            return (units > 0).then(|| (self.refunding(Some(taken)), Cost::refund(units)));
        };
        let time = |units: u64| u128::from(units) * u128::from(bucket.interval);
        let passed = self.bucket_time(now).since(self.bucket_time(taken));
        let refilled = u128::from(passed.as_micros()) * u128::from(bucket.k);
        let left = time(units).saturating_sub(refilled);
        if unused == 0 || left == 0 {
            return None;
        }
        if left >= time(unused) {
            return Some((self.clone(), Cost::refund(unused)));
        }
        let finer = self.in_fractions(bucket.interval);
        let (Shape::Bucket(Bucket { interval, .. }) | Shape::Stepped(Bucket { interval, .. }, _)) =
            finer.shape
        else {
            return None;
        };
        let units = u64::try_from(left / u128::from(interval)).unwrap_or(u64::MAX);
        (units > 0).then(|| (finer, Cost::refund(units)))
    }

    /// Returns the limit whose refunds take units that were logged at `taken` or before; the newest if it is `None`. Only a log
    /// knows when each unit was taken: others are returned as they are.
    #[must_use]
    pub fn refunding(&self, taken: Option<Timestamp>) -> Self {
        let mut limit = self.clone();
        if let Shape::Log(of) = &mut limit.shape {
            *of = taken;
        }
        limit
    }

    /// Returns when the units were taken that refunds by this limit take back; `None` if it does not say.
    #[must_use]
    #[inline]
    pub const fn refunds_of(&self) -> Option<Timestamp> {
        match self.shape {
            Shape::Log(of) => of,
            _ => None,
        }
    }

    /// Returns the bucket that counts in the finest fractions of a unit that divide its interval evenly, so that its
    /// states have the same form.
    fn in_fractions(&self, interval: u64) -> Self {
        let most = Rate::MAX_COUNT / self.capacity.max(self.rate.count).max(1);
        let mut parts = interval;
        for prime in [2, 3, 5, 7] {
            while parts > most && parts.is_multiple_of(prime) {
                parts /= prime;
            }
        }
        self.in_parts(parts).unwrap_or_else(|| self.clone())
    }

    /// Returns the bucket that counts parts of a unit, this many of which are one; `None` if it cannot. It charges the same
    /// counter, in the same scale.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_hour(nonzero!(5))).build()?;
    /// let tenths = limit.in_parts(10).ok_or(tollgate_core::LimitError::TooSlow)?;
    /// assert_eq!((tenths.capacity(), tenths.parts_of_unit(), tenths.in_whole_units()), (50, 10, limit));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn in_parts(&self, parts: u64) -> Option<Self> {
        let most = Rate::MAX_COUNT / self.capacity.max(self.rate.count).max(1);
        let mut finer = self.clone();
        let (Shape::Bucket(bucket) | Shape::Stepped(bucket, _)) = &mut finer.shape else { return None };
        if parts == 0 || parts > most || !bucket.interval.is_multiple_of(parts) {
            return None;
        }
        // Its scale stays: what it refunds are parts of the same units.
        bucket.interval /= parts;
        bucket.burst *= parts;
        finer.rate.count *= parts;
        finer.capacity *= parts;
        Some(finer)
    }

    /// Returns how many of this limit's units are one of its counter: 1, unless it counts [parts](Self::in_parts).
    #[must_use]
    pub const fn parts_of_unit(&self) -> u64 {
        match self.shape {
            Shape::Bucket(bucket) | Shape::Stepped(bucket, _) if bucket.interval > 0 => {
                bucket.unit / bucket.interval
            }
            _ => 1,
        }
    }

    /// Returns the limit that counts whole units, of which this one counts [parts](Self::in_parts).
    #[must_use]
    pub fn in_whole_units(&self) -> Self {
        let parts = self.parts_of_unit();
        let mut whole = self.clone();
        if let Shape::Bucket(bucket) | Shape::Stepped(bucket, _) = &mut whole.shape
            && parts > 1
        {
            bucket.interval *= parts;
            bucket.burst /= parts;
            whole.rate.count /= parts;
            whole.capacity /= parts;
        }
        whole
    }

    /// Returns how many of the `units` taken at `taken` may be refunded at `now` without admitting more than the limit.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, TimeDelta, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10))).build()?;
    /// let taken = Timestamp::from_secs(1_000);
    /// assert_eq!(limit.refundable(8, taken, taken), 8);
    /// assert_eq!(limit.refundable(8, taken, taken + TimeDelta::from_millis(500)), 3); // five have come back by themselves
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn refundable(&self, units: u64, taken: Timestamp, now: Timestamp) -> u64 {
        let whole_if = |same| if same { units } else { 0 };
        match self.shape {
            Shape::Blocked => 0,
            Shape::Bucket(bucket) | Shape::Stepped(bucket, _) => {
                let passed = self.bucket_time(now).since(self.bucket_time(taken));
                let passed = u128::from(passed.as_micros()) * u128::from(bucket.k);
                let returned = passed.div_ceil(u128::from(bucket.interval));
                units.saturating_sub(u64::try_from(returned).unwrap_or(u64::MAX))
            }
            Shape::Fixed(_) => whole_if(self.window_at(taken) == self.window_at(now)),
            Shape::Sliding => {
                let period = self.rate().period.length();
                whole_if(window_start(taken, period) == window_start(now, period))
            }
            Shape::Strict(slots) => {
                whole_if(taken.as_micros() / slots.width == now.as_micros() / slots.width)
            }
            // For [`Limit::refund`], which says when they were taken.
            Shape::Log(_) => whole_if(now < taken + self.rate().period.length()),
            Shape::Permits => units,
        }
    }
}
