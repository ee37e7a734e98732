//! The body of an explanation: the outcome, every rule, and what each limit holds.
//!
//! `ExplainedRule` is also what `tollgate explain` prints of rule files, without what only a server knows.

use super::explain::ExplainQuery;
use super::region::RegionOfLimit;
use super::usage::{LeftOfGrant, left};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use tollgate_core::{KeyPart, Priority, TimeDelta, Verdict};
use tollgate_engine::{
    CheckExplanation, Decision, DecisionVerdict, ExplainedLimit, MeasureAction, Origin, Window,
};
use tollgate_observe::humanize;
use tollgate_rules::{OverloadExplanation, Role, RuleExplanation, RuleResult, may_be_secret};
use utoipa::ToSchema;

/// Maximum number of rules listed that do not match.
const MAX_UNMATCHED: usize = 1_000;

/// What would happen to a request, and why.
#[derive(Serialize, ToSchema)]
#[schema(as = Explanation)]
pub(super) struct ExplanationBody {
    /// `active`, or `draft` if the request had files.
    explained_by: &'static str,
    /// Hash of these rules.
    revision: String,
    domain: String,
    #[schema(required = true)]
    tier: Option<String>,
    /// `quota` or `request`.
    #[schema(required = true)]
    tier_source: Option<&'static str>,
    /// The attributes that were explained; values that may be secrets are masked.
    attributes: BTreeMap<String, String>,
    outcome: ExplainedOutcome,
    /// All rules that match, and the first 1,000 that do not, in the order of the files.
    rules: Vec<ExplainedRule>,
    /// Number of rules that do not match and are not listed.
    omitted: usize,
    grants: Vec<LeftOfGrant>,
    /// What the domain's `overload` section makes of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = ExplainedOverload)]
    overload: Option<ExplainedOverload>,
    /// For a draft: what the active rules would do.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = ExplainedOutcome)]
    active_outcome: Option<ExplainedOutcome>,
    /// For a draft: the rules that treat the request in another way.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Vec<ExplainedChange>)]
    changes: Option<Vec<ExplainedChange>>,
}

/// What would be decided.
#[derive(Serialize, ToSchema)]
struct ExplainedOutcome {
    /// `allow`, `deny`, `delay` or `degrade`.
    verdict: &'static str,
    /// The outcome in one sentence.
    sentence: String,
    /// The basis of the decision, as in the decision log.
    origin: &'static str,
    /// The rule or emergency measure that denies or degrades the request.
    #[schema(required = true)]
    rule: Option<String>,
    /// Time after which the same request would pass; absent unless it is denied, or if it can never pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    retry_after_ms: Option<u64>,
    /// Time for which the request would be delayed.
    delay_ms: u64,
    /// The emergency measure that affects the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    measure: Option<String>,
    /// The rule whose soft limit is exceeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    warned_by: Option<String>,
    /// How far signals tighten the limits of the request's tier; absent if they do not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    reason: Option<String>,
}

/// Priority of a request and guarantee of its tenant while not all can be served.
#[derive(Serialize, ToSchema)]
pub struct ExplainedOverload {
    /// `critical`, `important`, `normal` or `sheddable`.
    priority: &'static str,
    /// Number of the entry of `priorities` that matches, from 1.
    #[schema(required = true)]
    entry: Option<usize>,
    /// The tenant, if tenants share fairly and the request names one.
    #[schema(required = true)]
    tenant: Option<String>,
    /// Guarantee of its tier, as the rules write it.
    #[schema(required = true)]
    guarantee: Option<String>,
    /// Priorities that are shed before this one.
    shed_earlier: Vec<&'static str>,
    /// Parts of the section that may shed the request.
    shed_by: Vec<&'static str>,
    /// Whether nothing is shed, only reported.
    shadow: bool,
    /// When its limits are tightened by signals, and how far; null if they are not.
    #[schema(required = true)]
    tightened: Option<String>,
    /// The same in words, on one line.
    sentence: String,
}

impl From<&OverloadExplanation> for ExplainedOverload {
    fn from(explained: &OverloadExplanation) -> Self {
        Self {
            priority: explained.priority.name(),
            entry: explained.entry,
            tenant: explained.tenant.clone(),
            guarantee: explained.guarantee.clone(),
            shed_earlier: explained.shed_earlier().map(Priority::name).collect(),
            shed_by: explained.shed_by.clone(),
            shadow: explained.is_shadow,
            tightened: explained.tightened.clone(),
            sentence: explained.to_string().replace("\n  ", "; "),
        }
    }
}

