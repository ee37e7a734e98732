//! The limits in force for a request at this moment: a plan, with emergency measures and adapted limits applied as a
//! decision applies them. Explanations and usage read it, so that both show what the next decision charges.
//!
//! A decision drops the limits that a measure sets aside. Here they stay, marked: a caller who is blocked still has them.

use crate::check::Check;
use crate::decision::DecisionDetails;
use crate::emergency::{MeasureAction, MeasureEffect};
use crate::limiter::Limiter;
use crate::usage::{LimitSource, source};
use tollgate_core::Limit;
use tollgate_rules::{MatchedLimit, Plan, Ruleset};

/// The name of an emergency measure, and what it does.
pub type AppliedMeasure = (String, MeasureAction);

/// What is in force of one limit of a plan.
pub(crate) struct InForce {
    /// Where the limit's number comes from, before measures.
    pub(crate) source: LimitSource,
    /// False if a measure sets the limit aside.
    pub(crate) is_charged: bool,
    /// The measure that changes the limit or sets it aside.
    pub(crate) measure: Option<AppliedMeasure>,
    /// The limit without measures and signals, if they change it.
    pub(crate) configured: Option<Limit>,
}

impl<S> Limiter<S> {
    /// Gives the plan's limits the values in force. Returns, for each of them, where its number comes from, and what a
    /// measure does to it.
    pub(crate) fn put_in_force(
        &self,
        check: &Check<'_>,
        rules: &Ruleset,
        plan: &mut Plan<'_>,
    ) -> Vec<InForce> {
        let configured: Vec<(LimitSource, Limit)> =
            plan.limits.iter().map(|matched| (source(plan, matched), matched.limit.limit.clone())).collect();
        let measured = self.apply_measures(check, plan);
        if self.adapts(check) {
            self.scale_adapted(check, rules, plan, &mut DecisionDetails::unmatched());
        }
        let each = configured.into_iter().zip(measured).zip(&plan.limits);
        let in_force = each.map(|(((source, limit), (is_charged, measure)), now)| {
            let configured = (limit != now.limit.limit).then_some(limit);
            InForce { source, is_charged, measure, configured }
        });
        in_force.collect()
    }

    /// Returns, for each limit, whether it is charged, and the measure that changes it or sets it aside.
    fn apply_measures(&self, check: &Check<'_>, plan: &mut Plan<'_>) -> Vec<(bool, Option<AppliedMeasure>)> {
        let Some(mut effect) = self.effect_of(check) else { return vec![(true, None); plan.limits.len()] };
        let before = plan.limits.clone();
        effect.apply_to(plan, &mut DecisionDetails::unmatched());
        let mut charged = std::mem::take(&mut plan.limits).into_iter().peekable();
        let mut applied = Vec::with_capacity(before.len());
        for matched in before {
            let same = |other: &MatchedLimit<'_>| {
                other.parts == matched.parts
                    && other.descriptor == matched.descriptor
                    && other.role == matched.role
                    && other.limit.scope.id() == matched.limit.scope.id()
            };
            match charged.next_if(same) {
                Some(now) => {
                    let is_changed = now.limit.limit != matched.limit.limit;
                    applied.push((true, effect.changing(is_changed)));
                    plan.limits.push(now);
                }
                None => {
                    applied.push((false, effect.setting_aside(matched.rule.map(|rule| &*rule.name))));
                    plan.limits.push(matched);
                }
            }
        }
        applied
    }
}

impl MeasureEffect {
    /// Returns the measure that changes a limit.
    fn changing(&self, is_changed: bool) -> Option<AppliedMeasure> {
        self.tightening().filter(|_| is_changed).map(|one| (one.name.to_string(), one.action))
    }

    /// Returns the measure because of which a rule's limits are not charged.
    fn setting_aside(&self, rule: Option<&str>) -> Option<AppliedMeasure> {
        self.disabling(rule).map(|one| (one.name.to_string(), one.action))
    }
}
