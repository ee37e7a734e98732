//! Limit parameters: a limit as plain numbers, for a store that steps it elsewhere (a Redis script) with bit-equal
//! outcomes.

use crate::algorithm::bucket::Bucket;
use crate::algorithm::fixed_window::Counting;
use crate::limit::{Limit, Shape};
use crate::time::Timestamp;

/// The parameters of a step, in addition to the rate and the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitParams {
    /// A bucket with zero capacity.
    Blocked,
    /// A bucket: time in units of 1/k of a microsecond, and how many of these replenish one unit of cost. With a
    /// [`Limit::refill_interval`], it is stepped at the end of the interval that contains now.
    Bucket {
        /// Units of time per microsecond.
        k: u64,
        /// Units of time per unit of cost.
        interval: u64,
        /// Units of time per unit of cost as the state's [`Scale`](crate::Scale) has it: the same, unless this limit
        /// counts in fractions of one.
        unit: u64,
        /// Maximum that its state may be ahead of now, in microseconds.
        max_ahead: u64,
        /// Log2 of that, to be stored with the state; 0 if it is not (see [`Tat::reach`](crate::Tat)).
        reach: u8,
    },
    /// A fixed window that counts admitted units.
    Fixed {
        /// Maximum count.
        max_count: u64,
    },
    /// A fixed window that counts all requested units.
    Attempts {
        /// Maximum count.
        max_count: u64,
    },
    /// A two-counter sliding window.
    Sliding,
    /// A strict window.
    Strict {
        /// Slots per period.
        k: u64,
        /// Microseconds per slot.
        width: u64,
    },
    /// A sliding log.
    Log {
        /// Instant up to which a refund takes from the log; now if absent.
        taken: Option<Timestamp>,
    },
    /// Permits.
    Permits,
}

impl Limit {
    /// Returns a number of units whose refund leaves nothing used.
    #[must_use]
    pub fn refill_cost(&self) -> u64 {
        match &self.shape {
            Shape::Bucket(bucket) | Shape::Stepped(bucket, _) => bucket.refill_cost(),
            _ => 2 * self.capacity,
        }
    }

    /// Returns the limit as plain numbers.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, LimitParams, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10))).build()?;
    /// let (interval, unit, max_ahead) = (100_000, 100_000, 2_000_000);
    /// assert_eq!(limit.params(), LimitParams::Bucket { k: 1, interval, unit, max_ahead, reach: 0 });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub const fn params(&self) -> LimitParams {
        match self.shape {
            Shape::Blocked => LimitParams::Blocked,
            Shape::Bucket(bucket) | Shape::Stepped(bucket, _) => {
                let Bucket { k, interval, unit, max_ahead, reach, .. } = bucket;
                LimitParams::Bucket { k, interval, unit, max_ahead, reach }
            }
            Shape::Fixed(Counting::Admitted) => {
                LimitParams::Fixed { max_count: Counting::Admitted.max_count(self.capacity) }
            }
            Shape::Fixed(Counting::Attempts) => {
                LimitParams::Attempts { max_count: Counting::Attempts.max_count(self.capacity) }
            }
            Shape::Sliding => LimitParams::Sliding,
            Shape::Strict(slots) => LimitParams::Strict { k: slots.k, width: slots.width },
            Shape::Log(taken) => LimitParams::Log { taken },
            Shape::Permits => LimitParams::Permits,
        }
    }
}
