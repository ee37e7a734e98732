//! Units charged ahead: a decision that a protocol server makes now for requests that another process admits later.
//!
//! It is an ordinary check, planned, charged and folded on the one decision path, so shadow mode, emergency measures,
//! quotas and tiers apply to it. Beside the decision it returns which counters were charged and until when the units of
//! each may be spent ([`tollgate_core::Escrow`]), which only the plan determines: a key's windows have their own phase.
//!
//! Units of windows that can no longer be spent are returned ([`Limiter::return_ahead`]); those of buckets come back with
//! time. A denied decision may have charged windows: those that count denied requests, and with the profile `envoy` those that have
//! units left. Nobody sent that many requests, so the units are returned at once.
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
    Algorithm, Cost, CounterStore, Enforcement, Escrow, Limit, Mode, PermitId, TimeDelta, Timestamp,
    UnitReturn, Verdict,
};
use tollgate_rules::Plan;

/// Most by which the clocks of a node and of its store may differ, for units that may have come from a lease.
const CLOCK_OFFSET: TimeDelta = TimeDelta::from_secs(1);

/// Most units of a denied decision that are returned: of more, a window that counts denied requests may have counted only a part.
const MAX_RETURNED: u64 = 1 << 29;

/// One counter of a decision that was made ahead.
#[derive(Clone, Copy, Debug)]
pub struct CounterAhead {
    /// Stable hash of the counter key.
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

impl<S: CounterStore> Limiter<S> {
    /// Decides `check` as [`Limiter::check`] does, for requests that are admitted later.
    pub async fn charge_ahead(&self, check: &Check<'_>) -> ChargeAhead {
        let (mut ahead, in_vain) = self.decide_ahead(check).await;
        if in_vain.is_empty() {
            return ahead;
        }
        let taken_at = ahead.decision.body.details.at;
        for (record, units) in &in_vain {
            self.return_to(record, *units, taken_at).await;
        }
        self.full_counters.clear();
        // What is left, without what was charged.
        let (look, _) = self.decide_ahead(&check.with_cost(Cost::PEEK)).await;
        for own in &mut ahead.counters {
            if let Some(seen) = look.counters.iter().find(|seen| seen.counter == own.counter) {
                own.remaining = seen.remaining;
            }
        }
        ahead
    }

    /// Decides `check`. Returns also what a denied decision has charged.
    async fn decide_ahead(&self, check: &Check<'_>) -> (ChargeAhead, SmallVec<[(ChargeRecord, u64); 1]>) {
        let (mut counters, mut in_vain) = (SmallVec::new(), SmallVec::new());
        let decision = self
            .decide(
                check,
                |_| PermitId::ANONYMOUS,
                |plan, details| {
                    for (matched, status) in plan.limits.iter().zip(&details.limits) {
                        if !decides(matched) {
                            continue;
                        }
                        let charge = plan.charge(matched, PermitId::ANONYMOUS);
                        let (limit, outcome) = (charge.limit, &status.outcome);
                        let (counter, cost) = (charge.key.stable_hash(), matched.cost.units());
                        let is_charged =
                            details.is_allowed() && matches!(outcome.verdict, Verdict::Allowed { .. });
                        let at = details.at + limit.phase(counter);
                        let kind = AheadKind::of(limit);
                        let is_in_vain = !details.is_allowed()
                            && matches!(details.origin, Origin::Store | Origin::Regional)
                            && match outcome.verdict {
                                Verdict::Allowed { .. } => charge.enforcement == Enforcement::Independent,
                                _ => limit.counts_denied() && outcome.verdict.is_denied(),
                            };
                        if is_in_vain
                            && kind == AheadKind::Window
                            && charge.mode != Mode::Local
                            && (1..=MAX_RETURNED).contains(&cost)
                        {
                            in_vain.push((ChargeRecord::from_charge(&charge), cost));
                        }
                        counters.push(CounterAhead {
                            counter,
                            cost,
                            remaining: outcome.remaining,
                            capacity: limit.capacity(),
                            count: limit.rate().count,
                            period: limit.rate().period.length(),
                            escrow: if is_charged { limit.escrow(cost, at, outcome) } else { None },
                            kind,
                        });
                    }
                },
            )
            .await;
        (ChargeAhead { decision, counters }, in_vain)
    }

    /// Returns `units` that `check` charged ahead when the store's clock said `taken_at`, and that can no longer be spent, to
    /// those of `counters` (stable hashes) that are windows. Nothing happens once their window has ended, or if the rules
    /// no longer charge them.
    pub async fn return_ahead(&self, check: &Check<'_>, counters: &[u64], units: u64, taken_at: Timestamp) {
        let mut records: SmallVec<[ChargeRecord; 1]> = SmallVec::new();
        let check = check.with_cost(Cost::PEEK);
        let keep = |plan: &Plan<'_>, _: &DecisionDetails| {
            for matched in plan.limits.iter().filter(|matched| decides(matched)) {
                let charge = plan.charge(matched, PermitId::ANONYMOUS);
                let is_charged = charge.mode != Mode::Local && counters.contains(&charge.key.stable_hash());
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
        let earlier = if record.mode == Mode::Central { TimeDelta::ZERO } else { CLOCK_OFFSET };
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
}
