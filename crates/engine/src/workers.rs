//! The worker shedder: requests pass a gate before they are charged and forwarded, and are shed there if the upstream
//! cannot take them.
//!
//! The gate comes before the counters, so that a request that is shed costs its caller nothing. A gate belongs to a domain
//! and an upstream, and is kept while the settings that made it stay the same; new rules with other settings begin with a
//! new gate, which knows what the old one has learned about the upstream and has its places: requests in flight count on.

mod pause;

use crate::check::Check;
use crate::decision::{DecidedBy, Decision, DecisionVerdict, DescriptorStatus, Origin};
use crate::decision_id::DecisionId;
use crate::limiter::Limiter;
use crate::upstream_meters::MeteredRequest;
use arc_swap::ArcSwap;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;
use tollgate_core::{Clock, CounterStore, TimeDelta};
use tollgate_overload::{
    Arrival, Ended, Entry, Gate, GateConfig, GateMode, GateState, GuaranteeScope, LimitConfig, LimitKind,
    NO_TIER, Shed, Ticket, TierShare, Waited,
};
use tollgate_rules::{Domain, MatchKind, Overload, Ruleset, TierFairness, WORKERS_RULE};

/// The adaptive limit never rises above this.
const CEILING: u32 = 100_000;
/// Most gates: upstreams have names in configurations, not in requests.
const MAX_GATES: usize = 1_024;

/// Gate of one upstream.
struct WorkerGate {
    gate: Gate<oneshot::Sender<WorkerPermit>>,
    config: GateConfig,
    clock: Arc<dyn Clock>,
}

type Gates = HashMap<Box<str>, HashMap<Box<str>, Arc<WorkerGate>, RandomState>, RandomState>;

/// Gates of all upstreams.
pub(crate) struct WorkerGates {
    /// Whether the active rules limit workers at all.
    is_enabled: AtomicBool,
    gates: ArcSwap<Gates>,
    hasher: RandomState,
}

/// State of one upstream's gate.
#[derive(Clone, Debug)]
pub struct UpstreamState {
    /// Domain of the rules.
    pub domain: String,
    /// Name of the upstream.
    pub upstream: String,
    /// Shares of tiers as the rules have them, in the order of [`GateState::tiers`].
    pub shares: Vec<TierFairness>,
    /// State of the gate.
    pub gate: GateState,
}

impl WorkerGates {
    pub(crate) fn new(rules: &Ruleset) -> Self {
        let gates = Self {
            is_enabled: AtomicBool::new(false),
            gates: ArcSwap::default(),
            hasher: RandomState::default(),
        };
        gates.on_rules_changed(rules);
        gates
    }

    /// Adjusts to new rules: gates whose settings are gone are dropped when their last request ends.
    pub(crate) fn on_rules_changed(&self, rules: &Ruleset) {
        let limits = |domain: &Domain| domain.overload().is_some_and(|overload| overload.workers.is_some());
        self.is_enabled.store(rules.domains().any(limits), Ordering::Relaxed);
        self.gates.rcu(|gates| {
            let mut kept = Gates::clone(gates);
            kept.retain(|domain, _| rules.domain(domain).is_some_and(limits));
            kept
        });
    }

    /// Returns the gate of an upstream, created if it is new or its settings have changed.
    fn gate(&self, domain: &Domain, upstream: &str, clock: &Arc<dyn Clock>) -> Option<Arc<WorkerGate>> {
        let overload = domain.overload()?;
        overload.workers?;
        let gates = self.gates.load();
        let known = gates.get(domain.name()).and_then(|own| own.get(upstream));
        if let Some(known) = known.filter(|known| matches_config(&known.config, overload)) {
            return Some(Arc::clone(known));
        }
        self.create(domain.name(), upstream, overload, clock)
    }

    /// Returns the number of requests that wait for a place in flight to an upstream, and its limit; `None` if it has none.
    pub(crate) fn occupancy(&self, domain: &str, upstream: &str) -> Option<(u32, u32)> {
        let gates = self.gates.load();
        let known = gates.get(domain)?.get(upstream)?;
        Some((known.gate.waiting(), known.gate.limit()))
    }