/// Why one rule matches, or does not, and what it charges.
#[derive(Serialize, ToSchema)]
pub struct ExplainedRule {
    rule: String,
    file: String,
    line: u32,
    /// `no_match`, `limited`, `unlimited`, `exempt` or `replaced`.
    finding: &'static str,
    clauses: Vec<ExplainedClause>,
    charged: Vec<ExplainedCharge>,
    #[schema(required = true)]
    replaced_by: Option<String>,
    settings: BTreeMap<&'static str, String>,
}

/// A condition of a rule, and what the request has.
#[derive(Serialize, ToSchema)]
struct ExplainedClause {
    asked: String,
    answer: String,
    holds: bool,
}

/// A limit that the request is charged to.
#[derive(Serialize, ToSchema)]
struct ExplainedCharge {
    /// The limit in force.
    limit: String,
    /// Its counter; values that may be secrets are masked.
    counter: String,
    #[serde(flatten)]
    #[schema(inline)]
    state: Option<ChargeState>,
}

/// What only a server knows of a limit.
#[derive(Serialize, ToSchema)]
struct ChargeState {
    /// Where the limit's number comes from: `rule`, `tier`, `override` or `request`.
    source: &'static str,
    count: u64,
    window: String,
    /// What the limit counts, if that is an attribute of requests; absent for requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    unit: Option<String>,
    /// Units that the unused limit has, if that is not `count`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    burst: Option<u64>,
    /// Units of this request.
    cost: u64,
    #[schema(required = true)]
    used: Option<u64>,
    #[schema(required = true)]
    remaining: Option<u64>,
    /// Whether the store may have lost what was used, and all of it is assumed until `reset_ms` from now; absent if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    assumed: bool,
    reset_ms: u64,
    /// `fits`, `denies`, or `not_asked` if an emergency measure sets the limit aside.
    answer: &'static str,
    /// Time after which it would fit, if it denies; absent if it never does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64)]
    retry_after_ms: Option<u64>,
    /// Whether a denial by this limit denies the request.
    enforced: bool,
    /// `live`, `shadow`, `unenforced` (by `enforce`), `candidate` or `quota`.
    role: &'static str,
    /// The emergency measure that changes the limit or sets it aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    measure: Option<String>,
    /// What that measure does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    measure_effect: Option<String>,
    /// Whether a grant would pay in its place.
    granted: bool,
    /// How cells share the limit; absent if there is one cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = RegionOfLimit)]
    region: Option<RegionOfLimit>,
}

/// A rule that a draft changes for this request.
#[derive(Serialize, ToSchema)]
struct ExplainedChange {
    rule: String,
    /// What the active rules have.
    before: String,
    /// What the draft has.
    after: String,
}

impl From<&RuleExplanation> for ExplainedRule {
    fn from(rule: &RuleExplanation) -> Self {
        let (finding, charged, replaced_by) = match &rule.result {
            RuleResult::NoMatch => ("no_match", None, None),
            RuleResult::Limited(charged) => ("limited", Some(charged), None),
            RuleResult::Unlimited => ("unlimited", None, None),
            RuleResult::Exempt => ("exempt", None, None),
            RuleResult::Replaced(by) => ("replaced", None, Some(by.clone())),
        };
        let charged = charged.into_iter().flatten();
        let clauses = rule.clauses.iter().map(|clause| ExplainedClause {
            asked: clause.condition.clone(),
            answer: clause.actual.clone(),
            holds: clause.holds,
        });
        let (file, line) = rule.location.clone();
        Self {
            rule: rule.name.clone(),
            file,
            line,
            finding,
            clauses: clauses.collect(),
            charged: charged
                .map(|(limit, counter)| ExplainedCharge {
                    limit: limit.clone(),
                    counter: counter.clone(),
                    state: None,
                })
                .collect(),
            replaced_by,
            settings: rule.settings.iter().map(|(name, value)| (*name, value.clone())).collect(),
        }
    }
}

