//! Cost: the number of units of a limit that a request takes.

/// Units that a request takes from a limit. Zero is a peek; a negative cost is a refund, down to an unused limit.
///
/// ```
/// use tollgate_core::Cost;
/// assert_eq!(Cost::ONE, Cost::new(1));
/// assert!(Cost::refund(3).is_refund());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(i64);

impl Cost {
    /// The cost of an ordinary request.
    pub const ONE: Self = Self(1);
    /// A refund of all units that any counter can have used.
    pub const RESET: Self = Self::refund(u64::MAX);
    /// A peek: returns an outcome and changes nothing.
    pub const PEEK: Self = Self(0);

    /// Creates a cost that takes `units`, all or none.
    #[must_use]
    pub const fn new(units: u64) -> Self {
        Self(if units > i64::MAX as u64 { i64::MAX } else { units as i64 })
    }

    /// Creates a cost that refunds `units`.
    #[must_use]
    pub const fn refund(units: u64) -> Self {
        Self(-Self::new(units).0)
    }

    /// Returns whether this is a refund.
    #[must_use]
    pub const fn is_refund(self) -> bool {
        self.0 < 0
    }

    /// Returns whether this resets a counter.
    #[must_use]
    pub const fn is_reset(self) -> bool {
        self.0 == Self::RESET.0
    }

    /// Returns whether this is a peek.
    #[must_use]
    pub const fn is_peek(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of units, in either direction.
    #[must_use]
    pub const fn units(self) -> u64 {
        self.0.unsigned_abs()
    }

    /// Returns the same units in the other direction.
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
