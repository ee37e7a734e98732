//! Limit parameters: a limit as plain numbers, for a store that steps it elsewhere (a Redis script) with bit-equal
//! outcomes.

use crate::algorithm::fixed_window::Counting;
use crate::limit::{Limit, Shape};

/// What a step is made of, beside the quota and the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitParams {
    /// A bucket that holds nothing.
    Blocked,
    /// A bucket: time in units of 1/k of a microsecond, and how many of these a unit of cost takes to come back.
    Bucket {
        /// Units of time in a microsecond.
        k: u64,
        /// Units of time for a unit of cost.
        interval: u64,
        /// The longest that its state is believed to be ahead, in microseconds.
        max_ahead: u64,
    },
    /// A fixed window that counts what it admits.
    Fixed {
        /// How far it counts.
        max_count: u64,
    },
    /// A fixed window that counts whatever is asked for.
    Attempts {
        /// How far it counts.
        max_count: u64,
    },
    /// A two-counter sliding window.
    Sliding,
    /// A strict window.
    Strict {
        /// Slots in a period.
        k: u64,
        /// Microseconds a slot.
        width: u64,
    },
    /// A sliding log.
    Log,
    /// Permits.
    Permits,
}

impl Limit {
    /// So many units that giving them back leaves nothing used.
    #[must_use]
    pub fn refill_cost(&self) -> u64 {
        match &self.shape {
            Shape::Bucket(bucket) => bucket.refill_cost(),
            _ => 2 * self.capacity,
        }
    }

    /// The limit as plain numbers.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, LimitParams, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10))).build()?;
    /// assert_eq!(limit.params(), LimitParams::Bucket { k: 1, interval: 100_000, max_ahead: 2_000_000 });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub const fn params(&self) -> LimitParams {
        match self.shape {
            Shape::Blocked => LimitParams::Blocked,
            Shape::Bucket(bucket) => {
                LimitParams::Bucket { k: bucket.k, interval: bucket.interval, max_ahead: bucket.max_ahead }
            }
            Shape::Fixed(Counting::Admitted) => {
                LimitParams::Fixed { max_count: Counting::Admitted.max_count(self.capacity) }
            }
            Shape::Fixed(Counting::Attempts) => {
                LimitParams::Attempts { max_count: Counting::Attempts.max_count(self.capacity) }
            }
            Shape::Sliding => LimitParams::Sliding,
            Shape::Strict(slots) => LimitParams::Strict { k: slots.k, width: slots.width },
            Shape::Log => LimitParams::Log,
            Shape::Permits => LimitParams::Permits,
        }
    }
}
