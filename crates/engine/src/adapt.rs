//! Adapted limits: while signals say that a service is overloaded, the limits of one tier after the other are tightened.
//!
//! They bear on plans as emergency measures do: a request's limits are scaled before they are charged, and usage stays.
//! While nothing is tightened, a request pays for reading one flag. Steps are made by reports of signals. Those that no report has made are
//! made up for by requests while limits are tightened, by [`Limiter::reconcile`] and when the state is read, so that limits recover at
//! the same time on a busy node, on an idle one, and if reports stop.
//!
//! `signals.rs` records what they follow.

use crate::check::Check;
use crate::decision::DecisionDetails;
use crate::emergency::MeasureEffect;
use crate::limiter::Limiter;
use crate::signals::{SignalError, SignalState};
use arc_swap::ArcSwap;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tollgate_core::Timestamp;
use tollgate_overload::{AdaptConfig, AdaptController, AdaptStep, WHOLE};
use tollgate_rules::{ADAPT_RULE, Adapt, LimitOrigin, Plan, Ruleset, Signal};

/// State of a tier whose limits follow signals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedTier {
    /// Domain of the rules.
    pub domain: String,
    /// The tier.
    pub tier: String,
    /// Thousandths of its limits that apply, or would if they were not held.
    pub thousandths: u32,
    /// Why its limits stay as in the rules, if they do.
    pub held: Option<HeldLimits>,
}

/// Why limits stay as in the rules, whatever signals say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldLimits {
    /// The section has `shadow: true`.
    Shadow,
    /// An emergency measure disables the rule [`ADAPT_RULE`].
    Measure,
}

impl HeldLimits {
    /// Returns the name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shadow => "shadow",
            Self::Measure => "measure",
        }
    }
}

impl AdaptedTier {
    /// Returns the percent of its limits that apply.
    #[must_use]
    pub fn percent(&self) -> f64 {
        self.shadow_percent().map_or(f64::from(self.thousandths) / 10.0, |_| 100.0)
    }

    /// Returns the percent of its limits that would apply if they were not held; `None` if they do apply.
    #[must_use]
    pub fn shadow_percent(&self) -> Option<f64> {
        self.held.map(|_| f64::from(self.thousandths) / 10.0)
    }
}

/// State of the limits of a domain that follow signals.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptationState {
    /// Domain of the rules.
    pub domain: String,
    /// The signals.
    pub signals: Vec<SignalState>,
    /// The tiers, in the order in which their limits are tightened.
    pub tiers: Vec<AdaptedTier>,
}

/// A step by which signals changed the limits of a tier.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedStep {
    /// Domain of the rules.
    pub domain: String,
    /// The tier.
    pub tier: String,
    /// Thousandths of its limits that applied before.
    pub from: u32,
    /// Thousandths that apply now.
    pub to: u32,
    /// The signal above its bound, its value and the bound; `None` if limits were loosened.
    pub signal: Option<(String, f64, f64)>,
}

type Listener = Box<dyn Fn(AdaptedStep) + Send + Sync>;

pub(crate) struct DomainAdaptation {
    pub(crate) adapt: Adapt,
    /// Whether steps are made and reported, but change no limit.
    is_shadow: bool,
    state: Mutex<AdaptState>,
    /// The controller's factors, for requests.
    factors: ArcSwap<Vec<u32>>,
    /// From when on a step has been missed, in microseconds.
    missed_at: AtomicU64,
    /// When upstreams are measured next.
    pub(crate) next_reading: AtomicU64,
}

pub(crate) struct AdaptState {
    pub(crate) controller: AdaptController,
    /// Highest value of each signal that this process has reported since it was last shared.
    pub(crate) own: Vec<Option<f64>>,
}

pub(crate) type Domains = HashMap<Box<str>, Arc<DomainAdaptation>>;

/// Adapted limits of all domains.
#[derive(Default)]
pub(crate) struct Adaptations {
    /// Whether any limit is tightened.
    any: AtomicBool,
    pub(crate) domains: ArcSwap<Domains>,
    listener: OnceLock<Listener>,
}

impl Adaptations {
    pub(crate) fn new(rules: &Ruleset) -> Self {
        let adaptations = Self::default();
        adaptations.on_rules_changed(rules);
        adaptations
    }