    #[cold]
    fn create(
        &self,
        domain: &str,
        upstream: &str,
        overload: &Overload,
        clock: &Arc<dyn Clock>,
    ) -> Option<Arc<WorkerGate>> {
        let config = GateConfig { key: self.hasher.hash_one((domain, upstream)), ..config(overload)? };
        let gates = self.gates.load();
        let known = gates.get(domain).and_then(|own| own.get(upstream));
        if known.is_none() && is_full(&gates) {
            return None;
        }
        // What has been learned about the upstream holds under other settings too.
        let gate = known.map_or_else(|| Gate::new(&config), |known| known.gate.with_config(&config));
        let new = Arc::new(WorkerGate { gate, config, clock: Arc::clone(clock) });
        self.gates.rcu(|gates| {
            let mut next = Gates::clone(gates);
            let own = next.entry(domain.into()).or_default();
            // Another thread may have been faster; requests must share one gate.
            let is_wanted = match own.get(upstream) {
                Some(known) => !matches_config(&known.config, overload),
                None => !is_full(gates),
            };
            if is_wanted {
                own.insert(upstream.into(), Arc::clone(&new));
            }
            next
        });
        self.gates.load().get(domain).and_then(|own| own.get(upstream)).cloned()
    }
}

fn is_full(gates: &Gates) -> bool {
    gates.values().map(HashMap::len).sum::<usize>() >= MAX_GATES
}

/// Returns whether a gate was made by these settings.
fn matches_config(known: &GateConfig, overload: &Overload) -> bool {
    let Some(workers) = &overload.workers else { return false };
    let tiers = overload.fairness.as_ref().map_or(&[][..], |fairness| &fairness.tiers);
    known.limit == limit_kind(workers)
        && known.target.total_cmp(&workers.target).is_eq()
        && known.shadow == overload.shadow
        && known.is_fair == overload.fairness.is_some()
        && known.tiers.len() == tiers.len()
        && known.tiers.iter().zip(tiers).all(|(known, tier)| *known == tier_share(tier))
}

const fn limit_kind(workers: &tollgate_rules::Workers) -> LimitKind {
    match workers.limit {
        Some(limit) => LimitKind::Fixed(limit),
        None => LimitKind::Adaptive(LimitConfig { floor: workers.floor, ceiling: CEILING }),
    }
}

pub(crate) fn tier_share(tier: &TierFairness) -> TierShare {
    TierShare {
        guarantee: tier.guarantee as f64 / 1000.0,
        scope: if tier.is_each { GuaranteeScope::Each } else { GuaranteeScope::Together },
        weight: tier.weight as f64 / 1000.0,
    }
}

fn config(overload: &Overload) -> Option<GateConfig> {
    let workers = overload.workers.as_ref()?;
    Some(GateConfig {
        limit: limit_kind(workers),
        target: workers.target,
        tiers: overload
            .fairness
            .as_ref()
            .map_or_else(Vec::new, |fairness| fairness.tiers.iter().map(tier_share).collect()),
        is_fair: overload.fairness.is_some(),
        shadow: overload.shadow,
        key: 0,
    })
}

/// A request's place among those in flight to an upstream, where the rules limit or measure them. Dropping it gives the place
/// to the next request.
pub struct WorkerPermit {
    place: Option<Place>,
    /// The gate to which the place was given back for a while.
    paused: Option<Arc<WorkerGate>>,
    metered: Option<MeteredRequest>,
    ended: Ended,
    would_be_shed: Option<Box<str>>,
}

/// A place under the limit of a gate.
struct Place {
    gate: Arc<WorkerGate>,
    ticket: Ticket,
}

impl fmt::Debug for WorkerPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerPermit").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl WorkerPermit {
    fn new(gate: &Arc<WorkerGate>, ticket: Ticket) -> Self {
        let mut permit = Self::unlimited();
        permit.place = Some(Place { gate: Arc::clone(gate), ticket });
        permit
    }

    /// Creates one where requests in flight are not limited.
    const fn unlimited() -> Self {
        Self { place: None, paused: None, metered: None, ended: Ended::Abandoned, would_be_shed: None }
    }

    /// Returns why the request would have been shed but for shadow mode, for [`Check::with_reason`].
    #[must_use]
    pub fn would_be_shed(&self) -> Option<&str> {
        self.would_be_shed.as_deref()
    }

    /// Sets how the request ended; without it, the request was abandoned. Call it with [`Ended::Completed`] when the head
    /// of the response arrives: the time until then is the upstream's latency; with [`Ended::Failed`] if it reports a
    /// failure.
    pub fn ended(&mut self, ended: Ended) {
        if let Some(Place { gate, ticket }) =
            self.place.as_ref().filter(|_| ended == Ended::Completed && self.ended != ended)
        {
            gate.gate.measure(ticket, gate.clock.now());
        }
        if let Some(metered) = &mut self.metered {
            metered.ended(ended);
        }
        self.ended = ended;
    }
}

