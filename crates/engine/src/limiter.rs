//! How a check runs, start to end: match, charge, fold. It always ends in a decision.

use crate::check::{Check, Request};
use crate::debts::Debts;
use crate::decision::{Answer, Decision, Origin, Ruling};
use crate::emergency::{Effect, Emergencies};
use crate::fallbacks::Fallbacks;
use crate::fold;
use crate::grant::Grants;
use crate::ids::DecisionId;
use crate::in_flight::InFlight;
use crate::observer::Observer;
use crate::reserve::Reservations;
use crate::tenants::Tenants;
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{Clock, CounterStore, PermitId, Span};
use tollgate_rules::{Charges, Plan, Ruleset, Tenant};
use tollgate_store::MemoryStore;

/// Rules and a store that decide together. Shared by all fronts.
pub struct Limiter<S> {
    rules: ArcSwap<Ruleset>,
    pub(crate) store: S,
    /// Every denial becomes an allowance; what the limits said is still told.
    pub(crate) shadow: AtomicBool,
    pub(crate) reservations: Reservations,
    pub(crate) clock: Arc<dyn Clock>,
    /// Counters of this process, for rules that fail to local.
    pub(crate) fallback: Option<MemoryStore<Arc<dyn Clock>>>,
    pub(crate) debts: Debts,
    pub(crate) fallbacks: Fallbacks,
    pub(crate) in_flight: InFlight,
    /// What is agreed with single callers.
    pub(crate) tenants: Option<Arc<dyn Tenants>>,
    /// What operators have decided in an emergency.
    pub(crate) emergencies: Arc<Emergencies>,
    pub(crate) observers: SmallVec<[Arc<dyn Observer>; 2]>,
    /// Whether one of them follows traces.
    pub(crate) is_traced: bool,
}

impl<S: CounterStore> Limiter<S> {
    /// A limiter that decides by `rules` over counters in `store`. The clock is for reservations' deadlines; counters
    /// have their store's own time.
    #[must_use]
    pub fn new(rules: Arc<Ruleset>, store: S, clock: Arc<dyn Clock>) -> Self {
        Self {
            rules: ArcSwap::new(rules),
            store,
            shadow: AtomicBool::new(false),
            reservations: Reservations::default(),
            clock,
            fallback: None,
            debts: Debts::default(),
            fallbacks: Fallbacks::default(),
            in_flight: InFlight::default(),
            tenants: None,
            emergencies: Arc::default(),
            observers: SmallVec::new(),
            is_traced: false,
        }
    }

    /// Puts everything in shadow, or takes it out.
    #[must_use]
    pub fn with_global_shadow(self, shadow: bool) -> Self {
        self.shadow.store(shadow, Ordering::Relaxed);
        self
    }

    /// Gives rules that fail to local counters of this process to decide by when the store is away.
    #[must_use]
    pub fn with_fallback(mut self, counters: MemoryStore<Arc<dyn Clock>>) -> Self {
        self.fallback = Some(counters);
        self
    }

    /// How often decisions were made without the store: rule, origin, count.
    #[must_use]
    pub fn fallbacks(&self) -> Vec<(String, &'static str, u64)> {
        self.fallbacks.all()
    }

    /// How many permits are held at this moment, by rule, as far as they are given back by those who hold them.
    #[must_use]
    pub fn in_flight(&self) -> Vec<(String, u64)> {
        self.in_flight.all()
    }

    /// Decides by other rules from now on. Counters of rules that stay keep their state.
    pub fn replace_rules(&self, rules: Arc<Ruleset>) {
        self.observers.iter().for_each(|observer| observer.acts(&rules));
        self.rules.store(rules);
    }

    /// The rules that decide now.
    #[must_use]
    pub fn rules(&self) -> Arc<Ruleset> {
        self.rules.load_full()
    }

