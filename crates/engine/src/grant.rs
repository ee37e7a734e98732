//! Grants: extra units for a caller, charged only when a limit denies.
//!
//! A grant is a counter of its own in the same store, which holds the units granted and never gives any back while the
//! grant lasts (a strict window as long as its life: never more than its units in any window of that length). A request
//! that a covered limit turns away is charged again with the grant in that limit's place, all or none as always. So
//! whatever the limit's algorithm is, a caller gets what the limit lets through and the granted units, to the unit, on
//! memory and Redis alike. Moving the limit's own state beyond unused was rejected: no algorithm has room for less than
//! nothing used, and time would take it away again.
//!
//! Of a rule with several windows the longest is covered: the shorter ones go on keeping callers from bursting.

use crate::charge_record::ChargeRecord;
use crate::fold::{decides, is_denied};
use crate::limiter::Limiter;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, LimitError,
    LimitSpec, Outcome, Outcomes, Rate, Scope, TimeDelta, Timestamp, Verdict,
};
use tollgate_rules::{Plan, Role};

/// Extra quota of one caller, compiled against one rule set.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Its name.
    pub id: Box<str>,
    /// The rules whose longest window it extends.
    pub rules: Vec<u32>,
    /// When it ends, used up or not.
    pub expires_at: Timestamp,
    limit: Limit,
    scope: Scope,
}

/// All that one caller was granted, in the order in which they are used up.
pub type Grants = Vec<Arc<Grant>>;

impl Grant {
    /// So many units for these rules, for as long as it lasts.
    ///
    /// # Errors
    /// [`LimitError`] if there cannot be so many, or for so long.
    pub fn new(
        id: &str,
        units: u64,
        rules: Vec<u32>,
        lasts: TimeDelta,
        until: Timestamp,
    ) -> Result<Self, LimitError> {
        let spec = LimitSpec::new(Algorithm::StrictWindow, Rate::per(units, lasts));
        let limit = LimitSpec { slots: Some(1), ..spec }.build()?;
        Ok(Self { id: id.into(), rules, expires_at: until, limit, scope: Scope::new("grant") })
    }

    /// How many units were granted.
    #[must_use]
    pub const fn units(&self) -> u64 {
        self.limit.capacity()
    }

    pub(crate) fn charge<'a>(&'a self, name: &'a [KeyPart<'a>; 1], like: &Charge<'a>) -> Charge<'a> {
        let charge = Charge::new(CounterKey { scope: &self.scope, parts: name }, &self.limit, like.cost);
        Charge { loss_policy: like.loss_policy, permit: like.permit, ..charge }
    }

    /// Looks at what is left of it.
    pub(crate) fn peek<'a>(&'a self, name: &'a [KeyPart<'a>; 1]) -> Charge<'a> {
        Charge::new(CounterKey { scope: &self.scope, parts: name }, &self.limit, Cost::PEEK)
    }

    pub(crate) fn name(&self) -> [KeyPart<'_>; 1] {
        [KeyPart::Text(&self.id)]
    }

    fn covers(&self, plan: &Plan<'_>, at: usize) -> bool {
        let matched = &plan.limits[at];
        let Some(rule) = matched.rule.filter(|rule| self.rules.contains(&rule.id)) else { return false };
        let length = |at: usize| plan.limits[at].limit.limit.rate().period.length();
        let spends = |at: usize| {
            let limit = &plan.limits[at].limit;
            limit.role == Role::Live && limit.limit.algorithm() != Algorithm::Concurrency
        };
        let others = (0..plan.limits.len()).filter(|other| {
            let own = &plan.limits[*other];
            own.rule.is_some_and(|own| own.id == rule.id)
                && own.descriptor == matched.descriptor
                && spends(*other)
        });
        spends(at) && others.map(length).max() == Some(length(at))
    }
}

/// What was taken of a grant in the place of a hit's own limit.
#[derive(Clone, Debug)]
pub(crate) struct GrantCharge {
    pub(crate) limit: usize,
    pub(crate) record: ChargeRecord,
}

/// More tries than any request has limits and grants to try.
const MAX_ROUNDS: usize = 8;

