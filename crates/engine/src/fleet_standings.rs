//! The standings by which a request charges the fleet's capacity, one after the other, until one admits it.
//!
//! A value, and not a function that charges: some callers await the store and some must not, and both walk the same standings
//! with a loop of two lines. What is charged at each step is theirs as well.

use crate::limiter::Limiter;
use smallvec::SmallVec;
use tollgate_core::{Admission, Charge, CounterStore, Enforcement, Outcome, Outcomes, PermitId, StoreError};
use tollgate_rules::{Charges, FleetStanding, Plan};

/// The attempts of a request that was charged by its first standing.
#[derive(Default)]
pub(crate) struct FleetStandings {
    /// The last denial by the capacity itself, and the standing that it was charged by.
    denial: Option<(FleetStanding, Outcomes)>,
}

impl FleetStandings {
    /// Changes the plan to the standing that may still admit a request with these outcomes. Returns whether there is one, by which the
    /// caller must then charge it. An attempt that did not admit it has charged nothing but independent charges.
    pub(crate) fn next<S: CounterStore>(
        &mut self,
        limiter: &Limiter<S>,
        plan: &mut Plan<'_>,
        permit: PermitId,
        outcomes: &Outcomes,
    ) -> bool {
        let Some(standing) = limiter.next_fleet_standing(plan, permit, outcomes) else { return false };
        if let Some(own) = &mut plan.fleet {
            own.set_tried(own.standing);
            if !own.standing.is_claim() {
                self.denial = Some((own.standing, outcomes.clone()));
            }
        }
        plan.charge_fleet_as(standing);
        true
    }

    /// Ends the attempts, of which these are the last outcomes. A guarantee that does not admit the request denies nothing either: the
    /// capacity does, as it did before.
    pub(crate) fn end(self, plan: &mut Plan<'_>, outcomes: &mut Outcomes) {
        if let Some((standing, denied)) = self.denial.filter(|_| outcomes.admission == Admission::Denied) {
            plan.charge_fleet_as(standing);
            *outcomes = denied;
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Charges a request by one standing after the other until one admits it, on counters that need not be awaited. `charge` does so by the
    /// present one; it is given the outcomes of the attempt before, which has charged nothing but independent charges.
    pub(crate) fn try_fleet_standings(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        mut charge: impl FnMut(&mut Plan<'_>, Option<&Outcomes>) -> Option<Outcomes>,
    ) -> Option<Outcomes> {
        let (mut outcomes, mut standings) = (charge(plan, None)?, FleetStandings::default());
        while standings.next(self, plan, permit, &outcomes) {
            outcomes = charge(plan, Some(&outcomes))?;
        }
        standings.end(plan, &mut outcomes);
        plan.settle_fleet(&mut outcomes);
        Some(outcomes)
    }

    /// Tries a request again that the fleet's capacity denied, as long as another standing may admit it. Charges at `failed` are left
    /// out: the store cannot decide them.
    ///
    /// # Errors
    /// [`StoreError`] if the store could not decide it; `outcomes` are those of the attempt before, which has charged nothing but
    /// independent charges.
    pub(crate) async fn retry_fleet(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        outcomes: &mut Outcomes,
        failed: &[usize],
    ) -> Result<(), StoreError> {
        let is_open = |at: usize, charge: &Charge<'_>| {
            charge.enforcement != Enforcement::Independent && !failed.contains(&at)
        };
        let mut standings = FleetStandings::default();
        while standings.next(self, plan, permit, outcomes) {
            *outcomes = self.charge_some(plan, permit, outcomes, is_open).await?;
        }
        standings.end(plan, outcomes);
        Ok(())
    }

    /// Charges those of a request's charges that are `wanted`. The others have the outcomes of `before`, if there are any.
    ///
    /// # Errors
    /// [`StoreError`] if the store could not decide them, by their indexes in the plan.
    pub(crate) async fn charge_some(
        &self,
        plan: &Plan<'_>,
        permit: PermitId,
        before: &Outcomes,
        wanted: impl Fn(usize, &Charge<'_>) -> bool,
    ) -> Result<Outcomes, StoreError> {
        let mut charges = Charges::new();
        plan.charges(permit, &mut charges);
        let places: SmallVec<[usize; 8]> =
            (0..charges.len()).filter(|at| wanted(*at, &charges[*at])).collect();
        let list: SmallVec<[Charge<'_>; 8]> = places.iter().map(|at| charges[*at]).collect();
        let charged = match list.is_empty() {
            true => Ok(Outcomes::default()),
            false => self.charge_awaited(&list).await,
        };
        let charged = charged.map_err(|error| match error {
            StoreError::Partial { failed, cause } => {
                let failed = failed.into_iter().filter_map(|at| places.get(at).copied()).collect();
                StoreError::Partial { failed, cause }
            }
            error => error,
        })?;
        let Outcomes { admission, at, per_charge } = charged;
        let mut outcomes = Outcomes { admission, at, per_charge: before.per_charge.clone() };
        outcomes.per_charge.resize(charges.len(), Outcome::UNKNOWN);
        for (at, outcome) in places.into_iter().zip(per_charge) {
            outcomes.per_charge[at] = outcome;
        }
        Ok(outcomes)
    }
}