    /// Adjusts to new rules: a domain with the same settings keeps its state, and with others the levels of its tiers, from
    /// which its limits are loosened step by step.
    pub(crate) fn on_rules_changed(&self, rules: &Ruleset) {
        let known = self.domains.load_full();
        let mut domains = Domains::new();
        for domain in rules.domains() {
            let Some(overload) = domain.overload() else { continue };
            let Some(adapt) = &overload.adapt else { continue };
            let alike = known.get(domain.name()).filter(|known| known.is_shadow == overload.shadow);
            let own = match alike {
                Some(known) if known.adapt == *adapt => Arc::clone(known),
                Some(known) => Arc::new(known.with_settings(adapt)),
                None => Arc::new(DomainAdaptation::new(adapt, overload.shadow)),
            };
            domains.insert(domain.name().into(), own);
        }
        let changed: Vec<AdaptedStep> = known
            .iter()
            .flat_map(|(name, before)| before.steps_to(name, domains.get(name).map(|own| &**own)))
            .collect();
        self.domains.store(Arc::new(domains));
        self.refresh();
        for step in changed {
            let AdaptedStep { domain, tier, .. } = &step;
            let (from, to) = (f64::from(step.from) / 10.0, f64::from(step.to) / 10.0);
            tracing::warn!(domain, tier, from, to, "limits changed by new rules (percent)");
            if let Some(listener) = self.listener.get() {
                listener(step);
            }
        }
    }

    /// Returns a copy for requests that are only explained by `rules`: domains with the same settings begin with the state of
    /// now. Copies make no steps of their own, and report none.
    pub(crate) fn copy_for(&self, rules: &Ruleset, now: Timestamp) -> Self {
        let copy = Self::new(rules);
        let known = self.domains.load();
        for (domain, own) in copy.domains.load().iter() {
            let is_same =
                |known: &&Arc<DomainAdaptation>| known.adapt == own.adapt && known.is_shadow == own.is_shadow;
            if let Some(known) = known.get(domain).filter(is_same) {
                own.copy_state(known, now);
            }
            own.missed_at.store(u64::MAX, Ordering::Relaxed);
        }
        copy.refresh();
        copy
    }

    /// Makes the step in a copy that a report of these signals makes when it is time for one.
    pub(crate) fn suppose(
        &self,
        domain: &str,
        signals: &[(&str, f64)],
        now: Timestamp,
    ) -> Result<(), SignalError> {
        if signals.is_empty() {
            return Ok(());
        }
        let domains = self.domains.load();
        let Some(own) = domains.get(domain) else { return Err(SignalError::NotAdaptive(domain.to_owned())) };
        let found = signals.iter().map(|(name, value)| own.find(name, *value, |_| true));
        let found: Vec<(usize, f64)> = found.collect::<Result<_, _>>()?;
        let mut state = own.state();
        state.controller.suppose(found, now);
        own.factors.store(Arc::new(state.controller.factors().to_vec()));
        drop(state);
        self.refresh();
        Ok(())
    }

    fn refresh(&self) {
        let is_tightened =
            |domain: &Arc<DomainAdaptation>| domain.factors.load().iter().any(|factor| *factor < WHOLE);
        self.any.store(self.domains.load().values().any(is_tightened), Ordering::Relaxed);
    }

    /// Makes the steps of a domain that were missed.
    pub(crate) fn catch_up(&self, domain: &str, own: &DomainAdaptation, now: Timestamp) {
        if now.as_micros() >= own.missed_at.load(Ordering::Relaxed) {
            self.make_steps(domain, own, now, AdaptController::catch_up);
        }
    }

    /// Makes steps by a change of the controller, logs them and reports them to the listener.
    pub(crate) fn make_steps(
        &self,
        domain: &str,
        own: &DomainAdaptation,
        now: Timestamp,
        change: impl FnOnce(&mut AdaptController, Timestamp) -> Vec<AdaptStep>,
    ) {
        let steps = own.change(now, change);
        if steps.is_empty() {
            return;
        }
        self.refresh();
        for step in steps {
            let step = own.log(domain, step);
            if let Some(listener) = self.listener.get().filter(|_| !own.is_shadow) {
                listener(step);
            }
        }
    }

    #[inline]
    pub(crate) fn any_active(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }
}

impl DomainAdaptation {
    fn new(adapt: &Adapt, is_shadow: bool) -> Self {
        let config = AdaptConfig {
            bounds: adapt.signals.iter().map(|signal| signal.above).collect(),
            tiers: adapt.order.len(),
            least: u32::try_from(adapt.least).unwrap_or(WHOLE).clamp(1, WHOLE),
            step: adapt.step,
        };
        Self {
            adapt: adapt.clone(),
            is_shadow,
            factors: ArcSwap::from_pointee(vec![WHOLE; config.tiers]),
            state: Mutex::new(AdaptState {
                controller: AdaptController::new(config),
                own: vec![None; adapt.signals.len()],
            }),
            missed_at: AtomicU64::new(0),
            next_reading: AtomicU64::new(0),
        }
    }

