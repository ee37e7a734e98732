//! The decision path: every check, admission and reservation is planned once, charged once and folded once.
//!
//! `Limiter::check` is a future. If the store can charge without waiting (`CounterStore::try_charge`), the future is
//! ready in its first poll; if not, the same future awaits the same charges. Synchronous twins of these functions were
//! rejected: each had to plan for itself, and planning has side effects (a split counter moves on to its next shard).

use crate::adapt::is_restored;
use crate::check::{Check, CheckInput};
use crate::decision::{DecidedBy, Decision, DecisionDetails, DecisionVerdict, Origin};
use crate::decision_body::{Contents, DecisionBody};
use crate::decision_id::DrawnId;
use crate::emergency::MeasureEffect;
use crate::fleet_shadow::ShadowFleet;
use crate::fold;
use crate::grant::Grants;
use crate::limiter::Limiter;
use crate::panic::Panicked;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_core::{
    Algorithm, Charge, CounterStore, LossPolicy, Mode, Outcomes, PermitId, RegionMode, TimeDelta,
};
use tollgate_rules::{CallerOverrides, Charges, MatchedLimit, Plan, Ruleset};

/// What a decision needs beside its plan.
#[derive(Clone, Copy)]
struct Request<'p> {
    check: &'p Check<'p>,
    rules: &'p Ruleset,
    quotas: &'p [Arc<CallerOverrides>],
    grants: Option<&'p Grants>,
    permit: PermitId,
}

/// A request that could not be decided without waiting.
struct Undecided<'p> {
    plan: Box<Plan<'p>>,
    /// What has been done: never [`Tried::Decided`].
    tried: Result<Tried, Panicked>,
}

/// Result of charging without waiting.
pub(crate) enum Tried {
    /// The decision is complete.
    Decided,
    /// The store must be awaited; nothing has been charged.
    Declined,
    /// Denied, but other shards or grants may still admit it.
    Denied(Box<Outcomes>),
}

impl<S: CounterStore> Limiter<S> {
    /// Decides one request. Never fails: if the store fails, the rules' fail policy decides. Ready in the first poll if
    /// the store can charge without waiting.
    ///
    /// Its permits have no named holder, because none is returned: a negative cost gives one back, from whichever
    /// check it came.
    #[inline]
    pub fn check(&self, check: &Check<'_>) -> impl Future<Output = Decision> {
        self.decide(check, |_| PermitId::ANONYMOUS, |_, _| ())
    }

    /// Begins a decision by the active rules.
    #[inline]
    pub(crate) fn begin(&self, id: DrawnId) -> Decision {
        let mut body = DecisionBody::new(&self.generation, || self.rules.load_full());
        body.details.drawn_id = id;
        Decision { body }
    }

