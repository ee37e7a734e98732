//! Escrow: until when units that were deducted ahead may be spent.
//!
//! A bucket's units are slots of time. Taking a unit advances the TAT by one interval; that interval is the unit's
//! slot, and no two units share any of it. Spending a unit while its whole slot still lies in the future violates
//! nothing: a unit spent at an instant s uses a slot between s and s + burst intervals, so in a time t at most burst +
//! rate * t slots can be used, regardless of which node took them and when. Once a slot has begun, the bucket has
//! replenished the unit, and its holder must not spend it anymore. So nothing has to be returned, nothing can leak, and
//! a holder that dies costs nothing that time does not restore. (Rejected as the proof: a time to live for the whole
//! lease and a count of outstanding units at the authority, because they overshoot by the outstanding units, or reduce
//! the burst.)
//!
//! A window's units are valid until the window ends: spent by then, they count in the window in which they were taken.
//! A strict window's units are valid for their slot. A log counts instants, and permits are held, not spent: neither
//! can be taken ahead.

use crate::algorithm::bucket::Shaping;
use crate::algorithm::fixed_window::Counting;
use crate::algorithm::sliding_window::window_start;
use crate::limit::{Limit, Shape};
use crate::outcome::Outcome;
use crate::time::{TimeDelta, Timestamp};

/// Validity of units that were taken at one instant, measured from that instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Escrow {
    units: u64,
    /// Microseconds until the last unit expires.
    lifetime: u64,
    /// One unit expires every `interval / k` microseconds before that; all expire together if this is zero.
    interval: u64,
    k: u64,
}

impl Escrow {
    /// Returns the number of units taken.
    #[must_use]
    pub const fn units(&self) -> u64 {
        self.units
    }

    /// Returns the number of units that are still valid after this time.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, TimeDelta, State, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10))).build()?;
    /// let now = Timestamp::from_secs(1_000);
    /// let outcome = limit.step(&mut State::default(), now, Cost::new(8));
    /// let escrow = limit.escrow(8, now, &outcome).ok_or(tollgate_core::LimitError::TooMany)?;
    /// assert_eq!(escrow.valid_after(TimeDelta::ZERO), 8);
    /// assert_eq!(escrow.valid_after(TimeDelta::from_millis(450)), 3); // five slots have begun
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    #[inline]
    pub fn valid_after(&self, passed: TimeDelta) -> u64 {
        let left = self.lifetime.saturating_sub(passed.as_micros());
        if self.interval == 0 {
            return if left > 0 { self.units } else { 0 };
        }
        let slots = match left.checked_mul(self.k) {
            Some(time) => time / self.interval,
            None => u64::try_from(u128::from(left) * u128::from(self.k) / u128::from(self.interval))
                .unwrap_or(u64::MAX),
        };
        slots.min(self.units)
    }

    /// Returns the instant at which the last `units` count as taken when they are returned: the start of their slots.
    #[must_use]
    pub fn taken_at(&self, units: u64, at: Timestamp) -> Timestamp {
        let slots = (u128::from(units) * u128::from(self.interval)).div_ceil(u128::from(self.k.max(1)));
        let slots = u64::try_from(slots).unwrap_or(u64::MAX);
        if self.interval == 0 { at } else { at + TimeDelta::from_micros(self.lifetime.saturating_sub(slots)) }
    }

    /// Returns one validity, measured from this instant, for the last `units` of these and the last `more` of `later`, which
    /// were taken `apart` later: as if the slots of the second followed those of the first directly. At no instant are more
    /// units valid than of both; none is lost if no other slots lie between. `None` if their slots differ in length.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, TimeDelta, State, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(10))).build()?;
    /// let (now, mut state) = (Timestamp::from_secs(1_000), State::default());
    /// let mut take = |units| limit.escrow(units, now, &limit.step(&mut state, now, Cost::new(units)));
    /// let (Some(first), Some(second)) = (take(3), take(5)) else { return Ok(()) };
    /// let both = first.join(3, &second, 5, TimeDelta::ZERO);
    /// assert_eq!(both.map(|both| both.valid_after(TimeDelta::from_millis(450))), Some(3)); // five slots have begun
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn join(&self, units: u64, later: &Self, more: u64, apart: TimeDelta) -> Option<Self> {
        if (self.interval, self.k) != (later.interval, later.k) {
            return None;
        }
        let later_end = later.lifetime.saturating_add(apart.as_micros());
        let slots = u128::from(more) * u128::from(self.interval) / u128::from(self.k.max(1));
        let end = self.lifetime.saturating_add(u64::try_from(slots).unwrap_or(u64::MAX));
        Some(Self { units: units.saturating_add(more), lifetime: end.min(later_end), ..*self })
    }

    /// Returns how long the last unit is valid.
    #[must_use]
    pub const fn lifetime(&self) -> TimeDelta {
        TimeDelta::from_micros(self.lifetime)
    }
}

impl Limit {
    /// Returns whether units of this limit can be taken ahead and spent later.
    #[must_use]
    pub const fn is_leasable(&self) -> bool {
        match self.shape {
            Shape::Bucket(bucket) => matches!(bucket.shaping, Shaping::Police),
            Shape::Fixed(Counting::Admitted) | Shape::Sliding | Shape::Strict(_) => true,
            // A unit's slot of time is no longer its own: all units of an interval come back together.
            Shape::Stepped(..) => false,
            Shape::Blocked | Shape::Fixed(Counting::Attempts) | Shape::Log(_) | Shape::Permits => false,
        }
    }

    /// Returns the length of the window that `at` (shifted by the key's phase) lies in: units taken in it may be spent until it
    /// ends. `None` for limits that have no windows.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, TimeDelta, Timestamp, nonzero};
    /// let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per_minute(nonzero!(10))).build()?;
    /// assert_eq!(limit.escrow_window(Timestamp::from_secs(90)), Some(TimeDelta::from_secs(60)));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn escrow_window(&self, at: Timestamp) -> Option<TimeDelta> {
        match self.shape {
            Shape::Fixed(_) => {
                let (start, end) = self.window_at(at);
                Some(end.since(start))
            }
            Shape::Sliding => Some(self.rate().period.length()),
            Shape::Strict(slots) => Some(TimeDelta::from_micros(slots.width)),
            _ => None,
        }
    }

    /// Returns how long `units` taken at `at` (shifted by the key's phase) with this outcome may be spent; `None` for
    /// limits whose units cannot be taken ahead.
    #[must_use]
    pub fn escrow(&self, units: u64, at: Timestamp, outcome: &Outcome) -> Option<Escrow> {
        let all_until =
            |end: Timestamp| Some(Escrow { units, lifetime: end.since(at).as_micros(), interval: 0, k: 1 });
        match self.shape {
            // Also where denied requests count, though nodes lease no such units: they would have to count denials too.
            Shape::Fixed(_) => all_until(self.window_at(at).1),
            _ if !self.is_leasable() => None,
            // The bucket's `reset_after` is rounded up to a microsecond.
            Shape::Bucket(bucket) => Some(Escrow {
                units,
                lifetime: outcome.reset_after.as_micros().saturating_sub(u64::from(bucket.k > 1)),
                interval: bucket.interval,
                k: bucket.k,
            }),
            Shape::Sliding => {
                let period = self.rate().period.length();
                all_until(window_start(at, period) + period)
            }
            Shape::Strict(slots) => {
                all_until(Timestamp::from_micros((at.as_micros() / slots.width + 1) * slots.width))
            }
            _ => None,
        }
    }
}