    /// Returns the same with other settings: tiers keep their levels by name, as far as the settings allow them.
    fn with_settings(&self, adapt: &Adapt) -> Self {
        let next = Self::new(adapt, self.is_shadow);
        let factors: Vec<u32> = adapt.order.iter().map(|tier| self.factor(tier)).collect();
        // New settings are no reason for a step before its time.
        let next_step = self.state().controller.next_step();
        let mut state = next.state();
        state.controller = state.controller.clone().with_factors(&factors, next_step);
        next.factors.store(Arc::new(state.controller.factors().to_vec()));
        drop(state);
        next
    }

    /// Returns the thousandths of a tier's limits that apply.
    fn factor(&self, tier: &str) -> u32 {
        let at = self.adapt.order.iter().position(|known| known == tier);
        at.and_then(|at| self.factors.load().get(at).copied()).unwrap_or(WHOLE)
    }

    /// Returns what changes for its tiers when `next` takes its place.
    fn steps_to(&self, domain: &str, next: Option<&Self>) -> Vec<AdaptedStep> {
        if self.is_shadow {
            return Vec::new();
        }
        let next = next.filter(|next| !next.is_shadow);
        let tiers = self.adapt.order.iter();
        let levels =
            tiers.map(|tier| (tier, self.factor(tier), next.map_or(WHOLE, |next| next.factor(tier))));
        levels
            .filter(|(_, from, to)| from != to)
            .map(|(tier, from, to)| AdaptedStep {
                domain: domain.to_owned(),
                tier: tier.clone(),
                from,
                to,
                signal: None,
            })
            .collect()
    }

    /// Takes the state of `known` over, with the steps that were missed until now.
    fn copy_state(&self, known: &Self, now: Timestamp) {
        let mut controller = known.state().controller.clone();
        controller.catch_up(now);
        self.factors.store(Arc::new(controller.factors().to_vec()));
        self.state().controller = controller;
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, AdaptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the controller. Returns the steps by which limits changed.
    fn change(
        &self,
        now: Timestamp,
        change: impl FnOnce(&mut AdaptController, Timestamp) -> Vec<AdaptStep>,
    ) -> Vec<AdaptStep> {
        let mut state = self.state();
        let steps = change(&mut state.controller, now);
        let missed_at = state.controller.next_step() + self.adapt.step;
        // While limits are whole and nothing is reported there are no steps.
        let missed_at = if missed_at > now { missed_at } else { now + self.adapt.step };
        self.missed_at.store(missed_at.as_micros(), Ordering::Relaxed);
        if !steps.is_empty() {
            self.factors.store(Arc::new(state.controller.factors().to_vec()));
        }
        steps
    }

    /// Logs a step. Returns it for the listener.
    fn log(&self, domain: &str, step: AdaptStep) -> AdaptedStep {
        let tier = self.adapt.order.get(step.tier).map_or("", String::as_str);
        let (from, to) = (f64::from(step.from) / 10.0, f64::from(step.to) / 10.0);
        let loud = step.signal.and_then(|(at, value)| {
            self.adapt.signals.get(at).map(|signal| (signal.name.clone(), value, signal.above))
        });
        match &loud {
            Some((signal, value, bound)) if self.is_shadow => {
                tracing::info!(
                    domain,
                    tier,
                    from,
                    to,
                    signal,
                    value,
                    bound,
                    "limits would be tightened (percent)"
                );
            }
            Some((signal, value, bound)) => {
                tracing::warn!(domain, tier, from, to, signal, value, bound, "limits tightened (percent)");
            }
            None if self.is_shadow => {
                tracing::info!(domain, tier, from, to, "limits would be loosened (percent)");
            }
            None => tracing::info!(domain, tier, from, to, "limits loosened (percent)"),
        }
        AdaptedStep {
            domain: domain.to_owned(),
            tier: tier.to_owned(),
            from: step.from,
            to: step.to,
            signal: loud,
        }
    }
}

/// Returns whether an emergency measure gives a request its whole limits.
pub(crate) fn is_restored(effect: Option<&MeasureEffect>) -> bool {
    effect.is_some_and(|effect| effect.disabling(Some(ADAPT_RULE)).is_some())
}

impl<S> Limiter<S> {
    /// Returns whether limits of a request may be tightened.
    pub(crate) fn adapts(&self, check: &Check<'_>) -> bool {
        self.adaptations.any_active() && !is_restored(self.effect_of(check).as_deref())
    }

    /// Tightens all tiers as far as the rules allow, for rehearsals. Nothing loosens them until the next report or request.
    pub fn tighten_to_least(&self) {
        for own in self.adaptations.domains.load().values() {
            let least = u32::try_from(own.adapt.least).unwrap_or(WHOLE).clamp(1, WHOLE);
            own.factors.store(Arc::new(vec![least; own.adapt.order.len()]));
        }
        self.adaptations.refresh();
    }

