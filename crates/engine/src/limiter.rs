//! The decision path: every check, admission and reservation is planned once, charged once and folded once.
//!
//! `Limiter::check` is a future that a caller awaits. Where the store answers without waiting (`CounterStore::try_charge`),
//! the future is ready in its first poll; where it does not, the same future awaits the same charges. Synchronous twins of
//! these functions were rejected: each had to plan for itself, and a plan is not free of effects (a counter that is split
//! into shards moves on to its next shard).

use crate::check::{Check, CheckInput};
use crate::decision::{Decision, DecisionDetails, DecisionVerdict, Origin};
use crate::decision_id::DecisionId;
use crate::emergency::ActiveMeasures;
use crate::fallback::TryCharge;
use crate::fallback_counts::FallbackCounts;
use crate::fold;
use crate::grant::Grants;
use crate::in_flight::InFlight;
use crate::observer::Observer;
use crate::permit_guard::Renewals;
use crate::quota_provider::{CallerQuota, QuotaProvider};
use crate::reconcile::PendingCharges;
use crate::reconsider::FullCounters;
use crate::reservation::Reservations;
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{Clock, CounterStore, Outcomes, PermitId, TimeDelta};
use tollgate_rules::{CallerOverrides, Charges, Plan, Ruleset};

/// Rules and a store that decide together. Shared by all fronts.
pub struct Limiter<S> {
    pub(crate) rules: ArcSwap<Ruleset>,
    pub(crate) store: S,
    /// Every denial becomes an allowance; what the limits said is still told.
    pub(crate) shadow: AtomicBool,
    pub(crate) reservations: Reservations,
    pub(crate) clock: Arc<dyn Clock>,
    /// Counters of this process, for rules that fail to local.
    pub(crate) fallback: Option<Box<dyn TryCharge>>,
    pub(crate) pending: PendingCharges,
    pub(crate) fallback_counts: FallbackCounts,
    pub(crate) in_flight: InFlight,
    /// Permits of requests in progress.
    pub(crate) renewals: Renewals,
    /// Split counters without room in any shard.
    pub(crate) full_counters: FullCounters,
    /// What is agreed with single callers.
    pub(crate) quotas: Option<Arc<dyn QuotaProvider>>,
    /// What operators have decided in an emergency.
    pub(crate) measures: Arc<ActiveMeasures>,
    pub(crate) observers: SmallVec<[Arc<dyn Observer>; 2]>,
    /// Whether one of them follows traces.
    pub(crate) is_traced: bool,
}

/// What came of charging without waiting.
enum Tried {
    /// The answer is written.
    Decided,
    /// The store must be waited for; nothing is charged.
    Declined,
    /// Denied, but other shards or grants may still admit it.
    Denied(Box<Outcomes>),
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
            pending: PendingCharges::default(),
            fallback_counts: FallbackCounts::default(),
            in_flight: InFlight::default(),
            renewals: Renewals::default(),
            full_counters: FullCounters::default(),
            quotas: None,
            measures: Arc::default(),
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

    /// Gives rules that fail to local these counters to decide by while the store is unavailable: any store that charges
    /// without waiting. One that declines ([`CounterStore::try_charge`]) is as good as none.
    #[must_use]
    pub fn with_fallback(mut self, counters: impl CounterStore + 'static) -> Self {
        self.fallback = Some(Box::new(counters));
        self
    }

