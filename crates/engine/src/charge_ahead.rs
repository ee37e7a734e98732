//! Units charged ahead: a decision that a protocol server makes now for requests that another process admits later.
//!
//! It is an ordinary check, planned, charged and folded on the one decision path, so shadow mode, emergency measures,
//! quotas and tiers apply to it. Beside the decision it returns which counters were charged and until when the units of
//! each may be spent ([`tollgate_core::Escrow`]), which only the plan determines: a key's windows have their own phase.
//!
//! Each limit has its own cost: what was charged to one of them for earlier requests and not used may be gone (its window
//! ended, its slots have begun) while that of another is still there.
//!
//! Units of windows that can no longer be spent are returned ([`Limiter::return_ahead`]); those of buckets come back with
//! time. A denied decision may have charged windows: those that count denied requests, and with the profile `envoy` those that have
//! units left. Nobody sent that many requests, so the units are returned at once, to where they were charged: the store, this
//! node's counters of a local limit, or those that decide while the store is unavailable.
//!
//! Rejected: a second way to the counters for units that are charged ahead, because every measure, quota and fail policy
//! would have to be repeated there.

use crate::charge_record::ChargeRecord;
use crate::check::Check;
use crate::decision::{Decision, DecisionDetails, Origin};
use crate::decision_id::DecisionId;
use crate::fold::decides;
use crate::limiter::Limiter;
use smallvec::SmallVec;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, Escrow, Limit, Mode, PermitId, TimeDelta,
    Timestamp, UnitReturn, Verdict,
};
use tollgate_rules::{CostFrom, FailPolicy, MatchedLimit, Plan};

/// Most by which the clocks of a node and of its store may differ, for units that may have come from a lease.
const CLOCK_OFFSET: TimeDelta = TimeDelta::from_secs(1);

/// Most units of a denied decision that are returned: of more, a window that counts denied requests may have counted only a part.
const MAX_RETURNED: u64 = 1 << 29;

/// One counter of a decision that was made ahead.
#[derive(Clone, Copy, Debug)]
pub struct CounterAhead {
    /// Name of the counter: the stable hash of its key, without the shard of a split one.
    pub counter: u64,
    /// Units of this limit that the decision charged, or would have charged.
    pub cost: u64,
    /// Units available after the decision.
    pub remaining: u64,
    /// Units that an unused limit admits at once.
    pub capacity: u64,
    /// Units per period.
    pub count: u64,
    /// Length of the period.
    pub period: TimeDelta,
    /// Validity of the charged units; `None` if they were not charged, or if the limit's units have no such bound.
    pub escrow: Option<Escrow>,
    /// The kind of bound that `escrow` states.
    pub kind: AheadKind,
    /// Length of the window in which the units may be spent; `None` if the limit has none.
    pub window: Option<TimeDelta>,
    /// Whether all units come back when that window ends.
    pub resets: bool,
}

/// How the units of a limit can be spent later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AheadKind {
    /// Each unit until its slot of time begins: see the lease proof.
    Slots,
    /// All units until their window ends.
    Window,
    /// Units are counted at the time of the charge: a log, or a bucket that refills in steps.
    Counted,
    /// Permits are held by requests in flight, and cannot be charged ahead.
    Permits,
}

impl AheadKind {
    fn of(limit: &Limit) -> Self {
        match limit.algorithm() {
            Algorithm::Concurrency => Self::Permits,
            _ if !limit.is_leasable() && !limit.counts_denied() => Self::Counted,
            Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::StrictWindow => Self::Window,
            _ => Self::Slots,
        }
    }
}

/// A decision for later requests, with the enforced counters that it charged.
#[derive(Clone, Debug)]
pub struct ChargeAhead {
    /// The decision.
    pub decision: Decision,
    /// One entry for each enforced limit that the request matched.
    pub counters: SmallVec<[CounterAhead; 2]>,
}

/// Where a denied decision has charged units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Charged {
    /// At the store, or if the limit is local, at this node's counters.
    Store,
    /// At the counters of this process that decide while the store is unavailable.
    Fallback,
}

/// Units that a denied decision has charged.
type InVain = SmallVec<[(ChargeRecord, u64, Charged); 1]>;