    /// Plans, charges and folds one request, and reports the decision to the observers. `keep` receives the plan and
    /// the decision details before the plan is dropped, to build what outlives the request (permits, reservations).
    /// `holder` names the holder of its permits.
    #[allow(
        clippy::manual_async_fn,
        reason = "an async function copies its arguments before it begins; a block uses them where they are"
    )]
    #[inline]
    pub(crate) fn decide(
        &self,
        check: &Check<'_>,
        holder: impl FnOnce(DrawnId) -> PermitId,
        keep: impl FnMut(&Plan<'_>, &DecisionDetails) + Send,
    ) -> impl Future<Output = Decision> {
        self.decide_changed(check, holder, |_| (), keep)
    }

    /// The same, with a plan that `change` has changed before it is charged.
    #[allow(clippy::manual_async_fn, reason = "as above")]
    #[inline]
    pub(crate) fn decide_changed(
        &self,
        check: &Check<'_>,
        holder: impl FnOnce(DrawnId) -> PermitId,
        change: impl Fn(&mut Plan<'_>),
        mut keep: impl FnMut(&Plan<'_>, &DecisionDetails) + Send,
    ) -> impl Future<Output = Decision> {
        async move {
            // The ID first: what could panic comes after it.
            let mut decision = self.begin(DrawnId::draw());
            {
                let Contents { details, rules, quotas, grants, effect, .. } = &mut *decision.body;
                let permit = holder(details.drawn_id);
                if self.quotas.is_some() || self.measures.any_active() {
                    let known = self.guarded(|| (self.quota_for(check, rules), self.effect_of(check)));
                    let (quota, measures) = known.unwrap_or_default();
                    (*quotas, *grants, *effect) = (quota.quotas, quota.grants, measures);
                }
                let request = Request { check, rules, quotas, permit, grants: grants.as_deref() };
                let undecided = self.try_decide(request, effect.as_deref_mut(), &change, &mut keep, details);
                if let Some(undecided) = undecided {
                    self.finish(request, undecided, effect.as_deref_mut(), &mut keep, details).await;
                }
            }
            self.notify_observers(check, &decision);
            if decision.rules().has_billing() {
                self.record_consumption(check, &decision);
            }
            decision
        }
    }

    /// Plans a request, charges it and concludes its decision, all in the first poll. If the store must be awaited, or other counters may
    /// still admit it, returns the plan, for [`Self::finish`]: it is planned once in either case. A plan is large: it is only part of a
    /// future that awaits the store.
    #[inline(always)]
    fn try_decide<'p>(
        &self,
        request: Request<'p>,
        mut effect: Option<&mut MeasureEffect>,
        change: &impl Fn(&mut Plan<'_>),
        keep: &mut impl FnMut(&Plan<'_>, &DecisionDetails),
        details: &mut DecisionDetails,
    ) -> Option<Undecided<'p>> {
        let mut plan = Plan::default();
        let tried =
            self.guarded(|| self.plan_and_try(&request, effect.as_deref_mut(), change, &mut plan, details));
        if !matches!(tried, Ok(Tried::Decided)) {
            return Some(Undecided { plan: Box::new(plan), tried });
        }
        self.conclude(&request, &plan, effect, keep, details);
        // Taken apart only if there is something to take apart: a call for nothing costs as much as a list.
        if plan.owns_memory() {
            drop(plan);
        } else {
            std::mem::forget(plan);
        }
        None
    }

    /// Adds what is known of a decision besides the outcomes of its limits.
    #[inline(always)]
    fn conclude(
        &self,
        request: &Request<'_>,
        plan: &Plan<'_>,
        effect: Option<&mut MeasureEffect>,
        keep: &mut (impl FnMut(&Plan<'_>, &DecisionDetails) + ?Sized),
        details: &mut DecisionDetails,
    ) {
        let Request { check, rules, .. } = request;
        if plan.is_split && plan.limits.iter().any(|matched| matched.cost.is_refund()) {
            self.full_counters.clear();
        }
        if let Some(effect) = effect {
            effect.override_verdict(details);
        }
        if self.shadow.load(Ordering::Relaxed) && !details.is_allowed() {
            details.verdict = DecisionVerdict::Allowed { delay: TimeDelta::ZERO };
            details.denied_by = None;
        }
        if details.denied_by.is_some() || plan.is_fleet_shadow() {
            self.record_fleet_shed(check, rules, plan, details);
            details.is_assumed = self.denies_by_assumption(plan, request.permit, details);
        }
        if let Some(reason) = check.reason.filter(|_| details.is_allowed()) {
            details.reason = Some(reason.into());
        }
        if details.malformed_cost.is_some() && details.denied_by != Some(DecidedBy::MalformedCost) {
            details.malformed_cost = None;
        }
        keep(plan, details);
    }

    /// Returns whether the store has assumed what the denying limit's counter holds.
    #[cold]
    fn denies_by_assumption(&self, plan: &Plan<'_>, permit: PermitId, details: &DecisionDetails) -> bool {
        let Some(denying) = details.denying_limit().filter(|_| details.origin == Origin::Store) else {
            return false;
        };
        let matched =
            details.limits.iter().zip(&plan.limits).find(|(status, _)| std::ptr::eq(*status, denying));
        matched.is_some_and(|(_, matched)| self.is_assumed(&plan.charge(matched, permit)))
    }

    /// Returns whether the store did not know the state of a charge's counter when it last answered, and assumed that it was
    /// used up.
    pub(crate) fn is_assumed(&self, charge: &Charge<'_>) -> bool {
        charge.loss_policy == LossPolicy::AssumeExhausted
            && self.store.last_known(charge).is_some_and(|known| known.is_assumed)
    }

    /// Plans a request, and charges the plan if the store can without waiting.
    #[inline(always)]
    fn plan_and_try<'p>(
        &self,
        request: &Request<'p>,
        mut effect: Option<&mut MeasureEffect>,
        change: &impl Fn(&mut Plan<'_>),
        plan: &mut Plan<'p>,
        details: &mut DecisionDetails,
    ) -> Tried {
        let is_known = plan_into(request.rules, request.quotas, request.check, plan);
        if let Some(effect) = &mut effect {
            effect.apply_to(plan, details);
        }
        if self.adaptations.any_active() && !is_restored(effect.as_deref()) {
            self.apply_adapted(request.check, request.rules, plan, details);
        }
        if !is_known {
            if self.denies_unknown.load(Ordering::Relaxed) {
                details.deny_uncharged(DecidedBy::UnknownDomain);
            }
            details.suggest_domain(request.rules, request.check.domain);
        }
        if plan.limits.is_empty() || plan.malformed_cost.is_some() {
            decide_uncharged(plan, details);
            return Tried::Decided;
        }
        change(plan);
        let (permit, has_grants) = (request.permit, request.grants.is_some());
        if plan.fleet.is_some() {
            fold::descriptors(plan, details);
            return self.try_charge_shared(plan, permit, has_grants, details);
        }
        self.try_charge(plan, permit, has_grants, details)
    }

    /// Charges the plan without waiting, if the store can and the outcome is final.
    #[inline(always)]
    fn try_charge(
        &self,
        plan: &Plan<'_>,
        permit: PermitId,
        has_grants: bool,
        details: &mut DecisionDetails,
    ) -> Tried {
        // A single limit needs no list, and its counter is on its way into the processor's cache before the rest. Where the
        // plan's lists are is asked once, not for each field that is read.
        if !plan.is_spilled()
            && let [matched] = &plan.limits[..]
        {
            let charge = plan.charge(matched, permit);
            if let Some(name) = self.store.prefetch(&charge.key) {
                fold::descriptors(plan, details);
                if self.pending.any_pending() {
                    return Tried::Declined;
                }
                let Some(charged) = self.store.try_charge_named(&charge, name) else {
                    return Tried::Declined;
                };
                if charged.outcome.verdict.is_denied() && (has_grants || plan.is_split) {
                    let mut outcomes = Box::<Outcomes>::default();
                    charged.write_to(&charge, &mut outcomes);
                    if fold::is_denied(plan, &outcomes) {
                        return Tried::Denied(outcomes);
                    }
                }
                fold::fold_only(plan, matched, charged, details);
                return Tried::Decided;
            }
        }
        self.try_charge_list(plan, permit, has_grants, details)
    }

    /// Charges a plan of several limits, or whose store does not name counters. Apart, to keep the usual path short.
    #[inline(never)]
    fn try_charge_list(
        &self,
        plan: &Plan<'_>,
        permit: PermitId,
        has_grants: bool,
        details: &mut DecisionDetails,
    ) -> Tried {
        fold::descriptors(plan, details);
        if self.pending.any_pending() {
            return Tried::Declined;
        }
        let mut charges = Charges::new();
        plan.charges(permit, &mut charges);
        let mut outcomes = Outcomes::default();
        if !self.store.try_charge(&charges, &mut outcomes) {
            return Tried::Declined;
        }
        if (has_grants || plan.is_split) && fold::is_denied(plan, &outcomes) {
            return Tried::Denied(Box::new(outcomes));
        }
        fold::fold(plan, &outcomes, details);
        Tried::Decided
    }

    /// Finishes a decision whose charges the store must be awaited for or may still admit, or that panicked. Apart and
    /// boxed because these futures are large: every check would carry them, and reserve stack for them. What is rarely
    /// awaited within them is boxed too: a future is moved as a whole, and has room for the largest of what it may await.
    #[cold]
    #[inline(never)]
    fn finish<'f>(
        &'f self,
        request: Request<'f>,
        undecided: Undecided<'f>,
        effect: Option<&'f mut MeasureEffect>,
        keep: &'f mut (dyn FnMut(&Plan<'_>, &DecisionDetails) + Send),
        details: &'f mut DecisionDetails,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'f>> {
        Box::pin(async move {
            let Undecided { mut plan, tried } = undecided;
            let Request { permit, grants, .. } = request;
            let charged = match tried {
                Ok(tried) => {
                    let charge = pin!(self.charge(&mut plan, permit, tried, grants, details));
                    self.guarded_future(charge).await
                }
                Err(panic) => Err(panic),
            };
            if let Err(panic) = charged {
                Box::pin(self.decide_after_panic(panic, &mut plan, permit, details)).await;
            }
            self.conclude(&request, &plan, effect, keep, details);
        })
    }

    /// Charges the plan if the store must be awaited or a denial is not final.
    async fn charge(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        tried: Tried,
        grants: Option<&Grants>,
        details: &mut DecisionDetails,
    ) {
        if plan.refunded_claims().is_some() {
            Box::pin(self.choose_refunded_claim(plan)).await;
        }
        let mut shadow = ShadowFleet::Open;
        let mut known = None;
        let charged = match tried {
            Tried::Denied(outcomes) => Ok(*outcomes),
            Tried::Declined | Tried::Decided => {
                let mut charges = Charges::new();
                plan.charges(permit, &mut charges);
                let charged = match self.shed_charges(plan, details) {
                    Some(shed) => Err(shed),
                    None => match self.reconcile_before(&charges).await {
                        Ok(()) if plan.is_fleet_shadow() => Ok(None),
                        Ok(()) => self.charge_awaited(&charges).await.map(Some),
                        Err(error) => Err(error),
                    },
                };
                drop(charges);
                match charged {
                    Ok(Some(outcomes)) => Ok(outcomes),
                    Ok(None) => {
                        let (charged, fleet) = Box::pin(self.charge_with_shadow_fleet(plan, permit)).await;
                        shadow = fleet;
                        charged.map_err(|undecided| {
                            known = undecided.known;
                            undecided.error
                        })
                    }
                    Err(error) => Err(error),
                }
            }
        };
        let charged = match charged {
            Ok(mut outcomes) if plan.fleet.is_some() && !plan.is_fleet_shadow() => {
                match Box::pin(self.retry_fleet(plan, permit, &mut outcomes, &[])).await {
                    Ok(()) => Ok(outcomes),
                    Err(error) => {
                        known = Some(outcomes);
                        Err(error)
                    }
                }
            }
            charged => charged,
        };
        let mut outcomes = match charged {
            Ok(outcomes) => outcomes,
            Err(error) => {
                return Box::pin(self.apply_fail_policy(plan, permit, error, known, details)).await;
            }
        };
        let mut paid = None;
        if (grants.is_some() || plan.is_split) && fold::is_denied(plan, &outcomes) {
            paid = Box::pin(self.reconsider(plan, permit, grants, &mut outcomes)).await;
        }
        if shadow == ShadowFleet::Open && plan.is_fleet_shadow() && !fold::is_denied(plan, &outcomes) {
            Box::pin(self.charge_shadow_fleet(plan, permit, &mut outcomes)).await;
        }
        plan.settle_fleet(&mut outcomes);
        if plan.is_split {
            plan.return_turns(&outcomes);
        }
        fold::fold(plan, &outcomes, details);
        if self.store.is_regional_only() && plan.limits.iter().any(is_shared_by_cells) {
            details.origin = Origin::Regional;
        }
        if paid.is_some() {
            details.origin = Origin::Grant;
            details.granted = paid;
        }
    }
}

/// Returns whether cells share a limit by exchanging consumption. While some are silent, the store never decides it without
/// waiting.
fn is_shared_by_cells(matched: &MatchedLimit<'_>) -> bool {
    matched.limit.scope.region_mode() == RegionMode::Shared
        && matched.limit.mode != Mode::Local
        && matched.limit.limit.algorithm() != Algorithm::Concurrency
}

/// Decides a request that no limit counts, or whose cost is malformed.
#[inline(always)]
pub(crate) fn decide_uncharged(plan: &Plan<'_>, details: &mut DecisionDetails) {
    if let Some(attribute) = plan.malformed_cost.filter(|_| !plan.limits.is_empty()) {
        details.malformed_cost = Some(attribute.into());
        details.deny_uncharged(DecidedBy::MalformedCost);
    }
    fold::descriptors(plan, details);
}

/// Adds the limits that a request matches to `plan`; none if the domain is unknown. Returns whether it is known.
#[inline(always)]
pub(crate) fn plan_into<'p>(
    rules: &'p Ruleset,
    quotas: &'p [Arc<CallerOverrides>],
    check: &'p Check<'p>,
    plan: &mut Plan<'p>,
) -> bool {
    plan.quotas = quotas;
    let domain = rules.domain(check.domain);
    match (domain, check.input) {
        (None, CheckInput::Attributes(_)) => plan.matches.push(Default::default()),
        (None, CheckInput::Descriptors(descriptors)) => {
            plan.matches = SmallVec::from_elem(Default::default(), descriptors.len());
        }
        (Some(domain), CheckInput::Attributes(attributes)) => domain.plan_into(attributes, check.cost, plan),
        (Some(domain), CheckInput::Descriptors(descriptors)) => {
            domain.plan_descriptors_into(descriptors, check.cost, plan);
        }
    }
    domain.is_some()
}
