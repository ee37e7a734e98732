//! Explanation of a request before it is made: which rules match, the limit in force of each and where it comes from,
//! what each counter holds, and what would be decided. Nothing is charged and nothing is written.
//!
//! What would be decided is decided: by the ordinary path, over a store that applies nothing (`dry_run`). Rules that are
//! not active are explained by the same counters, as far as they have them in common.

use crate::check::{Check, CheckInput};
use crate::decide::plan_into;
use crate::decision::{Decision, DecisionDetails};
use crate::dry_run::DryRun;
use crate::emergency::{MeasureAction, MeasureEffect};
use crate::limiter::Limiter;
use crate::usage::{self, GrantBalance, LimitSource, UsageError};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{Charge, Cost, CounterStore, Limit, Outcome, RegionStatus, TimeDelta};
use tollgate_rules::{ExplainedRequest, Explanation, MatchedLimit, Plan, Role, Ruleset};

/// An explained request.
#[derive(Clone, Debug)]
pub struct CheckExplanation {
    /// Which rules match, and why the others do not.
    pub matching: Explanation,
    /// Whether the tier is of the caller's quota, not of the request.
    pub has_quota_tier: bool,
    /// The matched limits, in the order of the rules.
    pub limits: Vec<ExplainedLimit>,
    /// The caller's grants.
    pub grants: Vec<GrantBalance>,
    /// What would be decided. Remaining units are those after the request.
    pub decision: Decision,
}

/// One matched limit.
#[derive(Clone, Debug)]
pub struct ExplainedLimit {
    /// Number of the rule; `None` for a limit that arrived with the request.
    pub rule: Option<u32>,
    /// Name of the counter, with its values; those that may be secrets are masked.
    pub counter: String,
    /// The limit in force.
    pub limit: Limit,
    /// Where its number comes from.
    pub source: LimitSource,
    /// The emergency measure that changes the limit or sets it aside: name and action.
    pub measure: Option<(String, MeasureAction)>,
    /// Whether the limit is charged; false if a measure sets it aside.
    pub is_charged: bool,
    /// Role of the limit, which determines whether it is enforced.
    pub role: Role,
    /// Whether a denial by this limit denies the request.
    pub is_enforced: bool,
    /// Cost of the request for this limit, in units.
    pub cost: Cost,
    /// Units that could be charged now; `None` if the store could not return them.
    pub remaining: Option<u64>,
    /// Time until the limit is completely unused.
    pub reset_after: TimeDelta,
    /// What the limit says to the request; `None` if it is not asked.
    pub outcome: Option<Outcome>,
    /// Whether a grant would pay in its place.
    pub is_granted: bool,
    /// How cells share the limit at this moment; `None` if there are no others.
    pub region: Option<RegionStatus>,
}

impl ExplainedLimit {
    /// Returns the number of used units.
    #[must_use]
    pub fn used(&self) -> Option<u64> {
        self.remaining.map(|left| self.limit.capacity().saturating_sub(left))
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Explains a request by the active rules or by `draft`, and charges nothing. `domain` replaces that of the check;
    /// without one, the rules must have only one.
    ///
    /// # Errors
    /// [`UsageError`] if a domain must be named, or the counters cannot be read.
    pub async fn explain(
        &self,
        draft: Option<&Arc<Ruleset>>,
        domain: Option<&str>,
        check: &Check<'_>,
    ) -> Result<CheckExplanation, UsageError> {
        self.explain_with_signals(draft, domain, check, &[]).await
    }

    /// Explains a request as [`Limiter::explain`] does, after a report of these signals, whatever their sources: limits that
    /// follow them are where the next step takes them. Nothing is recorded.
    ///
    /// # Errors
    /// As [`Limiter::explain`], and [`UsageError::Signal`] if the rules of the domain do not use a signal.
    pub async fn explain_with_signals(
        &self,
        draft: Option<&Arc<Ruleset>>,
        domain: Option<&str>,
        check: &Check<'_>,
        signals: &[(&str, f64)],
    ) -> Result<CheckExplanation, UsageError> {
        let rules = draft.map_or_else(|| self.rules(), Arc::clone);
        let domain = match domain {
            Some(name) => name,
            None => usage::find_domain(&rules, None)?.name(),
        };
        let check = Check { domain, ..*check };
        let dry = self.dry(&rules, domain, signals)?;
        let decision = dry.check(&check).await;
        if let Some(error) = dry.store.failure() {
            return Err(UsageError::Store(error));
        }
        let quota = self.quota_for(&check, &rules);
        let mut plan = Plan::default();
        plan_into(&rules, &quota.quotas, &check, &mut plan);
        let request = match check.input {
            CheckInput::Attributes(attributes) => ExplainedRequest::Attributes(attributes),
            CheckInput::Descriptors(descriptors) => ExplainedRequest::Descriptors(descriptors),
        };
        let matching = rules.domain(domain).map_or_else(
            || Explanation { domain: domain.to_owned(), ..Explanation::default() },
            |domain| domain.explain_plan(request, &plan),
        );
        let sources: Vec<LimitSource> =
            plan.limits.iter().map(|matched| usage::source(&plan, matched)).collect();
        let in_force = self.apply_measures(&check, &mut plan);
        if dry.adapts(&check) {
            dry.scale_adapted(&check, &rules, &mut plan, &mut DecisionDetails::unmatched());
        }
        let limits = self.explained_limits(&plan, &sources, in_force, &decision).await?;
        Ok(CheckExplanation {
            matching,
            has_quota_tier: decision.override_tier().is_some(),
            limits,
            grants: self.grant_balances(&rules, quota.grants.as_deref()).await,
            decision,
        })
    }

    /// Returns a limiter that decides as this one does and charges nothing, after a report of these signals.
    fn dry(
        &self,
        rules: &Arc<Ruleset>,
        domain: &str,
        signals: &[(&str, f64)],
    ) -> Result<Limiter<DryRun<'_, S>>, UsageError> {
        let mut dry = Limiter::new(Arc::clone(rules), DryRun::new(&self.store), Arc::clone(&self.clock));
        dry.quotas.clone_from(&self.quotas);
        dry.measures = Arc::clone(&self.measures);
        let now = self.clock.now();
        dry.adaptations = self.adaptations.copy_for(rules, now);
        dry.adaptations.suppose(domain, signals, now)?;
        let copy = |flag: &AtomicBool| AtomicBool::new(flag.load(Ordering::Relaxed));
        (dry.shadow, dry.denies_unknown) = (copy(&self.shadow), copy(&self.denies_unknown));
        Ok(dry)
    }

