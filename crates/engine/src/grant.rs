//! Grants: extra units for a caller, charged only when a limit denies.
//!
//! A grant has its own counter in the same store. The counter holds the granted units and never refills while the grant
//! lasts (a strict window as long as the grant's lifetime: never more than its units in any window of that length). If
//! a covered limit denies a request, the request is charged again with the grant in that limit's place, all or none as
//! always. So whatever the limit's algorithm is, a caller gets what the limit allows plus the granted units, to the
//! unit, in memory and in Redis alike. Rejected: moving the limit's own state below zero usage, because no algorithm
//! can represent that, and time would remove it again.
//!
//! Between cells, the owner of the rule's counters decides its grants too; those of rules without an owner are shared.
//!
//! If a rule has several windows, the grant covers the longest; the shorter ones still prevent bursts.

use crate::charge_record::ChargeRecord;
use crate::fold::{decides, is_denied};
use crate::limiter::Limiter;
use smallvec::SmallVec;
use std::sync::Arc;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterOwner, CounterStore, Enforcement, KeyPart, Limit,
    LimitError, LimitSpec, Outcome, Outcomes, Rate, RegionMode, Scope, TimeDelta, Timestamp, Verdict,
    region_prefix,
};
use tollgate_rules::{Plan, Role};

/// Extra units of one caller, compiled against one rule set.
#[derive(Clone, Debug)]
pub struct Grant {
    /// ID of the grant.
    pub id: Box<str>,
    /// The rules whose longest window it extends.
    pub rules: Vec<u32>,
    /// Expiry time, whether or not the units are used up.
    pub expires_at: Timestamp,
    limit: Limit,
    scope: Scope,
}

/// Label of the counters of grants that no cell owns. That of others has the region's prefix before it.
const LABEL: &str = "grant";

/// All grants of one caller, in the order in which they are used.
pub type Grants = Vec<Arc<Grant>>;

impl Grant {
    /// Creates a grant of `units` for `rules`, with the lifetime `lasts` and the expiry time `until`.
    ///
    /// # Errors
    /// [`LimitError`] if the units or the lifetime are out of range.
    pub fn new(
        id: &str,
        units: u64,
        rules: Vec<u32>,
        lasts: TimeDelta,
        until: Timestamp,
    ) -> Result<Self, LimitError> {
        let spec = LimitSpec::new(Algorithm::StrictWindow, Rate::per(units, lasts));
        let limit = LimitSpec { slots: Some(1), ..spec }.build()?;
        Ok(Self {
            id: id.into(),
            rules,
            expires_at: until,
            limit,
            scope: Scope::new(LABEL).with_durable(true),
        })
    }

    /// Lets one cell decide the grant, where its rule's limits have an owner: each cell would give the units once more.
    #[must_use]
    pub fn owned_by(mut self, owner: CounterOwner<'_>) -> Self {
        let label = format!("{}{LABEL}", region_prefix(RegionMode::Owner, owner));
        self.scope = Scope::new(label).with_durable(true);
        self
    }

    /// Returns the number of units granted.
    #[must_use]
    pub const fn units(&self) -> u64 {
        self.limit.capacity()
    }

    pub(crate) fn charge<'a>(&'a self, name: &'a [KeyPart<'a>; 1], like: &Charge<'a>) -> Charge<'a> {
        let charge = Charge::new(CounterKey { scope: &self.scope, parts: name }, &self.limit, like.cost);
        Charge { loss_policy: like.loss_policy, permit: like.permit, ..charge }
    }

    /// Creates a charge that reads the remaining units.
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
            let matched = &plan.limits[at];
            matched.role == Role::Live && matched.limit.limit.algorithm() != Algorithm::Concurrency
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

/// Units charged to a grant in place of a matched limit.
#[derive(Clone, Debug)]
pub(crate) struct GrantCharge {
    pub(crate) limit: usize,
    pub(crate) record: ChargeRecord,
}

/// Maximum number of attempts; more than any request has limits and grants to try.
const MAX_ROUNDS: usize = 8;

/// A denied request and the grants that may cover it.
struct GrantAllocation<'a, 'p> {
    plan: &'a Plan<'p>,
    charges: &'a [Charge<'a>],
    grants: &'a [Arc<Grant>],
    /// Index of the grant that covers each charge.
    assigned: SmallVec<[Option<usize>; 4]>,
    /// True for each grant that is used up or expired.
    exhausted: SmallVec<[bool; 4]>,
    /// Known outcome of each charge's own limit.
    known: SmallVec<[Outcome; 4]>,
}

impl GrantAllocation<'_, '_> {
    /// Assigns a grant to every exceeded limit. Returns whether all of them are covered.
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

    /// Records which charges were denied. Returns whether another attempt is worthwhile.
    fn record_denials(&mut self, asked: &[usize], outcomes: &[Outcome]) -> bool {
        let mut again = false;
        for (at, outcome) in asked.iter().zip(outcomes).filter(|(_, outcome)| outcome.verdict.is_denied()) {
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
    /// Charges grants for a request that limits deny, if its caller has enough of them. The outcomes are then the same
    /// as if the request had fit its limits.
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
            // Independent charges have already been applied.
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
            let charged = self.store.charge(&wanted).await.ok()?;
            if charged.admission == Admission::Denied {
                if !payment.record_denials(&asked, &charged.per_charge) {
                    return None;
                }
                continue;
            }
            outcomes.admission = Admission::Admitted;
            let mut paid = Vec::new();
            for ((at, charge), outcome) in asked.into_iter().zip(&wanted).zip(charged.per_charge) {
                if payment.assigned[at].is_some() {
                    paid.push(GrantCharge { limit: at, record: ChargeRecord::from_charge(charge) });
                    let paid = Outcome { verdict: Verdict::ALLOWED, ..outcomes.per_charge[at] };
                    outcomes.per_charge[at] = paid.with_remaining(outcome.remaining);
                } else {
                    outcomes.per_charge[at] = outcome;
                }
            }
            return Some(paid.into());
        }
        None
    }
}
