//! Fail policy: decides requests while the store is unavailable, using each matched rule's `on_error`. Never returns an
//! error.
//!
//! The policy applies only to charges that the store could not decide; if one shard is unavailable, limits on the other
//! shards are still enforced. Among the undecided charges, one rule with `on_error: closed` denies the request; rules
//! with `on_error: local` are decided by counters of this process, with this node's share of what the store last said was
//! left (`fallback_start.rs`); the others let it pass. If the request is then denied, what was charged elsewhere is
//! refunded.
//!
//! A store that was only late may charge the request after all. If it was denied here, the store undoes that; if it was
//! admitted, the late charge counts instead of the local one (`reconcile.rs`).

use crate::decision::{DecisionDetails, DecisionVerdict, Origin};
use crate::fallback::TryCharge;
use crate::fallback_start::remaining_share;
use crate::fold::{decided_by, decides, fold, push_unknown};
use crate::limiter::Limiter;
use crate::refill::Refill;
use smallvec::SmallVec;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterStore, Enforcement, LateCharge, Limit, Outcome, Outcomes,
    Permit, PermitId, StoreError, TimeDelta, Timestamp,
};
use tollgate_rules::{Charges, FailPolicy, FleetStanding, LimitOrigin, MatchedLimit, Plan};

/// Retry delay for a caller denied because the store failed.
const RETRY_AFTER: TimeDelta = TimeDelta::from_secs(1);
/// Attempts to charge what is left of a request whose other parts cannot be charged. Each may wait for the store.
const MAX_ATTEMPTS: usize = 3;

/// A request whose charges the store could not all decide.
struct UndecidedRequest {
    /// Known outcome of each charge.
    per_charge: SmallVec<[Outcome; 4]>,
    /// True for each charge that the store could not decide.
    failed: SmallVec<[bool; 8]>,
    /// Charges that the store may apply after all. Dropped, they are undone.
    late: Vec<LateCharge>,
    /// Charges that local counters admitted and the store must be charged with.
    taken_locally: SmallVec<[usize; 4]>,
    /// This node's shares, by which local counters decided.
    shares: SmallVec<[(usize, Limit); 4]>,
    /// Whether a late charge would hold a permit that the request does not release.
    leaks: bool,
}

/// What the store has decided of a request.
struct Reached {
    outcomes: Outcomes,
    /// True for each charge that it could not decide.
    failed: SmallVec<[bool; 8]>,
    late: Vec<LateCharge>,
    leaks: bool,
}

impl<S: CounterStore> Limiter<S> {
    /// Decides the request without the store, or with the part of it that is available. `known` has the outcomes of a first attempt
    /// that charged nothing but independent charges.
    #[cold]
    pub(crate) async fn apply_fail_policy(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        error: StoreError,
        known: Option<Outcomes>,
        details: &mut DecisionDetails,
    ) {
        if plan.is_fleet_shadow() {
            plan.charge_fleet_as(FleetStanding::Fair);
        }
        let mut reached = self.charge_reachable(plan, permit, error, known).await;
        let is_denied = reached.outcomes.admission == Admission::Denied;
        plan.settle_fleet(&mut reached.outcomes);
        reached.failed.truncate(plan.limits.len());
        let mut undecided = UndecidedRequest {
            per_charge: reached.outcomes.per_charge,
            failed: reached.failed,
            late: reached.late,
            taken_locally: SmallVec::new(),
            shares: SmallVec::new(),
            leaks: reached.leaks,
        };
        if is_denied {
            fold(plan, &undecided.outcomes(Admission::Denied), details);
            details.complete_shed(false);
            return;
        }
        // Counted under the rule that denies the request, else under the first rule whose charge the store could not
        // decide.
        let deciding = (0..plan.limits.len()).find(|at| undecided.failed[*at] && decides(&plan.limits[*at]));
        let mut owed_to = deciding.and_then(|at| plan.limits[at].rule);
        let closed = self.failed_with(plan, &undecided, FailPolicy::Closed).next();
        if let Some(matched) = closed.map(|at| plan.limits[at].clone()) {
            owed_to = matched.rule;
            self.refund_taken(plan, permit, &undecided).await;
            push_unknown(plan, details);
            details.verdict = DecisionVerdict::Denied { retry_after: Some(RETRY_AFTER) };
            details.origin = Origin::FailClosed;
            details.denied_by = Some(decided_by(&matched));
        } else if self.decide_locally(plan, permit, &mut undecided) == Admission::Denied {
            self.refund_taken(plan, permit, &undecided).await;
            undecided.fold(plan, Admission::Denied, details);
            details.origin = Origin::Local;
        } else {
            undecided.fold(plan, Admission::Admitted, details);
            let open = (0..plan.limits.len()).any(|at| undecided.failed[at] && decides(&plan.limits[at]));
            let local = deciding.is_some_and(|at| !undecided.failed[at]);
            details.origin = if local && !open { Origin::Local } else { Origin::FailOpen };
            self.settle_admitted(plan, permit, &undecided);
        }
        // If only charges of shadow rules are undecided, the request would have passed anyway.
        if deciding.is_some() {
            self.fallback_counts.record(owed_to.map_or("", |rule| &rule.name), details.origin);
        }
        details.complete_shed(deciding.is_some());
    }

