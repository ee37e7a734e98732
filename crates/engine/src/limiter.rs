//! The decision path: every check, admission and reservation is planned once, charged once and folded once.
//!
//! `Limiter::check` is a future. If the store can charge without waiting (`CounterStore::try_charge`), the future is
//! ready in its first poll; if not, the same future awaits the same charges. Synchronous twins of these functions were
//! rejected: each had to plan for itself, and planning has side effects (a split counter moves on to its next shard).

use crate::adapt::{Adaptations, is_restored};
use crate::check::{Check, CheckInput};
use crate::check_shedding::CheckShedding;
use crate::consumption::Meter;
use crate::decision::{DecidedBy, Decision, DecisionDetails, DecisionVerdict, Origin, UnknownDomain};
use crate::decision_body::{Contents, DecisionBody, Generation};
use crate::decision_id::DrawnId;
use crate::emergency::{ActiveMeasures, MeasureEffect};
use crate::fallback::TryCharge;
use crate::fallback_counts::FallbackCounts;
use crate::fallback_start::FallbackStarts;
use crate::fleet_fairness::FleetShares;
use crate::fleet_shadow::ShadowFleet;
use crate::fleet_shed::FleetSheds;
use crate::fold;
use crate::grant::Grants;
use crate::in_flight::InFlight;
use crate::observer::Observer;
use crate::panic::{Panicked, Panics};
use crate::permit_guard::Renewals;
use crate::quota_provider::QuotaProvider;
use crate::reconcile::PendingCharges;
use crate::reconsider::FullCounters;
use crate::release_retry::PendingReleases;
use crate::reservation::Reservations;
use crate::upstream_meters::UpstreamMeters;
use crate::workers::WorkerGates;
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use tollgate_core::{
    Algorithm, Charge, Clock, CounterStore, LogThrottle, Mode, Outcomes, PermitId, RegionMode, TimeDelta,
};
use tollgate_rules::{CallerOverrides, Charges, MatchedLimit, Plan, Ruleset};