/// Returns the name of a matched limit's counter: its stable hash, the same for all shards of it.
fn name(plan: &Plan<'_>, matched: &MatchedLimit<'_>) -> u64 {
    let key = plan.charge(matched, PermitId::ANONYMOUS).key;
    if matched.limit.shards.is_none() {
        return key.stable_hash();
    }
    let parts: SmallVec<[_; 8]> = (0..)
        .zip(key.parts)
        .filter(|(at, _)| *at != usize::from(matched.shard_at))
        .map(|(_, part)| *part)
        .collect();
    CounterKey { scope: key.scope, parts: &parts }.stable_hash()
}

/// Sets the costs of limits that are charged the cost of the check.
fn set_costs(plan: &mut Plan<'_>, costs: &[(u64, u64)]) {
    for at in 0..plan.limits.len() {
        let matched = &plan.limits[at];
        let takes_cost =
            matched.rule.is_some_and(|rule| matches!(matched.limit.cost_from(rule), CostFrom::Request))
                && matched.limit.limit.algorithm() != Algorithm::Concurrency;
        let name = name(plan, matched);
        let own = costs.iter().find(|(counter, _)| *counter == name);
        if let Some((_, units)) = own.filter(|_| takes_cost) {
            plan.limits[at].cost = Cost::new(*units);
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Decides `check` as [`Limiter::check`] does, for requests that are admitted later. `costs` has the units of limits by
    /// their counters ([`CounterAhead::counter`]); others take the cost of the check.
    pub async fn charge_ahead(&self, check: &Check<'_>, costs: &[(u64, u64)]) -> ChargeAhead {
        let asked = self.clock.now();
        let (mut ahead, in_vain) = self.decide_ahead(check, costs).await;
        if in_vain.is_empty() {
            return ahead;
        }
        let taken_at = ahead.decision.body.details.at;
        for (record, units, charged) in &in_vain {
            match charged {
                Charged::Store => self.return_to(record, *units, taken_at).await,
                Charged::Fallback => {
                    let parts = record.parts();
                    let charge = record.charge(&parts, Cost::PEEK);
                    if let Some(units) = self.refundable_here(&charge, *units, asked) {
                        self.debit_local(&Charge { cost: Cost::refund(units), ..charge });
                    }
                }
            }
        }
        self.full_counters.clear();
        // What is left, without what was charged.
        let (look, _) = self.decide_ahead(&check.with_cost(Cost::PEEK), &[]).await;
        for own in &mut ahead.counters {
            if let Some(seen) = look.counters.iter().find(|seen| seen.counter == own.counter) {
                own.remaining = seen.remaining;
            }
        }
        ahead
    }

    /// Decides `check`. Returns also what a denied decision has charged.
    async fn decide_ahead(&self, check: &Check<'_>, costs: &[(u64, u64)]) -> (ChargeAhead, InVain) {
        let (mut counters, mut in_vain) = (SmallVec::new(), InVain::new());
        let decision = self
            .decide_changed(
                check,
                |_| PermitId::ANONYMOUS,
                |plan| set_costs(plan, costs),
                |plan, details| {
                    for (matched, status) in plan.limits.iter().zip(&details.limits) {
                        if !decides(matched) {
                            continue;
                        }
                        let charge = plan.charge(matched, PermitId::ANONYMOUS);
                        let (limit, outcome) = (charge.limit, &status.outcome);
                        let cost = matched.cost.units();
                        let is_charged =
                            details.is_allowed() && matches!(outcome.verdict, Verdict::Allowed { .. });
                        let at = details.at + limit.phase(charge.key.stable_hash());
                        let kind = AheadKind::of(limit);
                        let counts_in_vain = !details.is_allowed()
                            && match outcome.verdict {
                                Verdict::Allowed { .. } => charge.enforcement == Enforcement::Independent,
                                _ => limit.counts_denied() && outcome.verdict.is_denied(),
                            };
                        if counts_in_vain
                            && kind == AheadKind::Window
                            && (1..=MAX_RETURNED).contains(&cost)
                            && let Some(charged) = charged_at(plan, matched, details.origin)
                        {
                            in_vain.push((ChargeRecord::from_charge(&charge), cost, charged));
                        }
                        counters.push(CounterAhead {
                            counter: name(plan, matched),
                            cost,
                            remaining: outcome.remaining,
                            capacity: limit.capacity(),
                            count: limit.rate().count,
                            period: limit.rate().period.length(),
                            escrow: if is_charged { limit.escrow(cost, at, outcome) } else { None },
                            kind,
                            window: limit.escrow_window(at),
                            resets: limit.algorithm() == Algorithm::FixedWindow,
                        });
                    }
                },
            )
            .await;
        (ChargeAhead { decision, counters }, in_vain)
    }

    /// Returns `units` that `check` charged ahead when the store's clock said `taken_at`, and that can no longer be spent, to
    /// those of `counters` (see [`CounterAhead::counter`]) that are windows. Nothing happens once their window has ended, or if
    /// the rules no longer charge them. Which shard of a split counter was charged is not known: those are not returned.
    pub async fn return_ahead(&self, check: &Check<'_>, counters: &[u64], units: u64, taken_at: Timestamp) {
        let mut records: SmallVec<[ChargeRecord; 1]> = SmallVec::new();
        let check = check.with_cost(Cost::PEEK);
        let keep = |plan: &Plan<'_>, _: &DecisionDetails| {
            for matched in plan.limits.iter().filter(|matched| decides(matched)) {
                let charge = plan.charge(matched, PermitId::ANONYMOUS);
                let is_charged =
                    matched.limit.shards.is_none() && counters.contains(&charge.key.stable_hash());
                if is_charged && AheadKind::of(charge.limit) == AheadKind::Window {
                    records.push(ChargeRecord::from_charge(&charge));
                }
            }
        };
        self.decide(&check, |_| PermitId::ANONYMOUS, keep).await;
        for record in &records {
            self.return_to(record, units, taken_at).await;
        }
        if !records.is_empty() {
            self.full_counters.clear();
        }
    }

    /// Returns units to a window.
    async fn return_to(&self, record: &ChargeRecord, units: u64, taken_at: Timestamp) {
        let parts = record.parts();
        if record.mode == Mode::Local {
            let charge = record.charge(&parts, Cost::PEEK);
            if let Some(units) = self.refundable_here(&charge, units, taken_at) {
                let _ = self.store.debit(&[Charge { cost: Cost::refund(units), ..charge }]).await;
            }
            return;
        }
        let may_be_leased = record.mode != Mode::Central && record.limit.is_leasable();
        let earlier = if may_be_leased { CLOCK_OFFSET } else { TimeDelta::ZERO };
        let back = UnitReturn {
            key: record.key(&parts),
            limit: &record.limit,
            units,
            taken_at: Timestamp::from_micros(taken_at.as_micros().saturating_sub(earlier.as_micros())),
            full_at: Timestamp::ZERO,
            id: PermitId(DecisionId::generate().0),
        };
        // Sent once, because it may have been applied. If it is lost, the units are back when the window ends.
        let _ = self.store.return_units(&back).await;
    }

    /// Returns how many of the units that this process's counters took then can be returned to their window now.
    fn refundable_here(&self, charge: &Charge<'_>, units: u64, taken_at: Timestamp) -> Option<u64> {
        let phase = charge.limit.phase(charge.key.stable_hash());
        let units = charge.limit.refundable(units, taken_at + phase, self.clock.now() + phase);
        (units > 0).then_some(units)
    }
}

/// Returns where a decision of this origin has charged a limit; `None` if nothing was charged.
fn charged_at(plan: &Plan<'_>, matched: &MatchedLimit<'_>, origin: Origin) -> Option<Charged> {
    match origin {
        Origin::Store | Origin::Regional => Some(Charged::Store),
        // Its counters are in this process, whatever decided the others.
        Origin::Local if matched.limit.mode == Mode::Local => Some(Charged::Store),
        Origin::Local => {
            let policy = matched.rule.map(|rule| rule.on_error.policy(plan.tier_for(rule)));
            (policy == Some(FailPolicy::Local)).then_some(Charged::Fallback)
        }
        _ => None,
    }
}
