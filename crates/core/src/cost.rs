//! Cost: the number of units of a limit that a request takes.

/// Units that a request takes from a limit. Zero only looks; a negative cost gives back, down to an unused limit.
///
/// ```
/// use tollgate_core::Cost;
/// assert_eq!(Cost::ONE, Cost::new(1));
/// assert!(Cost::refund(3).is_refund());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(i64);

impl Cost {
    /// The cost of a usual request.
    pub const ONE: Self = Self(1);
    /// A look: answers, changes nothing.
    pub const PEEK: Self = Self(0);

    /// Takes `units`, or nothing at all.
    #[must_use]
    pub const fn new(units: u64) -> Self {
        Self(if units > i64::MAX as u64 { i64::MAX } else { units as i64 })
    }

    /// Gives `units` back.
    #[must_use]
    pub const fn refund(units: u64) -> Self {
        Self(-Self::new(units).0)
    }

    /// Whether this gives back.
    #[must_use]
    pub const fn is_refund(self) -> bool {
        self.0 < 0
    }

    /// Whether this only looks.
    #[must_use]
    pub const fn is_peek(self) -> bool {
        self.0 == 0
    }

    /// The units moved, in either direction.
    #[must_use]
    pub const fn units(self) -> u64 {
        self.0.unsigned_abs()
    }

    /// The same units in the other direction.
    #[must_use]
    pub const fn negated(self) -> Self {
        Self(-self.0)
    }
}

impl Default for Cost {
    fn default() -> Self {
        Self::ONE
    }
}