/// A request that was turned away, and what may pay for it.
struct GrantAllocation<'a, 'p> {
    plan: &'a Plan<'p>,
    charges: &'a [Charge<'a>],
    grants: &'a [Arc<Grant>],
    /// Which grant pays for which hit.
    assigned: SmallVec<[Option<usize>; 4]>,
    /// Which of them have nothing left, or have ended.
    exhausted: SmallVec<[bool; 4]>,
    /// What is known of each hit's own limit.
    known: SmallVec<[Outcome; 4]>,
}

impl GrantAllocation<'_, '_> {
    /// Finds a grant for every limit that is over; whether there is one for each.
    fn cover(&mut self) -> bool {
        for at in 0..self.charges.len() {
            let over = self.known[at].verdict.is_denied() && decides(&self.plan.limits[at]);
            if !over
                || self.assigned[at].is_some()
                || self.charges[at].enforcement == Enforcement::Alternative
            {
                continue;
            }
            let fits = |grant: &usize| !self.exhausted[*grant] && self.grants[*grant].covers(self.plan, at);
            let Some(grant) = (0..self.grants.len()).find(fits) else { return false };
            self.assigned[at] = Some(grant);
        }
        self.assigned.iter().any(Option::is_some)
    }

    /// Learns who refused; whether it is worth another try.
    fn record_denials(&mut self, asked: &[usize], told: &[Outcome]) -> bool {
        let mut again = false;
        for (at, outcome) in asked.iter().zip(told).filter(|(_, outcome)| outcome.verdict.is_denied()) {
            match self.assigned[*at].take() {
                Some(grant) => (self.exhausted[grant], again) = (true, true),
                None => {
                    again |= self.charges[*at].enforcement == Enforcement::Required;
                    self.known[*at] = *outcome;
                }
            }
        }
        again
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Pays for a request that limits turn away, where its caller was granted enough: the outcomes are then as if it had
    /// fitted.
    #[cold]
    pub(crate) async fn charge_grants(
        &self,
        plan: &Plan<'_>,
        charges: &[Charge<'_>],
        grants: &Grants,
        outcomes: &mut Outcomes,
    ) -> Option<Box<[GrantCharge]>> {
        if !is_denied(plan, outcomes) {
            return None;
        }
        let now = self.clock.now();
        let mut payment = GrantAllocation {
            plan,
            charges,
            grants,
            assigned: SmallVec::from_elem(None, charges.len()),
            exhausted: grants.iter().map(|grant| grant.expires_at <= now).collect(),
            known: outcomes.per_charge.clone(),
        };
        let names: Vec<[KeyPart<'_>; 1]> = grants.iter().map(|grant| grant.name()).collect();
        for _ in 0..MAX_ROUNDS {
            if !payment.cover() {
                return None;
            }
            // What only counts has counted already.
            let asked: SmallVec<[usize; 4]> = (0..charges.len())
                .filter(|at| {
                    payment.assigned[*at].is_some() || charges[*at].enforcement != Enforcement::Independent
                })
                .collect();
            let charge = |at: &usize| match payment.assigned[*at] {
                Some(grant) => grants[grant].charge(&names[grant], &charges[*at]),
                None => charges[*at],
            };
            let wanted: SmallVec<[Charge<'_>; 4]> = asked.iter().map(charge).collect();
            let told = self.store.charge(&wanted).await.ok()?;
            if told.admission == Admission::Denied {
                if !payment.record_denials(&asked, &told.per_charge) {
                    return None;
                }
                continue;
            }
            outcomes.admission = Admission::Admitted;
            let mut paid = Vec::new();
            for ((at, charge), outcome) in asked.into_iter().zip(&wanted).zip(told.per_charge) {
                if payment.assigned[at].is_some() {
                    paid.push(GrantCharge { limit: at, record: ChargeRecord::from_charge(charge) });
                    let reset_after = outcomes.per_charge[at].reset_after;
                    outcomes.per_charge[at] =
                        Outcome { verdict: Verdict::ALLOWED, remaining: outcome.remaining, reset_after };
                } else {
                    outcomes.per_charge[at] = outcome;
                }
            }
            return Some(paid.into());
        }
        None
    }
}