/// Rate limiter: decides requests with a rule set and a store. Shared by all protocol servers.
pub struct Limiter<S> {
    pub(crate) rules: ArcSwap<Ruleset>,
    pub(crate) generation: Generation,
    pub(crate) store: S,
    /// Global shadow mode: every denial becomes an allowance, and the outcomes are still reported.
    pub(crate) shadow: AtomicBool,
    /// Whether requests of domains without rules are denied.
    pub(crate) denies_unknown: AtomicBool,
    pub(crate) reservations: Reservations,
    pub(crate) clock: Arc<dyn Clock>,
    /// Local counters for rules with `on_error: local`.
    pub(crate) fallback: Option<Box<dyn TryCharge>>,
    pub(crate) fallback_starts: FallbackStarts,
    /// Number of nodes that share the store, as far as known; 0 if not.
    pub(crate) live_nodes: AtomicU32,
    /// Number of cells that a counter with an owner is divided among while the owner is away.
    cells: AtomicU32,
    pub(crate) pending: Arc<PendingCharges>,
    pub(crate) fallback_counts: FallbackCounts,
    pub(crate) in_flight: InFlight,
    pub(crate) fleet_sheds: FleetSheds,
    pub(crate) fleet_shares: FleetShares,
    pub(crate) release_failures: LogThrottle,
    /// Releases that failed and are tried again.
    pub(crate) pending_releases: PendingReleases,
    pub(crate) panics: Panics,
    /// Permits of requests in flight.
    pub(crate) renewals: Renewals,
    /// Split counters without room in any shard.
    pub(crate) full_counters: FullCounters,
    /// Lookup of callers' quotas.
    pub(crate) quotas: Option<Arc<dyn QuotaProvider>>,
    /// Limits that follow signals.
    pub(crate) adaptations: Adaptations,
    /// Gates of upstreams.
    pub(crate) workers: WorkerGates,
    /// Meters of upstreams.
    pub(crate) meters: UpstreamMeters,
    /// Shedding of checks while the process is overloaded.
    pub(crate) check_shedding: CheckShedding,
    /// Active emergency measures.
    pub(crate) measures: Arc<ActiveMeasures>,
    pub(crate) observers: SmallVec<[Arc<dyn Observer>; 2]>,
    /// True if an observer records traces.
    pub(crate) is_traced: bool,
    /// Recipient of the consumption of billed rules.
    pub(crate) meter: Option<Arc<dyn Meter>>,
}

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
    /// Creates a limiter that decides by `rules` with counters in `store`. The clock is for reservation deadlines;
    /// counters use the store's own time.
    #[must_use]
    pub fn new(rules: Arc<Ruleset>, store: S, clock: Arc<dyn Clock>) -> Self {
        Self {
            adaptations: Adaptations::new(&rules),
            workers: WorkerGates::new(&rules),
            meters: UpstreamMeters::new(&rules),
            fleet_shares: FleetShares::new(&rules),
            check_shedding: CheckShedding::default(),
            rules: ArcSwap::new(rules),
            generation: Generation::new(),
            store,
            shadow: AtomicBool::new(false),
            denies_unknown: AtomicBool::new(false),
            reservations: Reservations::new(Arc::clone(&clock)),
            clock,
            fallback: None,
            fallback_starts: FallbackStarts::default(),
            live_nodes: AtomicU32::new(0),
            cells: AtomicU32::new(1),
            pending: Arc::default(),
            fallback_counts: FallbackCounts::default(),
            in_flight: InFlight::default(),
            fleet_sheds: FleetSheds::default(),
            release_failures: LogThrottle::default(),
            pending_releases: PendingReleases::default(),
            panics: Panics::default(),
            renewals: Renewals::default(),
            full_counters: FullCounters::default(),
            quotas: None,
            measures: Arc::default(),
            observers: SmallVec::new(),
            is_traced: false,
            meter: None,
        }
    }

    /// Sets what happens to requests whose domain has no rules.
    #[must_use]
    pub fn with_unknown_domain(self, policy: UnknownDomain) -> Self {
        self.denies_unknown.store(policy == UnknownDomain::Deny, Ordering::Relaxed);
        self
    }

    /// Turns global shadow mode on or off.
    #[must_use]
    pub fn with_global_shadow(self, shadow: bool) -> Self {
        self.shadow.store(shadow, Ordering::Relaxed);
        self
    }

    /// Sets the fallback counters for rules with `on_error: local` while the store is unavailable: any store that
    /// charges without waiting. A store that declines ([`CounterStore::try_charge`]) has no effect.
    #[must_use]
    pub fn with_fallback(mut self, counters: impl CounterStore + 'static) -> Self {
        self.fallback = Some(Box::new(counters));
        self
    }

    /// Sets the number of nodes that share the store now: without it each uses its share of a limit. Rules compiled for a
    /// fixed number of nodes keep that.
    pub fn set_live_nodes(&self, nodes: u32) {
        self.live_nodes.store(nodes, Ordering::Relaxed);
    }

    /// Returns the number of nodes that share the store; 0 if unknown.
    #[must_use]
    pub fn live_nodes(&self) -> u32 {
        self.live_nodes.load(Ordering::Relaxed)
    }

    /// Sets the number of cells, each with live nodes of its own: without the store that decides it, a counter that cells
    /// share is divided among them first.
    pub fn set_cells(&self, cells: u32) {
        self.cells.store(cells.max(1), Ordering::Relaxed);
    }

    /// Returns the number of nodes that a charge's limit is divided among while its counter cannot be asked; 0 if unknown.
    pub(crate) fn nodes_of(&self, charge: &Charge<'_>) -> u32 {
        let (nodes, cells) = (self.live_nodes(), self.cells.load(Ordering::Relaxed));
        // A split limit is this cell's part already, and so are permits without an owner.
        let is_part = match charge.key.scope.region_mode() {
            RegionMode::Split => true,
            RegionMode::Shared => charge.limit.algorithm() == Algorithm::Concurrency,
            RegionMode::Owner | RegionMode::Leased => false,
        };
        if cells > 1 && !is_part { nodes.max(1).saturating_mul(cells) } else { nodes }
    }

    /// Returns the number of decisions made without the store, as (rule, origin, count).
    #[must_use]
    pub fn fallback_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.fallback_counts.all()
    }

    /// Returns the number of permits held now, by rule, as far as their holders release them.
    #[must_use]
    pub fn in_flight(&self) -> Vec<(String, u64)> {
        self.in_flight.all()
    }

    /// Replaces the active rules. Counters of unchanged rules keep their state.
    pub fn replace_rules(&self, rules: Arc<Ruleset>) {
        self.observers.iter().for_each(|observer| observer.on_rules_changed(&rules));
        self.workers.on_rules_changed(&rules);
        self.meters.on_rules_changed(&rules);
        self.fleet_shares.on_rules_changed(&rules);
        self.adaptations.on_rules_changed(&rules);
        self.rules.store(rules);
        self.generation.advance();
    }

    /// Returns the active rules.
    #[must_use]
    pub fn rules(&self) -> Arc<Ruleset> {
        self.rules.load_full()
    }

    /// Returns whether `rules` is the active rule set.
    #[must_use]
    pub fn is_active(&self, rules: &Arc<Ruleset>) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.rules.load()), Arc::as_ptr(rules))
    }

    /// Returns the counter store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Returns the clock used for reservation deadlines and for times in responses.
    #[must_use]
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

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
                let undecided = self.decide_now(request, effect.as_deref_mut(), &change, &mut keep, details);
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

    /// Decides a request without waiting; returns its plan if that cannot be done. A plan is large: it is only part of a future
    /// that awaits the store.
    #[inline(always)]
    fn decide_now<'p>(
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
        }
        if let Some(reason) = check.reason.filter(|_| details.is_allowed()) {
            details.reason = Some(reason.into());
        }
        if details.malformed_cost.is_some() && details.denied_by != Some(DecidedBy::MalformedCost) {
            details.malformed_cost = None;
        }
        keep(plan, details);
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
        if !is_known && self.denies_unknown.load(Ordering::Relaxed) {
            details.deny_uncharged(DecidedBy::UnknownDomain);
        }
        if plan.limits.is_empty() || plan.malformed_cost.is_some() {
            if let Some(attribute) = plan.malformed_cost.filter(|_| !plan.limits.is_empty()) {
                details.malformed_cost = Some(attribute.into());
                details.deny_uncharged(DecidedBy::MalformedCost);
            }
            fold::descriptors(plan, details);
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