/// Returns the body about `explanation`; for a draft, with what it changes of `active`.
pub(super) fn body(
    query: &ExplainQuery,
    explanation: &CheckExplanation,
    by: &'static str,
    active: Option<&CheckExplanation>,
) -> ExplanationBody {
    let rules = explanation.decision.rules();
    let is_cost = |name: &str, value: &str| value.parse::<u64>().is_ok() && rules.is_cost_attribute(name);
    let shown = |(name, value): &(String, String)| match may_be_secret(name) && !is_cost(name, value) {
        true => (name.clone(), KeyPart::Secret(value).to_string()),
        false => (name.clone(), value.clone()),
    };
    let mut rules: Vec<ExplainedRule> = explanation.matching.rules.iter().map(ExplainedRule::from).collect();
    for (explained, rule) in explanation.matching.rules.iter().zip(&mut rules) {
        let own = explanation.limits.iter().filter(|limit| limit.rule == Some(explained.id));
        for (charge, limit) in rule.charged.iter_mut().zip(own) {
            charge.limit.clone_from(&limit.text);
            charge.state = Some(state(limit));
        }
    }
    let (total, mut unmatched) = (rules.len(), 0);
    rules.retain(|rule| {
        unmatched += usize::from(rule.finding == "no_match");
        rule.finding != "no_match" || unmatched <= MAX_UNMATCHED
    });
    ExplanationBody {
        omitted: total - rules.len(),
        explained_by: by,
        revision: explanation.decision.rules().revision().to_owned(),
        domain: explanation.matching.domain.clone(),
        tier: explanation.matching.tier.clone(),
        tier_source: explanation
            .matching
            .tier
            .as_ref()
            .map(|_| if explanation.has_quota_tier { "quota" } else { "request" }),
        attributes: query.attributes.iter().map(shown).collect(),
        outcome: outcome(explanation),
        rules,
        grants: explanation.grants.iter().map(left).collect(),
        overload: explanation.matching.overload.as_ref().map(ExplainedOverload::from),
        active_outcome: active.map(outcome),
        changes: active.map(|active| changes(active, explanation)),
    }
}

fn state(limit: &ExplainedLimit) -> ChargeState {
    let (count, capacity) = (limit.limit.rate().count, limit.limit.capacity());
    let (answer, retry_after) = match limit.outcome.map(|outcome| outcome.verdict) {
        Some(Verdict::Denied { retry_after }) => ("denies", retry_after),
        Some(Verdict::Allowed { .. }) => ("fits", None),
        Some(Verdict::Unknown) | None => ("not_asked", None),
    };
    ChargeState {
        source: limit.source.name(),
        count,
        window: Window::from_limit(&limit.limit).to_string(),
        unit: limit.unit.clone(),
        burst: (capacity != count).then_some(capacity),
        cost: limit.cost.units(),
        used: limit.used(),
        remaining: limit.remaining,
        assumed: limit.is_assumed,
        reset_ms: limit.reset_after.ceil_millis(),
        answer,
        retry_after_ms: retry_after.map(TimeDelta::ceil_millis),
        enforced: limit.is_enforced,
        role: match limit.role {
            Role::Live => "live",
            Role::Shadow => "shadow",
            Role::Unenforced => "unenforced",
            Role::Candidate => "candidate",
            Role::Quota => "quota",
        },
        measure: limit.measure.as_ref().map(|(name, _)| name.clone()),
        measure_effect: limit.measure.as_ref().map(|(_, action)| measure_effect(*action)),
        granted: limit.is_granted,
        region: limit.region.as_ref().map(Into::into),
    }
}

pub(super) fn measure_effect(action: MeasureAction) -> String {
    match action {
        MeasureAction::Tighten(permille) => format!("{}% of the limit", f64::from(permille) / 10.0),
        MeasureAction::DisableRule => "the rule is disabled".to_owned(),
        MeasureAction::Block => "the caller is blocked".to_owned(),
        MeasureAction::Exempt => "the caller is exempt".to_owned(),
        MeasureAction::AllowAll => "everything is allowed".to_owned(),
        MeasureAction::ShadowAll => "nothing is enforced".to_owned(),
    }
}

