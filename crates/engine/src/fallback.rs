//! The local counters that decide while the store is unavailable, as the limiter uses them: any [`CounterStore`], asked
//! without waiting. The trait below is the part of `CounterStore` that can be an object; the limiter then needs no second
//! type parameter, and this crate no store.

use tollgate_core::{Charge, CounterStore, Outcomes};

/// Charges without waiting.
pub(crate) trait TryCharge: Send + Sync {
    /// See [`CounterStore::try_charge`].
    fn try_charge(&self, charges: &[Charge<'_>]) -> Option<Outcomes>;
}

impl<S: CounterStore> TryCharge for S {
    fn try_charge(&self, charges: &[Charge<'_>]) -> Option<Outcomes> {
        CounterStore::try_charge(self, charges)
    }
}
