//! Taking a place in flight to an upstream.

use super::known::{self, GateOfRules, RulesId};
use super::permit::{Body, WorkerPermit, hand_over};
use super::{UpstreamState, WorkerGate};
use crate::check::{Check, CheckInput};
use crate::decision::{DecidedBy, Decision, DecisionVerdict, DescriptorStatus, Origin};
use crate::decision_id::DrawnId;
use crate::limiter::Limiter;
use crate::upstream_meters::{Meter, MeteredRequest};
use std::future::Future;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::oneshot;
use tollgate_core::{CounterStore, Priority, TimeDelta, Timestamp};
use tollgate_overload::{Arrival, Entry, GateMode, NO_TIER, Shed, TierIndex, Waited, Waiting};
use tollgate_rules::{MatchKind, WORKERS_RULE};

/// Result of passing a gate.
enum Passed {
    /// The request goes on, with a place if its domain limits them.
    With(Option<WorkerPermit>),
    Shed(Box<Shed>),
    /// No place is free: it may wait.
    Full(Box<Full>),
}

/// A request that found no free place.
struct Full {
    body: Box<Body>,
    waiting: Waiting,
    priority: Priority,
}

/// Begins to measure a request that goes on, if there is a meter.
#[inline]
fn with_meter(
    mut permit: Option<WorkerPermit>,
    meter: Option<Arc<Meter>>,
    began: Timestamp,
) -> Option<WorkerPermit> {
    if let Some(meter) = meter {
        permit.get_or_insert_with(WorkerPermit::unlimited).measure(MeteredRequest::begin(meter, began));
    }
    permit
}

