//! How a check runs, start to end: match, charge, fold. It always ends in a decision.

use crate::check::{Check, Request};
use crate::decision::{Answer, Decision, Origin, Ruling};
use crate::ids::DecisionId;
use crate::reserve::Reservations;
use crate::{failing, fold};
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{Clock, CounterStore, PermitId, Span};
use tollgate_rules::{Plan, Ruleset};

/// Rules and a store that decide together. Shared by all fronts.
pub struct Limiter<S> {
    rules: ArcSwap<Ruleset>,
    pub(crate) store: S,
    /// Every denial becomes an allowance; what the limits said is still told.
    shadow: AtomicBool,
    pub(crate) reservations: Reservations,
    pub(crate) clock: Arc<dyn Clock>,
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
        }
    }

    /// Puts everything in shadow, or takes it out.
    #[must_use]
    pub fn with_global_shadow(self, shadow: bool) -> Self {
        self.shadow.store(shadow, Ordering::Relaxed);
        self
    }

    /// Decides by other rules from now on. Counters of rules that stay keep their state.
    pub fn replace_rules(&self, rules: Arc<Ruleset>) {
        self.rules.store(rules);
    }

    /// The rules that decide now.
    #[must_use]
    pub fn rules(&self) -> Arc<Ruleset> {
        self.rules.load_full()
    }

    pub(crate) fn rules_now(&self) -> arc_swap::Guard<Arc<Ruleset>> {
        self.rules.load()
    }

    /// Where the counters are.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Decides. Cannot fail: when the store does, the rules' own policy answers.
    pub async fn check(&self, check: &Check<'_>) -> Decision {
        let rules = self.rules.load();
        let id = DecisionId::fresh();
        let answer = self.answer(&plan(&rules, check), PermitId(id.0)).await;
        Decision { id, answer, rules }
    }

    /// Charges a plan and says what came of it.
    pub(crate) async fn answer(&self, plan: &Plan<'_>, permit: PermitId) -> Answer {
        let mut answer = if plan.hits.is_empty() {
            Answer::plain(Ruling::Allowed { delay: Span::ZERO }, Origin::Unmatched)
        } else {
            match self.store.charge(&plan.charges(permit)).await {
                Ok(outcomes) => fold::fold(plan, &outcomes),
                Err(_) => failing::decide(plan),
            }
        };
        answer.descriptors = fold::descriptors(plan, &answer.limits);
        if self.shadow.load(Ordering::Relaxed) && !answer.is_allowed() {
            answer.ruling = Ruling::Allowed { delay: Span::ZERO };
            answer.denied_by = None;
        }
        answer
    }
}

/// What a request meets; nothing, where the domain is not known.
pub(crate) fn plan<'p>(rules: &'p Ruleset, check: &'p Check<'p>) -> Plan<'p> {
    match (rules.domain(check.domain), check.request) {
        (None, Request::Attributes(_)) => {
            Plan { matches: smallvec::smallvec![Default::default()], ..Plan::default() }
        }
        (None, Request::Descriptors(descriptors)) => {
            Plan { matches: SmallVec::from_elem(Default::default(), descriptors.len()), ..Plan::default() }
        }
        (Some(domain), Request::Attributes(attributes)) => domain.plan(attributes, check.cost),
        (Some(domain), Request::Descriptors(descriptors)) => domain.plan_descriptors(descriptors, check.cost),
    }
}
