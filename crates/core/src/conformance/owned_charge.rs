//! A charge that outlives its call, for a store that applies it later.

use super::block_on;
use crate::algorithm::Algorithm;
use crate::algorithm::concurrency::PermitId;
use crate::charge::{Charge, Enforcement, LossPolicy, Mode, Permit};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, KeyPart, OwnedKeyPart, Scope};
use crate::limit::Limit;
use crate::store::CounterStore;

/// A charge with its own key and limit.
pub(super) struct OwnedCharge {
    scope: Scope,
    parts: Vec<OwnedKeyPart>,
    limit: Limit,
    cost: Cost,
    enforcement: Enforcement,
    permit: PermitId,
    loss_policy: LossPolicy,
    mode: Mode,
}

impl From<&Charge<'_>> for OwnedCharge {
    fn from(charge: &Charge<'_>) -> Self {
        Self {
            scope: charge.key.scope.clone(),
            parts: charge.key.parts.iter().map(OwnedKeyPart::from).collect(),
            limit: charge.limit.clone(),
            cost: charge.cost,
            enforcement: charge.enforcement,
            permit: charge.permit,
            loss_policy: charge.loss_policy,
            mode: charge.mode,
        }
    }
}

impl OwnedCharge {
    pub(super) fn parts(&self) -> Vec<KeyPart<'_>> {
        self.parts.iter().map(OwnedKeyPart::as_part).collect()
    }

    pub(super) const fn borrow<'a>(&'a self, parts: &'a [KeyPart<'a>]) -> Charge<'a> {
        Charge {
            key: CounterKey { scope: &self.scope, parts },
            limit: &self.limit,
            cost: self.cost,
            enforcement: self.enforcement,
            permit: self.permit,
            loss_policy: self.loss_policy,
            mode: self.mode,
        }
    }

    /// Releases the permit, or refunds the units. A store that fails here has lost the charge anyway.
    pub(super) fn undo<S: CounterStore>(&self, inner: &S) {
        let parts = self.parts();
        let charge = self.borrow(&parts);
        let _ = block_on(async {
            match charge.limit.algorithm() {
                Algorithm::Concurrency => {
                    let permit = Permit { key: charge.key, limit: charge.limit, id: charge.permit };
                    inner.release(&[permit]).await
                }
                _ => inner.debit(&[Charge { cost: charge.cost.negated(), ..charge }]).await,
            }
        });
    }
}