fn outcome(explanation: &CheckExplanation) -> ExplainedOutcome {
    let decision = &explanation.decision;
    let delay = decision.delay();
    let (verdict, by) = match decision.verdict {
        DecisionVerdict::Denied { .. } => ("deny", decision.denied_by),
        DecisionVerdict::Allowed { .. } if delay > TimeDelta::ZERO => ("delay", None),
        DecisionVerdict::Allowed { .. } if decision.degraded_by.is_some() => {
            ("degrade", decision.degraded_by)
        }
        DecisionVerdict::Allowed { .. } => ("allow", None),
    };
    ExplainedOutcome {
        verdict,
        sentence: Sentence(explanation).to_string(),
        origin: decision.origin.name(),
        rule: by.map(|by| decision.name(by).to_owned()),
        retry_after_ms: decision.retry_after().map(TimeDelta::ceil_millis),
        delay_ms: delay.ceil_millis(),
        measure: decision.emergency().map(str::to_owned),
        warned_by: decision.warned_by.map(|by| decision.name(by).to_owned()),
        reason: decision.reason.as_deref().map(str::to_owned),
    }
}

/// The outcome in one sentence.
struct Sentence<'a>(&'a CheckExplanation);

impl fmt::Display for Sentence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decision: &Decision = &self.0.decision;
        if let Some(attribute) = &decision.malformed_cost {
            return write!(
                f,
                "It would be refused: `{attribute}`, from which a rule takes its cost, is not a whole number."
            );
        }
        if let DecisionVerdict::Denied { retry_after } = decision.verdict {
            let by = decision.denied_by_name().unwrap_or("a limit");
            write!(f, "It would be denied by `{by}`")?;
            return match retry_after {
                Some(time) => write!(f, "; it passes in {}, if nothing else is charged.", humanize(time)),
                None if decision.rules().domain(&self.0.matching.domain).is_none() => {
                    f.write_str(": the domain has no rules.")
                }
                None => f.write_str("; it can never pass: its cost exceeds the limit."),
            };
        }
        f.write_str("It would be allowed")?;
        match decision.origin {
            Origin::Unmatched => f.write_str(": no limit applies")?,
            Origin::Emergency => {
                write!(f, " by emergency measure `{}`", decision.emergency().unwrap_or_default())?;
            }
            Origin::Grant => f.write_str(": a grant pays over the limit")?,
            _ => {}
        }
        if decision.delay() > TimeDelta::ZERO {
            write!(f, " after a delay of {}", humanize(decision.delay()))?;
        }
        if let Some(by) = decision.degraded_by {
            write!(f, ", with degraded service by `{}`", decision.name(by))?;
        }
        let refusing = self.0.limits.iter().filter(|limit| {
            limit.outcome.is_some_and(|outcome| outcome.verdict.is_denied()) && limit.role != Role::Quota
        });
        let name = |limit: &ExplainedLimit| {
            limit.rule.and_then(|rule| decision.rules().rule(rule)).map(|rule| format!("`{}`", rule.name))
        };
        let refusing: BTreeSet<String> = refusing.filter_map(name).collect();
        if !refusing.is_empty() && decision.degraded_by.is_none() && decision.origin != Origin::Grant {
            let names: Vec<String> = refusing.into_iter().collect();
            write!(f, "; {} would deny it if enforced", names.join(", "))?;
        }
        f.write_str(".")
    }
}

/// Returns the rules that treat the request in another way than before.
fn changes(before: &CheckExplanation, after: &CheckExplanation) -> Vec<ExplainedChange> {
    let treatments = |explanation: &CheckExplanation| -> BTreeMap<String, Vec<String>> {
        let mut by_name: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for rule in &explanation.matching.rules {
            let treatment = match &rule.result {
                RuleResult::NoMatch => continue,
                RuleResult::Limited(limits) => {
                    limits.iter().map(|(limit, _)| limit.clone()).collect::<Vec<_>>().join(", ")
                }
                RuleResult::Unlimited => "unlimited".to_owned(),
                RuleResult::Exempt => "no limit for this caller".to_owned(),
                RuleResult::Replaced(by) => format!("replaced by {by}"),
            };
            by_name.entry(rule.name.clone()).or_default().push(treatment);
        }
        by_name
    };
    let (old, new) = (treatments(before), treatments(after));
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let text = |all: &BTreeMap<String, Vec<String>>, name: &String| {
        all.get(name).map_or_else(|| "no match".to_owned(), |treatment| treatment.join("; "))
    };
    let each = names.into_iter().map(|name| ExplainedChange {
        rule: name.clone(),
        before: text(&old, name),
        after: text(&new, name),
    });
    each.filter(|change| change.before != change.after).collect()
}
