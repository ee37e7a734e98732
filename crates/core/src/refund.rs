//! Refunds: how much of an old charge may still be undone.
//!
//! Units are replenished over time. Refunding the same units a second time would create units: a bucket that has
//! refilled and then been spent by other requests must not be refilled again by a late refund. The amount computed here
//! is safe whatever happened in between; it is exact when the refund follows immediately, and falls to zero as units
//! are replenished. Rejected: recording each charge to refund exactly its own rest, because it needs memory for each
//! charge.

use crate::algorithm::sliding_window::window_start;
use crate::limit::{Limit, Shape};
use crate::time::{TimeDelta, Timestamp};

impl Limit {
    /// Returns whether units that were taken ahead can be returned to a counter that resets after `reset_after`: for
    /// buckets, only if no later charge was applied. Windows accept returns regardless of later charges.
    #[must_use]
    pub fn can_return(&self, full_at: Timestamp, now: Timestamp, reset_after: TimeDelta) -> bool {
        match self.shape {
            // If units are replenished faster than one per microsecond, two instants cannot be distinguished.
            Shape::Bucket(bucket) => bucket.interval >= bucket.k && now + reset_after == full_at,
            _ => true,
        }
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
            Shape::Bucket(bucket) => {
                let passed = u128::from(now.since(taken).as_micros()) * u128::from(bucket.k);
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
            Shape::Log => whole_if(taken == now),
            Shape::Permits => units,
        }
    }
}
