//! The most that all cells together admit of a limit, by its mode.

use tollgate_core::{Limit, RegionMode, TimeDelta};

/// A bound on admissions over any span of time t: `burst` + rate × t, and `beyond` more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Units that an unused limit admits at once.
    pub burst: u64,
    /// Units beyond that, in the worst case: each other cell has its whole burst and goes on until it knows.
    pub beyond: u64,
    /// The same where the limit is in steady use, so that only the lag counts.
    pub typical: u64,
}

impl Bound {
    /// Returns the bound of a limit over this many cells, which know each other's consumption after `lag`.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, RegionMode, TimeDelta, nonzero};
    /// use tollgate_rules::Bound;
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(1_000))).build()?;
    /// let lag = TimeDelta::from_millis(200);
    /// let shared = Bound::new(&limit, RegionMode::Shared, 3, lag);
    /// assert_eq!(shared, Bound { burst: 1_000, beyond: 2_400, typical: 400 });
    /// assert_eq!(Bound::new(&limit, RegionMode::Leased, 3, lag).beyond, 0);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn new(limit: &Limit, mode: RegionMode, cells: u32, lag: TimeDelta) -> Self {
        let burst = limit.capacity();
        if mode != RegionMode::Shared {
            return Self { burst, beyond: 0, typical: 0 };
        }
        let rate = limit.rate();
        let during = u128::from(rate.count) * u128::from(lag.as_micros());
        let during = during.div_ceil(u128::from(rate.period.length().as_micros().max(1)));
        let during = u64::try_from(during).unwrap_or(u64::MAX);
        let others = u64::from(cells.max(1)) - 1;
        let typical = during.saturating_mul(others);
        Self { burst, beyond: burst.saturating_mul(others).saturating_add(typical), typical }
    }
}