    /// Calls `listener` after each step by which signals change limits, on the thread that made it: it must not block.
    /// The first listener stays.
    pub fn on_adapted(&self, listener: impl Fn(AdaptedStep) + Send + Sync + 'static) {
        let _ = self.adaptations.listener.set(Box::new(listener));
    }

    /// Makes the steps that were missed: limits recover without reports and requests.
    pub(crate) fn catch_up_adapted(&self) {
        for (domain, own) in self.adaptations.domains.load().iter() {
            self.adaptations.catch_up(domain, own, self.clock.now());
        }
    }

    /// Returns the state of all tiers whose limits follow signals.
    #[must_use]
    pub fn adapted_tiers(&self) -> Vec<AdaptedTier> {
        self.catch_up_adapted();
        let domains = self.adaptations.domains.load();
        let is_restored = self.measures.any_active() && self.measures.disables(ADAPT_RULE, self.clock.now());
        let mut tiers: Vec<AdaptedTier> = Vec::new();
        for (domain, own) in domains.iter() {
            let factors = own.factors.load();
            let held = match own.is_shadow {
                true => Some(HeldLimits::Shadow),
                false => is_restored.then_some(HeldLimits::Measure),
            };
            tiers.extend(own.adapt.order.iter().zip(factors.iter()).map(|(tier, factor)| AdaptedTier {
                domain: domain.to_string(),
                tier: tier.clone(),
                thousandths: *factor,
                held,
            }));
        }
        tiers.sort_by(|a, b| a.domain.cmp(&b.domain));
        tiers
    }

    /// Returns the state of all domains whose limits follow signals.
    #[must_use]
    pub fn adaptations(&self) -> Vec<AdaptationState> {
        let (domains, tiers) = (self.adaptations.domains.load(), self.adapted_tiers());
        let mut states: Vec<AdaptationState> = domains
            .iter()
            .map(|(domain, own)| {
                let state = own.state();
                let named = own.adapt.signals.iter().zip(state.controller.signals());
                let signal = |(signal, value): (&Signal, f64)| SignalState {
                    name: signal.name.clone(),
                    value,
                    bound: signal.above,
                    source: signal.source.name(),
                };
                AdaptationState {
                    domain: domain.to_string(),
                    signals: named.map(signal).collect(),
                    tiers: tiers.iter().filter(|tier| *tier.domain == **domain).cloned().collect(),
                }
            })
            .collect();
        states.sort_by(|a, b| a.domain.cmp(&b.domain));
        states
    }

    /// Scales the limits of a request whose tier is tightened, and makes the steps that were missed.
    #[cold]
    pub(crate) fn apply_adapted(
        &self,
        check: &Check<'_>,
        rules: &Ruleset,
        plan: &mut Plan<'_>,
        details: &mut DecisionDetails,
    ) {
        if let Some(own) = self.adaptations.domains.load().get(check.domain) {
            self.adaptations.catch_up(check.domain, own, self.clock.now());
        }
        self.scale_adapted(check, rules, plan, details);
    }

    /// Scales the limits of a request whose tier is tightened.
    #[cold]
    pub(crate) fn scale_adapted(
        &self,
        check: &Check<'_>,
        rules: &Ruleset,
        plan: &mut Plan<'_>,
        details: &mut DecisionDetails,
    ) {
        let domains = self.adaptations.domains.load();
        let own = domains.get(check.domain).filter(|own| !own.is_shadow);
        let (Some(own), Some(domain)) = (own, rules.domain(check.domain)) else { return };
        let tier =
            plan.quotas.iter().find_map(|quota| quota.tier()).or_else(|| check.value(domain.tier_key()));
        let Some(at) = own.adapt.order.iter().position(|known| Some(known.as_str()) == tier) else { return };
        let factor = own.factors.load().get(at).copied().unwrap_or(WHOLE);
        if factor == WHOLE {
            return;
        }
        let is_scaled = |matched: &&mut tollgate_rules::MatchedLimit<'_>| {
            matched.role.is_live() && matched.rule.is_none_or(|rule| !rule.is_shedding)
        };
        let mut is_felt = false;
        for matched in plan.limits.iter_mut().filter(is_scaled) {
            matched.limit = LimitOrigin::Inline(Box::new(
                matched.limit.map_limits(|limit| limit.scaled_permille(factor)),
            ));
            is_felt = true;
        }
        if is_felt && details.reason.is_none() {
            let percent = f64::from(factor) / 10.0;
            details.reason = Some(
                format!("limits of tier {} are at {percent}% because of overload", own.adapt.order[at])
                    .into(),
            );
        }
    }
}