    /// Gives the plan's limits the values in force. Returns, for each of them, whether it is charged, and the measure
    /// that changes it or sets it aside.
    fn apply_measures(&self, check: &Check<'_>, plan: &mut Plan<'_>) -> Vec<(bool, Option<Applied>)> {
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

    /// Reads the counters of the plan's limits.
    async fn explained_limits(
        &self,
        plan: &Plan<'_>,
        sources: &[LimitSource],
        in_force: Vec<(bool, Option<Applied>)>,
        decision: &Decision,
    ) -> Result<Vec<ExplainedLimit>, UsageError> {
        let counters = usage::counters(plan, |_| true);
        let looks = usage::charges(plan, &counters, Cost::PEEK);
        let outcomes = match looks.is_empty() {
            true => SmallVec::new(),
            false => self.store.charge(&looks).await?.per_charge,
        };
        let (mut outcomes, mut looked) = (outcomes.into_iter(), looks.iter());
        // The decision has the limits that are charged, in the same order; under an outright measure, all as unknown.
        let mut decided = decision.limits.iter();
        let limits = counters.iter().zip(in_force).map(|(counter, (is_charged, measure))| {
            let matched = &plan.limits[counter.limit];
            let outcomes: Vec<Outcome> = outcomes.by_ref().take(counter.names.len()).collect();
            let own: Vec<&Charge<'_>> = looked.by_ref().take(counter.names.len()).collect();
            let status = if is_charged { decided.next() } else { None };
            ExplainedLimit {
                rule: matched.rule.map(|rule| rule.id),
                counter: plan.describe(counter.limit).1,
                limit: matched.limit.limit.clone(),
                source: sources[counter.limit],
                measure,
                is_charged,
                role: matched.role,
                is_enforced: crate::fold::decides(matched),
                cost: matched.cost,
                remaining: outcomes.iter().map(usage::answered).sum(),
                reset_after: outcomes
                    .iter()
                    .map(|outcome| outcome.reset_after)
                    .max()
                    .unwrap_or(TimeDelta::ZERO),
                outcome: status.map(|status| status.outcome),
                is_granted: status.is_some_and(|status| decision.is_granted(status)),
                region: self.region_of(own.into_iter()),
            }
        });
        Ok(limits.collect())
    }
}

/// A measure as explanations show it.
type Applied = (String, MeasureAction);

impl MeasureEffect {
    /// Returns the measure that changes a limit.
    fn changing(&self, is_changed: bool) -> Option<Applied> {
        self.tightening().filter(|_| is_changed).map(|one| (one.name.to_string(), one.action))
    }

    /// Returns the measure because of which a rule's limits are not charged.
    fn setting_aside(&self, rule: Option<&str>) -> Option<Applied> {
        self.disabling(rule).map(|one| (one.name.to_string(), one.action))
    }
}
