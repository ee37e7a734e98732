//! Charge record: a charge that outlives its request, of a reservation, a permit, or a pending reconciliation.

use crate::refill::Refill;
use tollgate_core::{
    Charge, Cost, CounterKey, Enforcement, KeyPart, Limit, LossPolicy, Mode, OwnedKeyPart, Scope, Timestamp,
};

/// Units charged to one counter, with everything that identifies the counter.
#[derive(Clone, Debug)]
pub(crate) struct ChargeRecord {
    pub(crate) scope: Scope,
    pub(crate) parts: Vec<OwnedKeyPart>,
    pub(crate) limit: Limit,
    pub(crate) units: u64,
    pub(crate) loss_policy: LossPolicy,
    pub(crate) mode: Mode,
    /// How time refills the units until they are charged; `None` if all are charged.
    pub(crate) refill: Option<Refill>,
}

impl ChargeRecord {
    /// Creates the record of `charge`.
    pub(crate) fn from_charge(charge: &Charge<'_>) -> Self {
        Self {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedKeyPart::from).collect(),
            limit: charge.limit.clone(),
            units: charge.cost.units(),
            loss_policy: charge.loss_policy,
            // Alternatives are charged at the store, wherever the rule's other charges are decided.
            mode: if charge.enforcement == Enforcement::Alternative { Mode::Central } else { charge.mode },
            refill: None,
        }
    }

    /// Returns the units that have not been refilled yet.
    pub(crate) fn units_left(&self, now: Timestamp) -> u64 {
        self.refill.map_or(self.units, |refill| refill.left(now).min(self.units))
    }

    /// Returns the bytes of the counter key's values.
    pub(crate) fn key_bytes(&self) -> usize {
        let parts = self.parts();
        self.key(&parts).value_bytes()
    }

    /// Returns the values of the counter key; [`ChargeRecord::key`] borrows them.
    pub(crate) fn parts(&self) -> Vec<KeyPart<'_>> {
        self.parts.iter().map(OwnedKeyPart::as_part).collect()
    }

    pub(crate) fn key<'a>(&'a self, parts: &'a [KeyPart<'a>]) -> CounterKey<'a> {
        CounterKey { scope: &self.scope, parts }
    }

    /// Creates a charge of `cost` on the same counter.
    pub(crate) fn charge<'a>(&'a self, parts: &'a [KeyPart<'a>], cost: Cost) -> Charge<'a> {
        let (loss_policy, mode) = (self.loss_policy, self.mode);
        Charge { loss_policy, mode, ..Charge::new(self.key(parts), &self.limit, cost) }
    }
}
