//! Refunds: how much of an old charge may still be undone.
//!
//! Time gives quota back by itself. Giving the same units back a second time would mint: a bucket that has refilled, then
//! been spent by others, must not be refilled again by a late refund. What is returned here is safe whatever happened in
//! between; it is exact when the refund follows at once, and falls to zero as time does the work. Remembering each charge
//! to return exactly its own rest was rejected: it needs memory for each charge.

use crate::algorithm::sliding_window::window_start;
use crate::limit::{Limit, Shape};
use crate::time::{TimeDelta, Timestamp};

impl Limit {
    /// Whether units that were taken ahead can be handed back to a counter that will be as good as unused after this
    /// time: nobody has taken after them. Windows do not mind who came after.
    #[must_use]
    pub fn can_return(&self, full_at: Timestamp, now: Timestamp, reset_after: TimeDelta) -> bool {
        match self.shape {
            // Where units come back faster than by the microsecond, two instants cannot be told apart.
            Shape::Bucket(bucket) => bucket.interval >= bucket.k && now + reset_after == full_at,
            _ => true,
        }
    }

    /// The most of `units` taken at `taken` that may be given back at `now` without letting more through than the limit.
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