impl<S: CounterStore> Limiter<S> {
    /// Takes a place among the requests in flight to an upstream, before the request is decided ([`Limiter::admit`]) and
    /// forwarded. `None` if its domain neither limits nor measures them. May wait a fraction of the upstream's latency. `now` is
    /// the time by the limiter's clock, which the caller has read for this request: the latency is counted from there.
    ///
    /// # Errors
    /// The decision about a request that is shed.
    #[allow(
        clippy::manual_async_fn,
        reason = "an async function copies its arguments before it begins; a block uses them where they are"
    )]
    #[inline]
    pub fn enter_upstream(
        &self,
        check: &Check<'_>,
        upstream: &str,
        now: Timestamp,
    ) -> impl Future<Output = Result<Option<WorkerPermit>, Decision>> {
        async move {
            if !self.tracks_upstreams() {
                return Ok(None);
            }
            let meter = self.meter_arrival(check, upstream, now);
            // What is matched here does not live until a place is free: it would be kept in the future, not in registers.
            let full = match self.pass_gate(check, upstream, now) {
                Passed::With(permit) => return Ok(with_meter(permit, meter, now)),
                Passed::Shed(shed) => return Err(self.shed(check, &shed)),
                Passed::Full(full) => full,
            };
            let place = Box::pin(self.wait_for_place(check, *full)).await?;
            Ok(with_meter(Some(place), meter, self.clock.now()))
        }
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
        let place = self.enter_upstream(check, upstream, self.clock.now()).await?;
        if let Some(reason) = place.as_ref().and_then(WorkerPermit::would_be_shed) {
            let mut decision = self.begin(DrawnId::draw());
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
    #[inline]
    pub fn tracks_upstreams(&self) -> bool {
        self.workers.is_enabled.load(Ordering::Relaxed) || self.meters.is_enabled()
    }

    #[inline]
    fn pass_gate(&self, check: &Check<'_>, upstream: &str, now: Timestamp) -> Passed {
        // Read before the rules: they may then be newer than it says, never older.
        let generation = self.generation.current();
        let rules = RulesId { generation, limiter: std::ptr::from_ref(&self.workers).addr() };
        let find = || self.find_gate(check.domain, upstream);
        let found = known::body(rules, check.domain, upstream, find, |overload| match check.input {
            CheckInput::Attributes(attributes) => overload.priority(attributes),
            CheckInput::Descriptors(_) => overload.priority_of(|key| check.value(key)),
        });
        let Some((body, priority)) = found else { return Passed::With(None) };
        let Some(WorkerGate { gate, .. }) = body.gate.as_deref() else { return Passed::With(None) };
        gate.set_shadow(self.denies_nothing());
        // Measures for single callers and rules; a request that is blocked is not to be shed instead.
        let measures = self.effect_of(check);
        let is_exempt = measures.is_some_and(|effect| effect.disabling(Some(WORKERS_RULE)).is_some());
        if !is_exempt && let Some(ticket) = gate.try_enter(now, priority, || self.caller(check)) {
            return Passed::With(Some(WorkerPermit::new(body, ticket)));
        }
        let mode = if is_exempt { GateMode::Shadow } else { GateMode::Live };
        self.pass_pressed_gate(check, body, now, priority, mode)
    }

    /// Passes a gate at which requests are shed or wait, or one that only counts this request.
    #[inline(never)]
    fn pass_pressed_gate(
        &self,
        check: &Check<'_>,
        body: Box<Body>,
        now: Timestamp,
        priority: Priority,
        mode: GateMode,
    ) -> Passed {
        let Some(WorkerGate { gate, .. }) = body.gate.as_deref() else { return Passed::With(None) };
        let (tenant, tier) = self.tenant(check);
        let arrival = Arrival { priority, caller: self.caller(check), tenant, tier };
        match gate.enter_pressed(now, &arrival, mode) {
            Entry::Admitted(ticket) => Passed::With(Some(WorkerPermit::new(body, ticket))),
            Entry::Shadowed(ticket, shed) => {
                let reason = format!("would be {shed} (not enforced)");
                Passed::With(Some(WorkerPermit::shadowed(body, ticket, reason)))
            }
            Entry::Shed(shed) => {
                known::give_back(body);
                Passed::Shed(Box::new(shed))
            }
            Entry::Full(waiting) => Passed::Full(Box::new(Full { body, waiting, priority })),
        }
    }

    /// Returns the hash of a request's caller, for the order in which the gate sheds.
    #[inline]
    fn caller(&self, check: &Check<'_>) -> u64 {
        self.workers.hasher.hash_one(check.caller().map(|(_, value)| value))
    }

    /// Looks up the gate of an upstream.
    #[cold]
    fn find_gate(&self, domain: &str, upstream: &str) -> Option<GateOfRules> {
        let rules = self.rules.load();
        let domain = rules.domain(domain)?;
        let gate = self.workers.gate(domain, upstream, &self.clock)?;
        Some(GateOfRules { gate, overload: Arc::clone(domain.overload()?) })
    }

    /// Waits for a place in flight.
    async fn wait_for_place(&self, check: &Check<'_>, full: Full) -> Result<WorkerPermit, Decision> {
        let Full { body, waiting, priority } = full;
        let Some(gate) = &body.gate else { return Ok(WorkerPermit::unlimited()) };
        let now = self.clock.now();
        let (waiter, mut place) = oneshot::channel();
        let until = match gate.gate.wait(now, waiting, waiter) {
            Waited::Shed(shed) => return Err(self.shed(check, &shed)),
            // A replaced worker learns it from its channel.
            Waited::Until(until, _replaced) => until,
        };
        hand_over(gate, gate.gate.admit_waiting(now));
        let given = match tokio::time::timeout(until.since(now).into(), &mut place).await {
            Ok(given) => given.ok(),
            Err(_) => {
                place.close();
                place.try_recv().ok()
            }
        };
        gate.gate.count_waited(priority, given.is_some());
        known::give_back(body);
        given.ok_or_else(|| self.shed(check, &waiting.shed))
    }

    /// Returns the hash of a request's tenant, and the tenant's tier, for the gate's shares.
    #[cold]
    fn tenant(&self, check: &Check<'_>) -> (u64, TierIndex) {
        const NONE: (u64, TierIndex) = (0, NO_TIER);
        let rules = self.rules.load();
        let Some(domain) = rules.domain(check.domain) else { return NONE };
        let Some(overload) = domain.overload() else { return NONE };
        let Some(fairness) = &overload.fairness else { return NONE };
        // Requests that name no tenant are one tenant together: callers choose their own values, but not this. The
        // hash of a tenant is another one than that of a caller with the same value.
        let named = check.value(&fairness.by);
        let tenant = self.workers.hasher.hash_one(("tenant", named));
        let quota = self.quota_for(check, &rules);
        let known =
            quota.quotas.iter().find_map(|quota| quota.tier()).or_else(|| check.value(domain.tier_key()));
        let has_share =
            |at: &usize| named.is_some() || fairness.tiers.get(*at).is_some_and(|tier| !tier.is_each);
        let at = overload.tier_index(known).filter(has_share);
        (tenant, at.and_then(|at| u16::try_from(at).ok()).unwrap_or(NO_TIER))
    }

    /// Makes the decision about a request that is shed.
    #[cold]
    fn shed(&self, check: &Check<'_>, shed: &Shed) -> Decision {
        let mut decision = self.begin(DrawnId::draw());
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
            if overload.is_none_or(|overload| overload.workers.is_none()) {
                continue;
            }
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