    /// How often decisions were made without the store: rule, origin, count.
    #[must_use]
    pub fn fallback_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.fallback_counts.all()
    }

    /// How many permits are held at this moment, by rule, as far as they are given back by those who hold them.
    #[must_use]
    pub fn in_flight(&self) -> Vec<(String, u64)> {
        self.in_flight.all()
    }

    /// Decides by other rules from now on. Counters of rules that stay keep their state.
    pub fn replace_rules(&self, rules: Arc<Ruleset>) {
        self.observers.iter().for_each(|observer| observer.on_rules_changed(&rules));
        self.rules.store(rules);
    }

    /// The rules that decide now.
    #[must_use]
    pub fn rules(&self) -> Arc<Ruleset> {
        self.rules.load_full()
    }

    /// Whether these rules are active.
    #[must_use]
    pub fn is_active(&self, rules: &Arc<Ruleset>) -> bool {
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

    /// Decides. Cannot fail: when the store does, the rules' own policy answers. Ready in the first poll where the store
    /// need not be waited for.
    #[inline]
    pub fn check(&self, check: &Check<'_>) -> impl Future<Output = Decision> {
        self.decide(check, DecisionId::generate(), |_, _| ())
    }

    /// Plans, charges and folds one request, and reports the decision. `keep` sees the plan and its answer before the plan is
    /// dropped: what outlives the request (permits, reservations) is made of it.
    #[inline]
    pub(crate) async fn decide(
        &self,
        check: &Check<'_>,
        id: DecisionId,
        mut keep: impl FnMut(&Plan<'_>, &DecisionDetails),
    ) -> Decision {
        let rules = self.rules.load();
        let CallerQuota { overrides: tenant, grants } = self.quota_for(check, &rules);
        let mut effect = self.effect_of(check);
        let mut details = DecisionDetails::unmatched();
        {
            let permit = PermitId(id.0);
            let mut plan = Plan::default();
            plan_into(&rules, tenant.as_deref(), check, &mut plan);
            if let Some(effect) = &mut effect {
                effect.apply_to(&mut plan);
            }
            if !plan.limits.is_empty() {
                match self.try_charge(&plan, permit, grants.is_some(), &mut details) {
                    Tried::Decided => {}
                    // Boxed, for it is large, and every check would carry it.
                    tried => {
                        Box::pin(self.charge(&mut plan, permit, tried, grants.as_deref(), &mut details))
                            .await;
                    }
                }
            }
            fold::descriptors(&plan, &mut details);
            if let Some(effect) = &mut effect {
                effect.override_verdict(&mut details);
            }
            if self.shadow.load(Ordering::Relaxed) && !details.is_allowed() {
                details.verdict = DecisionVerdict::Allowed { delay: TimeDelta::ZERO };
                details.denied_by = None;
            }
            keep(&plan, &details);
        }
        let decision = Decision { id, details, rules, overrides: tenant, grants, effect };
        self.notify_observers(check, &decision);
        decision
    }

    /// Charges the plan without waiting, where the store can and the outcome is the last word.
    #[inline]
    fn try_charge(
        &self,
        plan: &Plan<'_>,
        permit: PermitId,
        has_grants: bool,
        details: &mut DecisionDetails,
    ) -> Tried {
        if self.pending.any_pending() {
            return Tried::Declined;
        }
        // One limit needs no list; and one call, which is then inlined.
        let (one, mut many) =
            (plan.limits.first().map(|matched| [plan.charge(matched, permit)]), Charges::new());
        let charges = match &one {
            Some(one) if plan.limits.len() == 1 => &one[..],
            _ => {
                plan.charges(permit, &mut many);
                &many
            }
        };
        let mut outcomes = Outcomes::default();
        if !self.store.try_charge(charges, &mut outcomes) {
            return Tried::Declined;
        }
        if (has_grants || plan.is_split) && fold::is_denied(plan, &outcomes) {
            return Tried::Denied(Box::new(outcomes));
        }
        fold::fold(plan, &outcomes, details);
        Tried::Decided
    }

    /// Charges the plan where the store must be waited for, or a denial is not the last word.
    async fn charge(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        tried: Tried,
        grants: Option<&Grants>,
        details: &mut DecisionDetails,
    ) {
        let charged = match tried {
            Tried::Denied(outcomes) => Ok(*outcomes),
            Tried::Declined | Tried::Decided => {
                let mut charges = Charges::new();
                plan.charges(permit, &mut charges);
                match self.reconcile_before(&charges).await {
                    Ok(()) => self.store.charge(&charges).await,
                    Err(error) => Err(error),
                }
            }
        };
        let mut outcomes = match charged {
            Ok(outcomes) => outcomes,
            Err(error) => return self.apply_fail_policy(plan, permit, error, details).await,
        };
        let mut paid = None;
        if (grants.is_some() || plan.is_split) && fold::is_denied(plan, &outcomes) {
            paid = self.reconsider(plan, permit, grants, &mut outcomes).await;
        }
        fold::fold(plan, &outcomes, details);
        if paid.is_some() {
            details.origin = Origin::Grant;
            details.granted = paid;
        }
    }
}

/// What a request meets; nothing, where the domain is not known.
#[inline]
pub(crate) fn plan_into<'p>(
    rules: &'p Ruleset,
    tenant: Option<&'p CallerOverrides>,
    check: &'p Check<'p>,
    plan: &mut Plan<'p>,
) {
    plan.overrides = tenant;
    match (rules.domain(check.domain), check.input) {
        (None, CheckInput::Attributes(_)) => plan.matches.push(Default::default()),
        (None, CheckInput::Descriptors(descriptors)) => {
            plan.matches = SmallVec::from_elem(Default::default(), descriptors.len());
        }
        (Some(domain), CheckInput::Attributes(attributes)) => domain.plan_into(attributes, check.cost, plan),
        (Some(domain), CheckInput::Descriptors(descriptors)) => {
            domain.plan_descriptors_into(descriptors, check.cost, plan);
        }
    }
}