    /// Charges what the store can still decide. A guarantee holds as long as its counter and the capacity's can be charged; without
    /// them the capacity is as the rules have it.
    async fn charge_reachable(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        error: StoreError,
        known: Option<Outcomes>,
    ) -> Reached {
        let mut late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
        let mut failed = match error {
            StoreError::Partial { failed, .. } => failed,
            _ => (0..plan.limits.len()).collect(),
        };
        let mut leaks = self.leave_failed_guarantee(plan, &failed);
        let before = known.unwrap_or_default();
        let is_applied = |at: usize, charge: &Charge<'_>| {
            charge.enforcement == Enforcement::Independent && at < before.per_charge.len()
        };
        let mut charges = Charges::new();
        plan.charges(permit, &mut charges);
        let mut undecided: SmallVec<[bool; 8]> =
            (0..).zip(&charges).map(|(at, charge)| !is_applied(at, charge)).collect();
        let mut outcomes = Outcomes { admission: Admission::Admitted, ..before.clone() };
        outcomes.per_charge.resize(charges.len(), Outcome::UNKNOWN);
        (0..charges.len())
            .filter(|at| undecided[*at])
            .for_each(|at| outcomes.per_charge[at] = Outcome::UNKNOWN);
        drop(charges);
        // Each attempt leaves out what the one before found to be away; the parts of a request may fail one after the other.
        for attempt in 1..=MAX_ATTEMPTS {
            let is_open = |at: usize, charge: &Charge<'_>| !failed.contains(&at) && !is_applied(at, charge);
            let has_rest =
                (0..plan.limits.len()).any(|at| is_open(at, &plan.charge(&plan.limits[at], permit)));
            if !has_rest {
                break;
            }
            let mut charged = self.charge_some(plan, permit, &outcomes, is_open).await;
            if let Ok(first) = &mut charged {
                let standing = plan.fleet.map_or(FleetStanding::Fair, |own| own.standing);
                match self.retry_fleet(plan, permit, first, &failed).await {
                    Ok(()) => {}
                    Err(error) if standing.is_claim() => charged = Err(error),
                    // The capacity has denied it. The store undoes what it may charge later: the late charge is dropped here.
                    Err(_) => plan.charge_fleet_as(standing),
                }
            }
            match charged {
                Ok(charged) => {
                    undecided.clear();
                    undecided.extend((0..plan.limits.len()).map(|at| failed.contains(&at)));
                    outcomes = charged;
                    break;
                }
                Err(error) => {
                    late.extend(error.late().into_iter().cloned());
                    match error {
                        StoreError::Partial { failed: more, .. } if attempt < MAX_ATTEMPTS => {
                            failed.extend(more);
                            leaks |= self.leave_failed_guarantee(plan, &failed);
                        }
                        _ => {
                            failed = (0..plan.limits.len()).collect();
                            leaks |= plan.leave_guarantee(FleetStanding::Fair);
                        }
                    }
                    outcomes.per_charge.truncate(plan.limits.len());
                    undecided.truncate(plan.limits.len());
                }
            }
        }
        Reached { outcomes, failed: undecided, late, leaks }
    }

    /// Leaves a guarantee that cannot be charged, and the shares of a capacity that cannot. Returns whether a late charge would hold
    /// a place of the guarantee.
    fn leave_failed_guarantee(&self, plan: &mut Plan<'_>, failed: &[usize]) -> bool {
        let Some(own) = plan.fleet else { return false };
        let guarantee = plan.limits.len() - usize::from(plan.is_claim_charged());
        let is_unreachable = failed.iter().any(|at| *at < guarantee && own.is_fleet(&plan.limits[*at]));
        if !is_unreachable && !failed.contains(&guarantee) {
            return false;
        }
        if let Some(own) = &mut plan.fleet {
            own.set_tried(FleetStanding::Guaranteed);
            own.set_tried(FleetStanding::Reserved);
        }
        plan.leave_guarantee(if is_unreachable { FleetStanding::Fair } else { own.base() })
    }

    /// Charges the rules with `on_error: local` on this process's counters. Tenants share this node's part of the fleet's capacity as they
    /// share all of it: a request that finds it in use is tried by its part of its guarantee, or of what is reserved for its priority.
    fn decide_locally(
        &self,
        plan: &mut Plan<'_>,
        permit: PermitId,
        undecided: &mut UndecidedRequest,
    ) -> Admission {
        let is_failed = |(matched, failed): (&MatchedLimit<'_>, &bool)| {
            *failed && plan.fleet.is_some_and(|own| own.is_fleet(matched))
        };
        let is_shared = plan.limits.iter().zip(&undecided.failed).any(is_failed);
        if !is_shared || plan.is_fleet_shadow() || !plan.shares_fleet() {
            return self.charge_locally(plan, permit, undecided, |_| true);
        }
        plan.share_fleet_anew();
        self.charge_fleet_first(plan, permit);
        let failed = undecided.failed.clone();
        let outcomes = self.try_fleet_standings(plan, permit, |plan, before| {
            let mut charges = Charges::new();
            plan.charges(permit, &mut charges);
            // Independent charges are made by the first attempt.
            let is_open =
                |charge: &Charge<'_>| before.is_none() || charge.enforcement != Enforcement::Independent;
            for at in (0..failed.len()).filter(|at| failed[*at] && is_open(&charges[*at])) {
                (undecided.per_charge[at], undecided.failed[at]) = (Outcome::UNKNOWN, true);
            }
            undecided.per_charge.truncate(failed.len());
            undecided.per_charge.resize(charges.len(), Outcome::UNKNOWN);
            undecided.failed.truncate(failed.len());
            undecided.failed.resize(charges.len(), true);
            drop(charges);
            let admission = self.charge_locally(plan, permit, undecided, is_open);
            Some(undecided.outcomes(admission))
        });
        let Some(Outcomes { admission, per_charge, .. }) = outcomes else { return Admission::Admitted };
        undecided.per_charge = per_charge;
        undecided.failed.truncate(plan.limits.len());
        admission
    }

    /// Charges those of the rules with `on_error: local` that are `wanted` on this process's counters, and records the charges for
    /// reconciliation.
    fn charge_locally(
        &self,
        plan: &Plan<'_>,
        permit: PermitId,
        undecided: &mut UndecidedRequest,
        wanted: impl Fn(&Charge<'_>) -> bool,
    ) -> Admission {
        let Some(fallback) = &self.fallback else { return Admission::Admitted };
        let mut all = Charges::new();
        plan.charges(permit, &mut all);
        let local: SmallVec<[usize; 8]> =
            self.failed_with(plan, undecided, FailPolicy::Local).filter(|at| wanted(&all[*at])).collect();
        let shares: SmallVec<[Option<Limit>; 4]> =
            local.iter().map(|at| self.node_share(&plan.limits[*at], &all[*at])).collect();
        let charges: SmallVec<[Charge<'_>; 8]> = local
            .iter()
            .zip(&shares)
            .map(|(at, share)| {
                let (matched, charge) = (&plan.limits[*at].limit, all[*at]);
                let limit = share.as_ref().or(matched.node_share.as_deref()).unwrap_or(charge.limit);
                if !matched.prepaid {
                    self.start_fallback(fallback.as_ref(), &charge, limit);
                }
                Charge { limit, ..charge }
            })
            .collect();
        let mut outcomes = Outcomes::default();
        if !fallback.try_charge(&charges, &mut outcomes) {
            return Admission::Admitted;
        }
        for ((at, outcome), charge) in local.into_iter().zip(outcomes.per_charge).zip(&charges) {
            undecided.per_charge[at] = outcome;
            undecided.failed[at] = false;
            if plan.limits.get(at).is_some_and(|matched| matched.limit.limit != *charge.limit) {
                undecided.shares.push((at, charge.limit.clone()));
            }
            let taken = outcomes.admission == Admission::Admitted && outcome.verdict.is_allowed();
            // A permit is released where it was acquired: the shared counter never held it.
            let is_permit = all[at].limit.algorithm() == Algorithm::Concurrency;
            if taken && !is_permit && !plan.limits[at].limit.prepaid {
                undecided.taken_locally.push(at);
            }
        }
        outcomes.admission
    }

    /// Sets a fallback counter from what the store last said about the counter, if it has said anything in time since the
    /// fallback counter was last set. One of permits begins with those that this node's requests hold.
    fn start_fallback(&self, fallback: &dyn TryCharge, charge: &Charge<'_>, share: &Limit) {
        if charge.limit.algorithm() == Algorithm::Concurrency {
            return self.renewals.copy_permits(fallback, charge);
        }
        let Some(known) = self.store.last_known(charge) else { return };
        let counter = charge.key.id();
        let in_time_at = known.in_time.map(|age| self.clock.now() - age);
        self.fallback_starts.set_once(counter, in_time_at, || {
            let unconfirmed = self.pending.unconfirmed(&counter, self.clock.now());
            let remaining = remaining_share(charge.limit, share, &known, unconfirmed);
            let set = |cost| fallback.try_debit(&Charge { limit: share, cost, ..*charge });
            // It may have been set for another number of nodes, or under another limit.
            set(Cost::refund(share.refill_cost().max(2 * charge.limit.capacity())));
            set(Cost::new(share.capacity() - remaining));
        });
    }

    /// Charges a local counter with what has already happened, or refunds it.
    pub(crate) fn debit_local(&self, charge: &Charge<'_>) {
        let Some(fallback) = &self.fallback else { return };
        let nodes = self.nodes_of(charge);
        let share = (nodes > 1).then(|| charge.limit.per_node_share(nodes));
        fallback.try_debit(&Charge { limit: share.as_ref().unwrap_or(charge.limit), ..*charge });
    }

    /// Resets a local counter, as if it had been set so by the store's last answer in time.
    pub(crate) fn reset_local(&self, reset: &Charge<'_>) {
        let in_time = self.store.last_known(reset).and_then(|known| known.in_time);
        let in_time_at = in_time.map(|age| self.clock.now() - age);
        self.fallback_starts.set_again(reset.key.id(), in_time_at, || self.debit_local(reset));
    }

    /// Releases permits that were acquired on local counters.
    pub(crate) fn release_local(&self, permits: &[Permit<'_>]) {
        if let Some(fallback) = &self.fallback {
            fallback.try_release(permits);
        }
    }

    /// Accounts for a request that was admitted without the store: what the store charges late counts instead of what
    /// local counters have taken.
    fn settle_admitted(&self, plan: &Plan<'_>, permit: PermitId, undecided: &UndecidedRequest) {
        let now = self.clock.now();
        let mut charges = Charges::new();
        plan.charges(permit, &mut charges);
        // A guarantee was the last of the limits.
        let guarantee = plan.held_guarantee().filter(|_| undecided.taken_locally.contains(&charges.len()));
        let refill = |matched: &MatchedLimit<'_>, charge: &Charge<'_>| {
            let is_shedding = matched.rule.is_some_and(|rule| rule.is_shedding);
            let refill = || Refill::new(charge, self.nodes_of(charge), now);
            if is_shedding { refill() } else { None }
        };
        let guarantee = guarantee.as_ref().map(|(matched, _)| (matched, plan.charge(matched, permit)));
        let within =
            undecided.taken_locally.iter().filter_map(|at| Some((plan.limits.get(*at)?, charges[*at])));
        let taken: SmallVec<[(&MatchedLimit<'_>, Charge<'_>); 4]> = within.chain(guarantee).collect();
        let taken = taken.iter().map(|(matched, charge)| (charge, refill(matched, charge)));
        // A permit that the request does not know it holds would never be released.
        let is_unknown =
            |at: usize| undecided.failed[at] && charges[at].limit.algorithm() == Algorithm::Concurrency;
        let leaks = undecided.leaks || (0..charges.len()).any(is_unknown);
        if undecided.late.is_empty() || leaks {
            taken.for_each(|(charge, refill)| self.pending.add(charge, refill));
        } else {
            self.pending.add_in_doubt(taken, &undecided.late);
        }
    }

    /// Refunds what the store charged for a request that is denied. Units that cannot be refunded are refilled over
    /// time.
    async fn refund_taken(&self, plan: &Plan<'_>, permit: PermitId, undecided: &UndecidedRequest) {
        let mut charges = Charges::new();
        plan.charges(permit, &mut charges);
        let taken = charges.iter().zip(&undecided.per_charge).zip(&undecided.failed).filter(
            |((charge, outcome), failed)| {
                !**failed && outcome.verdict.is_allowed() && charge.enforcement != Enforcement::Independent
            },
        );
        let mut taken: Vec<Charge<'_>> = taken.map(|((charge, _), _)| *charge).collect();
        let guarantee = plan.held_guarantee();
        if let Some((matched, _)) = &guarantee {
            taken.push(plan.charge(matched, permit));
        }
        let (held, spent): (Vec<_>, Vec<_>) =
            taken.into_iter().partition(|charge| charge.limit.is_released(charge.permit));
        if !spent.is_empty() {
            let refunds: Vec<_> =
                spent.into_iter().map(|charge| Charge { cost: charge.cost.negated(), ..charge }).collect();
            if let Err(error) = self.store.debit(&refunds).await {
                error.keep_late();
            }
        }
        if !held.is_empty() {
            let permits: Vec<_> = held
                .iter()
                .map(|charge| Permit { key: charge.key, limit: charge.limit, id: charge.permit })
                .collect();
            let _ = self.store.release(&permits).await;
        }
    }

    /// Returns the charges that the store could not decide and whose rules have this policy.
    fn failed_with(
        &self,
        plan: &Plan<'_>,
        undecided: &UndecidedRequest,
        policy: FailPolicy,
    ) -> impl Iterator<Item = usize> {
        (0..plan.limits.len()).filter(move |at| {
            let matched = &plan.limits[*at];
            undecided.failed[*at] && decides(matched) && self.policy(plan, matched) == policy
        })
    }

    fn policy(&self, plan: &Plan<'_>, matched: &MatchedLimit<'_>) -> FailPolicy {
        let policy = matched.rule.map_or(FailPolicy::Open, |rule| rule.on_error.policy(plan.tier_for(rule)));
        // A part is reserved for outages, but among how many nodes is unknown, or a share is less than one unit.
        let has_no_share = policy == FailPolicy::Local
            && matched.limit.reserve.is_some()
            && matched.limit.node_share.is_none()
            && self.node_share(matched, &plan.charge(matched, PermitId::ANONYMOUS)).is_none();
        if has_no_share { FailPolicy::Closed } else { policy }
    }

    /// Returns this node's share of a limit, by the number of nodes alive; `None` if the rules say it, or if the node
    /// has the whole limit.
    fn node_share(&self, matched: &MatchedLimit<'_>, charge: &Charge<'_>) -> Option<Limit> {
        let (limit, nodes) = (&matched.limit, self.nodes_of(charge));
        let is_known = self.live_nodes() > 0 || charge.key.scope.region_mode().has_owner();
        match (&limit.reserve, &limit.node_share) {
            (_, Some(_)) => None,
            (Some(reserve), None) if nodes > 0 && is_known => reserve.fraction(1, u64::from(nodes)),
            (Some(_), None) => None,
            (None, None) => (nodes > 1).then(|| charge.limit.per_node_share(nodes)),
        }
    }
}

impl UndecidedRequest {
    /// Folds the outcomes. Those of local counters are of this node's shares, which the decision reports as its limits:
    /// what is used and what remains is of them. The plan stays as it is: what is charged or settled later is of the whole.
    fn fold(&self, plan: &mut Plan<'_>, admission: Admission, details: &mut DecisionDetails) {
        let shown = |(at, share): &(usize, Limit)| {
            let matched = plan.limits.get_mut(*at).filter(|matched| matched.limit.shards.is_none())?;
            let share = LimitOrigin::Inline(Box::new(matched.limit.with_share(share)));
            Some((*at, std::mem::replace(&mut matched.limit, share)))
        };
        let wholes: SmallVec<[_; 4]> = self.shares.iter().filter_map(shown).collect();
        fold(plan, &self.outcomes(admission), details);
        for (at, whole) in wholes.into_iter().rev() {
            plan.limits[at].limit = whole;
        }
    }

    fn outcomes(&self, admission: Admission) -> Outcomes {
        Outcomes { admission, at: Timestamp::ZERO, per_charge: self.per_charge.clone() }
    }
}