    /// Whether these are they.
    #[must_use]
    pub fn acts_by(&self, rules: &Arc<Ruleset>) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.rules.load()), Arc::as_ptr(rules))
    }

    /// Where the counters are.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// The clock of reservations' deadlines, and of what answers say of the time.
    #[must_use]
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Decides. Cannot fail: when the store does, the rules' own policy answers.
    pub async fn check(&self, check: &Check<'_>) -> Decision {
        let mut decision = self.undecided();
        if self.check_at_once(check, &mut decision) {
            return decision;
        }
        {
            let Decision { id, answer, rules, tenant, grants, effect } = &mut decision;
            let mut plan = Plan::default();
            plan_into(rules, tenant.as_deref(), check, &mut plan);
            if let Some(effect) = effect {
                effect.bear_on(&mut plan);
            }
            self.answer(&plan, PermitId(id.0), grants.as_deref(), effect.as_deref_mut(), answer).await;
        }
        self.tell(check, &decision);
        decision
    }

    /// Decides without waiting, where the store need not be waited for; else `None`, and nothing is done.
    #[inline]
    pub fn check_now(&self, check: &Check<'_>) -> Option<Decision> {
        let mut decision = self.undecided();
        self.check_at_once(check, &mut decision).then_some(decision)
    }

    /// Whether [`Limiter::check_now`] mostly decides: over a store that never has to be waited for.
    #[inline]
    #[must_use]
    pub fn decides_at_once(&self) -> bool {
        self.store.charge_each_at_once(&[], &mut Vec::new())
    }

    /// Decides where the store need not be waited for; else does nothing. What is owed is paid first, and that may take a
    /// while.
    #[inline]
    fn check_at_once(&self, check: &Check<'_>, decision: &mut Decision) -> bool {
        // Before anything is put off: who goes on from here reads it.
        self.agree(check, decision);
        // Who was granted something may have to be charged twice.
        if self.debts.are_open() || decision.grants.is_some() {
            return false;
        }
        {
            let Decision { id, answer, rules, tenant, effect, .. } = decision;
            let mut plan = Plan::default();
            plan_into(rules, tenant.as_deref(), check, &mut plan);
            if let Some(effect) = effect {
                effect.bear_on(&mut plan);
            }
            if !plan.hits.is_empty() {
                let mut charges = Charges::new();
                plan.charges(PermitId(id.0), &mut charges);
                let Some(outcomes) = self.store.charge_at_once(&charges) else { return false };
                fold::fold(&plan, &outcomes, answer);
            }
            self.finish(&plan, effect.as_deref_mut(), answer);
        }
        self.tell(check, decision);
        true
    }

    /// A decision that lets pass, with a name and the rules of now.
    #[inline(always)]
    pub(crate) fn undecided(&self) -> Decision {
        let answer = Answer::plain(Ruling::Allowed { delay: Span::ZERO }, Origin::Unmatched);
        let rules = self.rules.load();
        Decision { id: DecisionId::fresh(), answer, rules, tenant: None, grants: None, effect: None }
    }

    /// Looks up what is agreed with the caller, and what operators have decided in an emergency.
    #[inline]
    pub(crate) fn agree(&self, check: &Check<'_>, decision: &mut Decision) {
        let agreed = self.agreed_with(check, &decision.rules);
        (decision.tenant, decision.grants) = (agreed.tenant, agreed.grants);
        decision.effect = self.effect_of(check);
    }

    /// Charges a plan and writes what came of it into the answer.
    pub(crate) async fn answer(
        &self,
        plan: &Plan<'_>,
        permit: PermitId,
        grants: Option<&Grants>,
        effect: Option<&mut Effect>,
        answer: &mut Answer,
    ) {
        if !plan.hits.is_empty() {
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            let outcomes = match self.pay_first(&charges).await {
                Ok(()) => self.store.charge(&charges).await,
                Err(error) => Err(error),
            };
            match outcomes {
                Ok(mut outcomes) => {
                    let paid = match grants {
                        Some(grants) => self.pay(plan, &charges, grants, &mut outcomes).await,
                        None => None,
                    };
                    fold::fold(plan, &outcomes, answer);
                    if paid.is_some() {
                        answer.origin = Origin::Grant;
                        answer.granted = paid;
                    }
                }
                Err(error) => self.fall_back(plan, &charges, error, answer).await,
            }
        }
        self.finish(plan, effect, answer);
    }

    /// What every answer ends with.
    #[inline]
    fn finish(&self, plan: &Plan<'_>, effect: Option<&mut Effect>, answer: &mut Answer) {
        fold::descriptors(plan, answer);
        if let Some(effect) = effect {
            effect.rule(answer);
        }
        if self.shadow.load(Ordering::Relaxed) && !answer.is_allowed() {
            answer.ruling = Ruling::Allowed { delay: Span::ZERO };
            answer.denied_by = None;
        }
    }
}

/// What a request meets; nothing, where the domain is not known.
pub(crate) fn plan_into<'p>(
    rules: &'p Ruleset,
    tenant: Option<&'p Tenant>,
    check: &'p Check<'p>,
    plan: &mut Plan<'p>,
) {
    plan.tenant = tenant;
    match (rules.domain(check.domain), check.request) {
        (None, Request::Attributes(_)) => plan.matches.push(Default::default()),
        (None, Request::Descriptors(descriptors)) => {
            plan.matches = SmallVec::from_elem(Default::default(), descriptors.len());
        }
        (Some(domain), Request::Attributes(attributes)) => domain.plan_into(attributes, check.cost, plan),
        (Some(domain), Request::Descriptors(descriptors)) => {
            domain.plan_descriptors_into(descriptors, check.cost, plan);
        }
    }
}
