//! A limit as plain numbers, for a store whose steps run elsewhere (a script in Redis) and must be bit-equal to ours.

use crate::algorithm::fixed_window::Counting;
use crate::limit::{Limit, Shape};

/// What a step is made of, beside the quota and the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Measures {
    /// A bucket that holds nothing.
    Blocked,
    /// A bucket: time in units of 1/k of a microsecond, and how many of these a unit of cost takes to come back.
    Bucket {
        /// Units of time in a microsecond.
        k: u64,
        /// Units of time for a unit of cost.
        interval: u64,
        /// The longest that its state is believed to be ahead, in microseconds.
        furthest: u64,
    },
    /// A fixed window that counts what it admits.
    Fixed {
        /// How far it counts.
        most: u64,
    },
    /// A fixed window that counts whatever is asked for.
    Attempts {
        /// How far it counts.
        most: u64,
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
    pub fn plenty(&self) -> u64 {
        match &self.shape {
            Shape::Bucket(bucket) => bucket.plenty(),
            _ => 2 * self.capacity,
        }
    }

    /// The limit as plain numbers.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Measures, Quota};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Quota::per_second(10)).build()?;
    /// assert_eq!(limit.measures(), Measures::Bucket { k: 1, interval: 100_000, furthest: 2_000_000 });
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub const fn measures(&self) -> Measures {
        match self.shape {
            Shape::Blocked => Measures::Blocked,
            Shape::Bucket(bucket) => {
                Measures::Bucket { k: bucket.k, interval: bucket.interval, furthest: bucket.furthest }
            }
            Shape::Fixed(Counting::Admitted) => {
                Measures::Fixed { most: Counting::Admitted.most(self.capacity) }
            }
            Shape::Fixed(Counting::Attempts) => {
                Measures::Attempts { most: Counting::Attempts.most(self.capacity) }
            }
            Shape::Sliding => Measures::Sliding,
            Shape::Strict(slots) => Measures::Strict { k: slots.k, width: slots.width },
            Shape::Log => Measures::Log,
            Shape::Permits => Measures::Permits,
        }
    }
}
