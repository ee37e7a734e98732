//! Explanation of a request before it is made: which rules match, the limit in force of each and where it comes from,
//! what each counter holds, and what would be decided. Nothing is charged and nothing is written.
//!
//! What would be decided is decided: by the ordinary path, over a store that applies nothing (`dry_run`). Rules that are
//! not active are explained by the same counters, as far as they have them in common.

use crate::check::{Check, CheckInput};
use crate::decide::plan_into;
use crate::decision::Decision;
use crate::dry_run::DryRun;
use crate::in_force::{AppliedMeasure, InForce};
use crate::limiter::Limiter;
use crate::usage::{self, GrantBalance, LimitSource, UsageError};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{Charge, Cost, CounterStore, Limit, Outcome, RegionStatus, TimeDelta};
use tollgate_rules::{ExplainedRequest, Explanation, Plan, Role, Ruleset};

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
    /// The limit in force as text, with what it counts.
    pub text: String,
    /// Name of the counter, with its values; those that may be secrets are masked.
    pub counter: String,
    /// The limit in force.
    pub limit: Limit,
    /// What the limit counts, if that is an attribute of requests.
    pub unit: Option<String>,
    /// Where its number comes from.
    pub source: LimitSource,
    /// The emergency measure that changes the limit or sets it aside: name and action.
    pub measure: Option<AppliedMeasure>,
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
    /// Whether the store did not know what was used, because it may have lost it, and assumed all of it.
    pub is_assumed: bool,
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
        let in_force = dry.put_in_force(&check, &rules, &mut plan);
        let limits = self.explained_limits(&plan, in_force, &decision).await?;
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

    /// Reads the counters of the plan's limits.
    async fn explained_limits(
        &self,
        plan: &Plan<'_>,
        in_force: Vec<InForce>,
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
        let limits =
            counters.iter().zip(in_force).map(|(counter, InForce { source, is_charged, measure, .. })| {
                let matched = &plan.limits[counter.limit];
                let outcomes: Vec<Outcome> = outcomes.by_ref().take(counter.names.len()).collect();
                let own: Vec<&Charge<'_>> = looked.by_ref().take(counter.names.len()).collect();
                let status = if is_charged { decided.next() } else { None };
                let (text, name) = plan.describe(counter.limit);
                ExplainedLimit {
                    rule: matched.rule.map(|rule| rule.id),
                    text,
                    counter: name,
                    limit: matched.limit.limit.clone(),
                    unit: matched.limit.unit_name(matched.rule).map(str::to_owned),
                    source,
                    measure,
                    is_charged,
                    role: matched.role,
                    is_enforced: crate::fold::decides(matched),
                    cost: matched.cost,
                    is_assumed: own.iter().any(|charge| self.is_assumed(charge)),
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
