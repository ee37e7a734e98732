//! Folds the outcomes of a request into one decision: the most restrictive wins.
//!
//! Pure: a plan and its outcomes in, an answer out, written in place: it is the largest thing on the path of a request.
//! A denial is named after the rule of the highest `priority`, then after the one that lasts longest; the time to come
//! back is the longest that any of them asks for, since before that the request cannot pass.

use crate::decision::{
    DecidedBy, DecisionDetails, DecisionVerdict, DescriptorStatus, LimitRef, LimitStatus, Origin,
};
use tollgate_core::{Admission, Outcome, Outcomes, TimeDelta, Verdict};
use tollgate_rules::{Action, LimitOrigin, MatchedLimit, Plan, Role, RuleLimit, SoftAction};

pub(crate) fn decided_by(matched: &MatchedLimit<'_>) -> DecidedBy {
    matched.rule.map_or(DecidedBy::Inline, |rule| DecidedBy::Rule(rule.id))
}

/// Whether a denial by this hit turns the request away; a quota's does so only together with all others.
pub(crate) fn decides(matched: &MatchedLimit<'_>) -> bool {
    matched.limit.role.is_enforced(matched.rule.map_or(Action::Reject, |rule| rule.action))
}

#[inline]
pub(crate) fn fold(plan: &Plan<'_>, outcomes: &Outcomes, folded: &mut DecisionDetails) {
    folded.origin = Origin::Store;
    let mut delay = TimeDelta::ZERO;
    let mut denials = false;
    for (matched, outcome) in plan.limits.iter().zip(&outcomes.per_charge) {
        let mut outcome = *outcome;
        if matched.limit.shards.is_some() {
            outcome.remaining = matched.remaining_of_whole(&outcome);
        }
        push_status(folded, matched, outcome);
        match outcome.verdict {
            Verdict::Allowed { delay: TimeDelta::ZERO } | Verdict::Unknown => {}
            Verdict::Allowed { delay: own } if decides(matched) => delay = delay.max(own),
            Verdict::Allowed { .. } => {}
            Verdict::Denied { .. } => {
                denials = true;
                if matched.limit.role == Role::Live && !decides(matched) {
                    folded.degraded_by.get_or_insert(decided_by(matched));
                }
            }
        }
        if let Some(soft) = matched.limit.soft
            && matched.limit.role == Role::Live
            && outcome.verdict != Verdict::Unknown
            && matched.limit.limit.capacity().saturating_sub(outcome.remaining) > soft.threshold
        {
            let mark = match soft.action {
                SoftAction::Warn => &mut folded.warned_by,
                SoftAction::Degrade => &mut folded.degraded_by,
            };
            mark.get_or_insert(decided_by(matched));
        }
    }
    folded.verdict = DecisionVerdict::Allowed { delay };
    if denials && is_denied(plan, outcomes) {
        deny(plan, outcomes, folded);
    }
}

/// The limits that were met, where nobody answers for any.
#[cold]
pub(crate) fn push_unknown(plan: &Plan<'_>, details: &mut DecisionDetails) {
    plan.limits.iter().for_each(|matched| push_status(details, matched, Outcome::UNKNOWN));
}

/// Names the denial, and says when to come back.
#[cold]
fn deny(plan: &Plan<'_>, outcomes: &Outcomes, folded: &mut DecisionDetails) {
    let pairs = plan.limits.iter().zip(&outcomes.per_charge);
    let denying = pairs.filter(|(matched, outcome)| decides(matched) && outcome.verdict.is_denied());
    let named = denying.clone().reduce(|best, next| if rank(next) > rank(best) { next } else { best });
    folded.denied_by = named.map(|(matched, _)| decided_by(matched));
    let waits = denying.filter_map(|(_, outcome)| match outcome.verdict {
        Verdict::Denied { retry_after } => Some(retry_after),
        Verdict::Allowed { .. } | Verdict::Unknown => None,
    });
    // One that can never pass outlasts all others.
    let retry_after = waits.reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b))).flatten();
    folded.verdict = DecisionVerdict::Denied { retry_after };
}

#[inline]
fn push_status(folded: &mut DecisionDetails, matched: &MatchedLimit<'_>, outcome: Outcome) {
    let limit = match &matched.limit {
        LimitOrigin::Rule(limit) => LimitRef::Rule(limit.id),
        LimitOrigin::Inline(_) | LimitOrigin::Override(_) => {
            folded.inline_limits.push(RuleLimit::clone(&matched.limit));
            LimitRef::Inline(u16::try_from(folded.inline_limits.len() - 1).unwrap_or(u16::MAX))
        }
    };
    folded.limits.push(LimitStatus {
        outcome,
        rule: matched.rule.map(|rule| rule.id),
        limit,
        descriptor: matched.descriptor,
        role: matched.limit.role,
    });
}

/// The store refuses on behalf of required and alternative charges; where all are independent (the Envoy profile), the
/// same rule is applied to what each said.
pub(crate) fn is_denied(plan: &Plan<'_>, outcomes: &Outcomes) -> bool {
    if outcomes.admission == Admission::Denied {
        return true;
    }
    let (mut quotas, mut over) = (0, 0);
    for (matched, outcome) in plan.limits.iter().zip(&outcomes.per_charge) {
        if !decides(matched) {
            continue;
        }
        match matched.limit.role {
            Role::Quota => {
                quotas += 1;
                over += usize::from(outcome.verdict.is_denied());
            }
            _ if outcome.verdict.is_denied() => return true,
            _ => {}
        }
    }
    quotas > 0 && quotas == over
}

fn rank((matched, outcome): (&MatchedLimit<'_>, &Outcome)) -> (i32, TimeDelta) {
    let lasts = match outcome.verdict {
        Verdict::Denied { retry_after } => retry_after.unwrap_or(TimeDelta::MAX),
        Verdict::Allowed { .. } | Verdict::Unknown => TimeDelta::ZERO,
    };
    (matched.rule.map_or(0, |rule| rule.priority), lasts)
}

/// One status for each descriptor of the request.
pub(crate) fn descriptors(plan: &Plan<'_>, details: &mut DecisionDetails) {
    for (matched, rule) in &plan.matches {
        details.descriptors.push(DescriptorStatus { matched: *matched, rule: rule.map(|rule| rule.id) });
    }
}
