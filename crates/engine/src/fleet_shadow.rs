//! A fleet's capacity in shadow mode: it is charged as if it were enforced, and denies nothing.
//!
//! A request that would be shed takes nothing of the capacity, so that what is reported of others is what they would see. It passes, so its
//! other limits are charged all the same. Most requests would not be shed: so all limits are charged in one call, all or none, as they
//! would be without shadow mode, and only a request that would be shed costs a second call, for the other limits alone.

use crate::fold;
use crate::limiter::Limiter;
use smallvec::SmallVec;
use tollgate_core::{
    Admission, CounterStore, Enforcement, Outcome, Outcomes, PermitId, StoreError, Timestamp,
};
use tollgate_rules::{FleetStanding, Plan};

/// The store could not decide a request. `known` has the outcomes of an attempt that charged nothing but independent charges.
pub(crate) struct Undecided {
    pub(crate) error: StoreError,
    pub(crate) known: Option<Outcomes>,
}

impl From<StoreError> for Undecided {
    fn from(error: StoreError) -> Self {
        Self { error, known: None }
    }
}

/// Whether a capacity in shadow mode has been decided together with the other limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShadowFleet {
    Decided,
    Open,
}

impl<S: CounterStore> Limiter<S> {
    /// Charges a request whose fleet's capacity is in shadow mode, in one call where that has the same result as two.
    ///
    /// # Errors
    /// [`Undecided`] if the store could not decide the other limits.
    pub(crate) async fn charge_with_shadow_fleet(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
    ) -> (Result<Outcomes, Undecided>, ShadowFleet) {
        let others: SmallVec<[usize; 8]> = plan.outside_fleet().collect();
        // Independent limits that deny (the Envoy profile) do not keep the store from charging the rest.
        let is_free = |at: &usize| {
            plan.limits[*at].enforcement == Enforcement::Independent && fold::decides(&plan.limits[*at])
        };
        if others.is_empty() || others.iter().any(is_free) {
            let charged = self.charge_all_but_fleet(plan, permit).await;
            return (charged.map_err(Undecided::from), ShadowFleet::Open);
        }
        plan.enforce_fleet(Enforcement::Required);
        let charged = self.charge_some(plan, permit, &Outcomes::default(), |_, _| true).await;
        let is_denied = |plan: &Plan<'_>, outcomes: &Outcomes| {
            let outcomes = others.iter().map(|at| (plan.limits[*at].enforcement, &outcomes.per_charge[*at]));
            Outcomes::admission(outcomes) == Admission::Denied
        };
        let mut outcomes = match charged {
            Ok(outcomes) => outcomes,
            Err(error) => {
                plan.enforce_fleet(Enforcement::Independent);
                // The store undoes what it may charge later: the late charge is dropped here.
                let charged = match error {
                    StoreError::Partial { .. } | StoreError::Several(_) => {
                        self.charge_all_but_fleet(plan, permit).await
                    }
                    StoreError::Late(_) => Err(StoreError::Timeout),
                    error => Err(error),
                };
                return (charged.map_err(Undecided::from), ShadowFleet::Open);
            }
        };
        let retried = match is_denied(plan, &outcomes) {
            true => Ok(()),
            false => self.retry_fleet(plan, permit, &mut outcomes, &[]).await,
        };
        plan.enforce_fleet(Enforcement::Independent);
        let forget_fleet = |outcomes: &mut Outcomes| {
            let fleet = (0..outcomes.per_charge.len()).filter(|at| !others.contains(at));
            fleet.for_each(|at| outcomes.per_charge[at] = Outcome::UNKNOWN);
        };
        if let Err(error) = retried {
            // Whether it would be shed is unknown. Independent charges have been made by the first attempt, and are not made again.
            plan.charge_fleet_as(FleetStanding::Fair);
            outcomes.per_charge.resize(plan.limits.len(), Outcome::UNKNOWN);
            forget_fleet(&mut outcomes);
            if !matches!(error, StoreError::Partial { .. } | StoreError::Several(_)) {
                // A late charge is dropped here too.
                let undecided = Undecided { error: StoreError::Timeout, known: Some(outcomes) };
                return (Err(undecided), ShadowFleet::Decided);
            }
        } else if outcomes.admission == Admission::Admitted {
            return (Ok(outcomes), ShadowFleet::Decided);
        } else if is_denied(plan, &outcomes) {
            // Grants may still admit it, and then it is charged to the capacity.
            forget_fleet(&mut outcomes);
            return (Ok(outcomes), ShadowFleet::Open);
        } else {
            plan.forget_allowed_fleet(&mut outcomes);
        }
        // Independent ones, of rules in shadow mode, are charged already.
        let is_open = |at: &&usize| plan.limits[**at].enforcement != Enforcement::Independent;
        let (at, open) =
            (outcomes.at, others.iter().filter(is_open).copied().collect::<SmallVec<[usize; 8]>>());
        let rest = self.charge_some(plan, permit, &outcomes, |at, _| open.contains(&at)).await;
        let rest = match rest {
            Ok(rest) => Ok(Outcomes { at: if rest.at == Timestamp::ZERO { at } else { rest.at }, ..rest }),
            Err(error) => {
                plan.settle_fleet(&mut outcomes);
                Err(Undecided { error, known: Some(outcomes) })
            }
        };
        (rest, ShadowFleet::Decided)
    }

    /// Charges a request without a capacity in shadow mode.
    async fn charge_all_but_fleet(&self, plan: &Plan<'_>, permit: PermitId) -> Result<Outcomes, StoreError> {
        let others: SmallVec<[usize; 8]> = plan.outside_fleet().collect();
        Box::pin(self.charge_some(plan, permit, &Outcomes::default(), |at, _| others.contains(&at))).await
    }

    /// Charges a capacity in shadow mode as if it were enforced: all of its limits or none, and by another standing if one denies it. For
    /// a request that the other limits admit, and that is not charged to the capacity yet.
    pub(crate) async fn charge_shadow_fleet(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        outcomes: &mut Outcomes,
    ) {
        let others: SmallVec<[usize; 8]> = plan.outside_fleet().collect();
        plan.enforce_fleet(Enforcement::Required);
        let mut charged = self.charge_some(plan, permit, outcomes, |at, _| !others.contains(&at)).await;
        if let Ok(first) = &mut charged
            && let Err(error) = self.retry_fleet(plan, permit, first, &others).await
        {
            charged = Err(error);
        }
        match charged {
            Ok(charged) => {
                outcomes.per_charge = charged.per_charge;
                if outcomes.at == Timestamp::ZERO {
                    outcomes.at = charged.at;
                }
                if charged.admission == Admission::Denied {
                    plan.forget_allowed_fleet(outcomes);
                }
            }
            // Its outcome is unknown. The store undoes what it may charge later: the late charge is dropped here.
            Err(_) => {
                plan.charge_fleet_as(FleetStanding::Fair);
                outcomes.per_charge.resize(plan.limits.len(), Outcome::UNKNOWN);
            }
        }
        plan.enforce_fleet(Enforcement::Independent);
    }
}
