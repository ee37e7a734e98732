//! Markers: of all nodes that find units of a counter missing, one debits them.

use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, Limit, LimitError, LimitSpec, Rate, Scope, TimeDelta,
};

/// What the label of a counter's marker ends with.
pub(super) const MARKER: &str = "|restored";

/// Mark in the store beside a counter: nothing of it is to be debited any more.
pub(super) struct Marker {
    scope: Scope,
    limit: Limit,
}

impl Marker {
    pub(super) fn new(charge: &Charge<'_>, suffix: &str) -> Result<Self, LimitError> {
        let lifetime = charge.limit.retention().max(TimeDelta::from_secs(60));
        let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(1, lifetime)).build()?;
        Ok(Self { scope: charge.key.scope.sibling(suffix), limit })
    }

    pub(super) fn charge<'a>(&'a self, of: &Charge<'a>) -> Charge<'a> {
        Charge::new(CounterKey { scope: &self.scope, ..of.key }, &self.limit, Cost::ONE)
    }
}