impl Drop for WorkerPermit {
    fn drop(&mut self) {
        let Some(Place { gate, ticket }) = self.place.take() else { return };
        let admitted = gate.gate.leave(ticket, gate.clock.now(), self.ended);
        hand_over(&gate, admitted);
    }
}

/// Gives free places to waiting requests. A request that has left meanwhile passes its place on, in a loop and not by
/// dropping the permit, because thousands may have left at once.
fn hand_over(gate: &Arc<WorkerGate>, admitted: tollgate_overload::Admitted<oneshot::Sender<WorkerPermit>>) {
    let mut admitted: Vec<_> = admitted.into_iter().collect();
    while let Some((waiter, ticket)) = admitted.pop() {
        let permit = WorkerPermit::new(gate, ticket);
        if let Err(mut returned) = waiter.send(permit)
            && let Some(Place { ticket, .. }) = returned.place.take()
        {
            admitted.extend(gate.gate.leave(ticket, gate.clock.now(), Ended::Abandoned));
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Takes a place among the requests in flight to an upstream, before the request is decided ([`Limiter::admit`]) and
    /// forwarded. `None` if its domain neither limits nor measures them. May wait a fraction of the upstream's latency.
    ///
    /// # Errors
    /// The decision about a request that is shed.
    pub async fn enter_upstream(
        &self,
        check: &Check<'_>,
        upstream: &str,
    ) -> Result<Option<WorkerPermit>, Decision> {
        if !self.tracks_upstreams() {
            return Ok(None);
        }
        let meter = self.meter_arrival(check, upstream);
        let mut permit = self.pass_gate(check, upstream).await?;
        if let Some(meter) = meter {
            permit.get_or_insert_with(WorkerPermit::unlimited).metered = Some(MeteredRequest::begin(meter));
        }
        Ok(permit)
    }

    /// Takes a place, as [`Limiter::enter_upstream`], for a request whose delay is over. The decision about its limits was
    /// reported before the delay: that it would be shed now, but for shadow mode, is reported as a decision of its own, as
    /// it is if it is shed.
    ///
    /// # Errors
    /// The decision about a request that is shed.
    pub async fn enter_upstream_after_delay(
        &self,
        check: &Check<'_>,
        upstream: &str,
    ) -> Result<Option<WorkerPermit>, Decision> {
        let place = self.enter_upstream(check, upstream).await?;
        if let Some(reason) = place.as_ref().and_then(WorkerPermit::would_be_shed) {
            let mut decision = self.begin(DecisionId::generate());
            let details = &mut decision.body.details;
            details.origin = Origin::Overload;
            details.verdict = DecisionVerdict::Allowed { delay: TimeDelta::ZERO };
            details.reason = Some(reason.into());
            self.notify_observers(&check.with_reason(Some(reason)), &decision);
        }
        Ok(place)
    }

    /// Returns whether the rules of any domain limit or measure requests in flight to upstreams.
    #[must_use]
    pub fn tracks_upstreams(&self) -> bool {
        self.workers.is_enabled.load(Ordering::Relaxed) || self.meters.is_enabled()
    }

    async fn pass_gate(&self, check: &Check<'_>, upstream: &str) -> Result<Option<WorkerPermit>, Decision> {
        let now = self.clock.now();
        let (gate, arrival) = {
            let rules = self.rules.load();
            let Some(domain) = rules.domain(check.domain) else { return Ok(None) };
            let Some(overload) = domain.overload() else { return Ok(None) };
            let Some(gate) = self.workers.gate(domain, upstream, &self.clock) else { return Ok(None) };
            (gate, self.arrival(check, domain, overload, &rules))
        };
        gate.gate.set_shadow(self.denies_nothing());
        // Measures for single callers and rules; a request that is blocked is not to be shed instead.
        let measures = self.effect_of(check);
        let is_exempt = measures.is_some_and(|effect| effect.disabling(Some(WORKERS_RULE)).is_some());
        let mode = if is_exempt { GateMode::Shadow } else { GateMode::Live };
        let shed = match gate.gate.enter(now, &arrival, mode) {
            Entry::Admitted(ticket) => return Ok(Some(WorkerPermit::new(&gate, ticket))),
            Entry::Shadowed(ticket, shed) => {
                let reason = Some(format!("would be {shed} (not enforced)").into());
                let mut permit = WorkerPermit::new(&gate, ticket);
                permit.would_be_shed = reason;
                return Ok(Some(permit));
            }
            Entry::Shed(shed) => shed,
            Entry::Full(waiting) => {
                let (waiter, mut place) = oneshot::channel();
                match gate.gate.wait(now, waiting, waiter) {
                    Waited::Shed(shed) => shed,
                    Waited::Until(until, replaced) => {
                        // A replaced worker learns it from its channel.
                        drop(replaced);
                        hand_over(&gate, gate.gate.admit_waiting(now));
                        let given = tokio::time::timeout(until.since(now).into(), &mut place).await;
                        let given = match given {
                            Ok(given) => given.ok(),
                            Err(_) => {
                                place.close();
                                place.try_recv().ok()
                            }
                        };
                        gate.gate.count_waited(arrival.priority, given.is_some());
                        match given {
                            Some(permit) => return Ok(Some(permit)),
                            None => waiting.shed,
                        }
                    }
                }
            }
        };
        Err(self.shed(check, &shed))
    }

    /// Describes a request to the gate.
    fn arrival(&self, check: &Check<'_>, domain: &Domain, overload: &Overload, rules: &Ruleset) -> Arrival {
        let hash = |value: Option<&str>| self.workers.hasher.hash_one(value);
        let caller = check.caller().map(|(_, value)| value);
        let (mut tenant, mut tier) = (0, NO_TIER);
        if let Some(fairness) = &overload.fairness {
            // Requests that name no tenant are one tenant together: callers choose their own values, but not this. The
            // hash of a tenant is another one than that of a caller with the same value.
            let named = check.value(&fairness.by);
            tenant = self.workers.hasher.hash_one(("tenant", named));
            let quota = self.quota_for(check, rules);
            let known =
                quota.quotas.iter().find_map(|quota| quota.tier()).or_else(|| check.value(domain.tier_key()));
            let has_share =
                |at: &usize| named.is_some() || fairness.tiers.get(*at).is_some_and(|tier| !tier.is_each);
            let at = overload.tier_index(known).filter(has_share);
            tier = at.and_then(|at| u16::try_from(at).ok()).unwrap_or(NO_TIER);
        }
        let priority = overload.priority_of(|key| check.value(key));
        Arrival { priority, caller: hash(caller), tenant, tier }
    }

    /// Makes the decision about a request that is shed.
    #[cold]
    fn shed(&self, check: &Check<'_>, shed: &Shed) -> Decision {
        let mut decision = self.begin(DecisionId::generate());
        // The rules may have changed since the request arrived, and limit no workers any more.
        let overload = decision.rules().domain(check.domain).and_then(|domain| domain.overload());
        let rule = overload.and_then(|overload| overload.workers.as_ref()).map(|workers| workers.rule);
        let details = &mut decision.body.details;
        details.origin = Origin::Overload;
        details.verdict = DecisionVerdict::Denied { retry_after: Some(shed.retry_after) };
        details.denied_by = rule.map(DecidedBy::Rule);
        details.reason = Some(shed.to_string().into());
        details.descriptors.push(DescriptorStatus { matched: MatchKind::Limited, rule });
        self.notify_observers(check, &decision);
        decision
    }
}

impl<S> Limiter<S> {
    /// Returns the state of all gates, for metrics and reports.
    #[must_use]
    pub fn upstream_states(&self) -> Vec<UpstreamState> {
        let (rules, now) = (self.rules.load(), self.clock.now());
        let gates = self.workers.gates.load();
        let mut states: Vec<UpstreamState> = Vec::new();
        for (domain, own) in gates.iter() {
            let overload = rules.domain(domain).and_then(|domain| domain.overload());
            let fairness = overload.and_then(|overload| overload.fairness.as_ref());
            let shares = fairness.map_or_else(Vec::new, |fairness| fairness.tiers.clone());
            states.extend(own.iter().map(|(upstream, gate)| UpstreamState {
                domain: domain.to_string(),
                upstream: upstream.to_string(),
                shares: shares.clone(),
                gate: gate.gate.state(now),
            }));
        }
        states.sort_by(|a, b| (&a.domain, &a.upstream).cmp(&(&b.domain, &b.upstream)));
        states
    }
}
