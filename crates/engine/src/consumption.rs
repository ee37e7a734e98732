//! Consumption: what admitted requests use of the rules that are billed (`billing: true`), for a [`Meter`].
//!
//! Consumption is what was admitted, not what a counter holds: a request that passes while the store is unavailable, in
//! shadow mode or by a grant has consumed. Limits of one rule that take their cost from the same place (100 a second and
//! 10,000 a day) are one consumption; a limit with a cost of its own (`cost: tokens`) is another one. A reservation
//! consumes its estimate, and the difference when it is closed, in the hour in which it was made.
//!
//! Rejected: reading it from the counters. They forget, they are shared between rules and tiers, and a reset by an
//! operator would be a rebate.

use crate::check::{Check, CheckInput};
use crate::decision::{Decision, LimitStatus};
use crate::limiter::Limiter;
use crate::reservation::Settlement;
use std::sync::Arc;
use tollgate_core::{Algorithm, Cost, Timestamp};
use tollgate_rules::{CostFrom, Role, Rule, RuleLimit};

/// What one request consumed of one rule, or a later correction of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consumption<'a> {
    /// Domain of the rule.
    pub domain: &'a str,
    /// Name of the rule.
    pub rule: &'a str,
    /// Where the units come from: the attribute of `cost`, `cost` for the request's own cost, `requests` for a fixed cost
    /// of one, or `fixed`.
    pub meter: &'a str,
    /// Attribute that names the caller.
    pub key: &'a str,
    /// Value of that attribute. It may be a secret.
    pub caller: &'a str,
    /// Units; negative for a refund.
    pub units: i64,
    /// Requests; negative if an admitted request was withdrawn.
    pub requests: i64,
    /// Time of the admission.
    pub at: Timestamp,
}

/// Recipient of consumption. Called on the request thread: it must not block.
pub trait Meter: Send + Sync {
    /// Adds to what a caller has consumed.
    fn record(&self, consumption: &Consumption<'_>);
}

/// Consumption that may be corrected later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReservedConsumption {
    pub(crate) domain: String,
    pub(crate) rule: String,
    pub(crate) meter: String,
    pub(crate) key: String,
    pub(crate) caller: String,
    pub(crate) units: u64,
    /// True if the actual cost replaces the estimate; false if the rule charges a fixed cost.
    pub(crate) follows: bool,
    pub(crate) at: Timestamp,
}

/// Calls `each` with everything that an allowed request consumed, and its source.
fn consumed<'a>(
    check: &Check<'a>,
    decision: &'a Decision,
    now: Timestamp,
    mut each: impl FnMut(&Consumption<'_>, &CostFrom),
) {
    if !decision.is_allowed() {
        return;
    }
    let at = if decision.at == Timestamp::ZERO { now } else { decision.at };
    let billed = |status: &LimitStatus| -> Option<(&'a Rule, &'a RuleLimit)> {
        let rule = decision.rules().rule(status.rule?)?;
        rule.billing.as_ref()?;
        let limit = decision.limit(status)?;
        let is_rate = status.role != Role::Candidate && limit.limit.algorithm() != Algorithm::Concurrency;
        is_rate.then_some((rule, limit))
    };
    for (index, status) in decision.limits.iter().enumerate() {
        let Some((rule, limit)) = billed(status) else { continue };
        let source = limit.cost_from(rule);
        let is_same = |other: &LimitStatus| {
            (other.rule, other.descriptor) == (status.rule, status.descriptor)
                && billed(other).is_some_and(|(rule, limit)| limit.cost_from(rule).meter() == source.meter())
        };
        let cost = decision.cost(check, status);
        if cost.is_peek() || decision.limits[..index].iter().any(is_same) {
            continue;
        }
        let caller_key = rule.billing.as_ref().and_then(|billing| billing.caller_key.as_deref());
        let (key, caller) = billed_caller(check, status.descriptor, caller_key);
        let consumption = Consumption {
            domain: check.domain,
            rule: &rule.name,
            meter: source.meter(),
            key,
            caller,
            units: signed(cost),
            requests: i64::from(!cost.is_refund()),
            at,
        };
        each(&consumption, source);
    }
}

/// Returns who is billed: the value that the rule counts by, else the request's caller.
fn billed_caller<'a>(check: &Check<'a>, descriptor: u16, key: Option<&str>) -> (&'a str, &'a str) {
    let in_entries =
        |entries: &'a [(&'a str, &'a str)]| entries.iter().find(|(name, _)| Some(*name) == key).copied();
    let found = match check.input {
        CheckInput::Attributes(attributes) => in_entries(attributes),
        CheckInput::Descriptors(all) => {
            let own = all.get(usize::from(descriptor)).and_then(|one| in_entries(one.entries));
            own.or_else(|| all.iter().find_map(|one| in_entries(one.entries)))
        }
    };
    found.or_else(|| check.caller()).unwrap_or_default()
}

fn signed(cost: Cost) -> i64 {
    let units = i64::try_from(cost.units()).unwrap_or(i64::MAX);
    if cost.is_refund() { -units } else { units }
}

impl<S> Limiter<S> {
    /// Sets the meter that records the consumption of billed rules.
    #[must_use]
    pub fn with_meter(mut self, meter: Arc<dyn Meter>) -> Self {
        self.meter = Some(meter);
        self
    }

    /// Records what a decision consumed. Apart because most rule sets bill nothing.
    #[cold]
    #[inline(never)]
    pub(crate) fn record_consumption(&self, check: &Check<'_>, decision: &Decision) {
        let Some(meter) = &self.meter else { return };
        let now = self.clock.now();
        // The decision is made: a panic is counted and logged, and the caller has its answer.
        let _ = self.guarded(|| consumed(check, decision, now, |consumption, _| meter.record(consumption)));
    }

    /// Returns what an allowed request consumed, to be corrected later. The node that corrects it may be another one, so
    /// it does not matter whether this one has a meter.
    pub(crate) fn reserved_consumption(
        &self,
        check: &Check<'_>,
        decision: &Decision,
    ) -> Vec<ReservedConsumption> {
        let mut reserved = Vec::new();
        if decision.rules().has_billing() {
            consumed(check, decision, self.clock.now(), |found, source| {
                let Ok(units) = u64::try_from(found.units) else { return };
                reserved.push(ReservedConsumption {
                    domain: found.domain.to_owned(),
                    rule: found.rule.to_owned(),
                    meter: found.meter.to_owned(),
                    key: found.key.to_owned(),
                    caller: found.caller.to_owned(),
                    units,
                    follows: !matches!(source, CostFrom::Fixed(_)),
                    at: found.at,
                });
            });
        }
        reserved
    }

    /// Corrects what was consumed to the end of its reservation.
    pub(crate) fn correct_consumption(&self, reserved: &[ReservedConsumption], end: Settlement) {
        let Some(meter) = &self.meter else { return };
        for one in reserved {
            let units = match end {
                Settlement::Settled(cost) if one.follows => cost,
                Settlement::Settled(_) | Settlement::Expired => one.units,
                Settlement::Canceled => 0,
            };
            let requests = if end == Settlement::Canceled { -1 } else { 0 };
            let units = signed(Cost::new(units)).saturating_sub(signed(Cost::new(one.units)));
            if units != 0 || requests != 0 {
                let ReservedConsumption { domain, rule, meter: source, key, caller, at, .. } = one;
                meter.record(&Consumption {
                    domain,
                    rule,
                    meter: source,
                    key,
                    caller,
                    units,
                    requests,
                    at: *at,
                });
            }
        }
    }
}
