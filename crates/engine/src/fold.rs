//! Folds the outcomes of a request into one decision: the most restrictive wins.
//!
//! A pure function of a plan and its outcomes. The decision is written in place because it is the largest value on the
//! request path. A denial is attributed to the rule with the highest `priority`, then to the one with the longest
//! retry-after. The retry-after is the longest of all denying limits, because the request cannot pass before that.

use crate::decision::{
    DecidedBy, DecisionDetails, DecisionVerdict, DescriptorStatus, LimitRef, LimitStatus, Origin,
};
use smallvec::smallvec;
use tollgate_core::{Admission, Charged, Outcome, Outcomes, TimeDelta, Timestamp, Verdict};
use tollgate_rules::{LimitOrigin, MatchedLimit, Plan, Role, RuleLimit, SoftAction};

/// Bounds of the time after which a request that was shed may be repeated.
const MIN_SHED: TimeDelta = TimeDelta::from_secs(1);
const MAX_SHED: TimeDelta = TimeDelta::from_secs(10);

pub(crate) fn decided_by(matched: &MatchedLimit<'_>) -> DecidedBy {
    DecidedBy::from_rule(matched.rule.map(|rule| rule.id))
}

/// Returns whether a denial by this limit denies the request; quota limits do so only if all of them deny.
pub(crate) fn decides(matched: &MatchedLimit<'_>) -> bool {
    matched.role.is_enforced_by(matched.rule)
}

#[inline(always)]
pub(crate) fn fold(plan: &Plan<'_>, outcomes: &Outcomes, folded: &mut DecisionDetails) {
    begin(outcomes.at, folded);
    let mut denials = false;
    for (matched, outcome) in plan.limits.iter().zip(&outcomes.per_charge) {
        denials |= fold_one(matched, *outcome, outcomes.admission, folded);
    }
    if denials && is_denied(plan, outcomes) {
        deny(plan, outcomes, folded);
    }
}

/// The same, of a plan of one limit.
#[inline(always)]
pub(crate) fn fold_only(
    plan: &Plan<'_>,
    matched: &MatchedLimit<'_>,
    charged: Charged,
    folded: &mut DecisionDetails,
) {
    begin(charged.at, folded);
    // No other limit denies it.
    if fold_one(matched, charged.outcome, Admission::Admitted, folded) {
        deny_only(plan, matched, folded);
    }
}

/// Denies the request if its only limit, whose status is there already, denies it.
#[cold]
#[inline(never)]
fn deny_only(plan: &Plan<'_>, matched: &MatchedLimit<'_>, folded: &mut DecisionDetails) {
    let Some(LimitStatus { outcome, .. }) = folded.limits.last() else { return };
    let admission = Outcomes::admission(std::iter::once((matched.enforcement, outcome)));
    let outcomes = Outcomes { admission, at: folded.at, per_charge: smallvec![*outcome] };
    if is_denied(plan, &outcomes) {
        deny(plan, &outcomes, folded);
    }
}

/// Begins a decision by outcomes of this time.
#[inline(always)]
fn begin(at: Timestamp, folded: &mut DecisionDetails) {
    folded.origin = Origin::Store;
    folded.at = at;
    folded.verdict = DecisionVerdict::Allowed { delay: TimeDelta::ZERO };
}

/// Folds one outcome, except for a denial of the request. Returns whether it denies. What few outcomes need takes no reference
/// to this one: it stays in the processor's registers until it is written into the decision.
#[inline(always)]
fn fold_one(
    matched: &MatchedLimit<'_>,
    outcome: Outcome,
    admission: Admission,
    folded: &mut DecisionDetails,
) -> bool {
    let Outcome { verdict, remaining, next_after, reset_after } = outcome;
    let outcome = Outcome { verdict, remaining, next_after, reset_after };
    let outcome = match &matched.limit.shards {
        None => outcome,
        Some(_) => outcome.with_remaining(matched.remaining_of_whole(outcome, admission)),
    };
    push_status(folded, matched, outcome);
    if verdict == Verdict::ALLOWED && matched.limit.soft.is_none() {
        return false;
    }
    fold_effects(matched, folded);
    verdict.is_denied()
}

/// Folds what the last outcome does beside being shown: it delays the request, degrades it or warns. Apart, because few do.
#[inline(never)]
fn fold_effects(matched: &MatchedLimit<'_>, folded: &mut DecisionDetails) {
    let Some(LimitStatus { outcome, .. }) = folded.limits.last().copied() else { return };
    let Outcome { verdict, remaining, reset_after, .. } = outcome;
    match verdict {
        Verdict::Allowed { delay } if decides(matched) => {
            folded.verdict = DecisionVerdict::Allowed { delay: folded.delay().max(delay) };
        }
        Verdict::Denied { .. } if matched.role == Role::Live && !decides(matched) => {
            folded.degraded_by.get_or_insert(decided_by(matched));
        }
        Verdict::Allowed { .. } | Verdict::Denied { .. } | Verdict::Unknown => {}
    }
    if matched.role == Role::Live
        && verdict != Verdict::Unknown
        && let Some(action) = matched.limit.soft_action(remaining)
    {
        let mark = match action {
            SoftAction::Warn => &mut folded.warned_by,
            SoftAction::Degrade => &mut folded.degraded_by,
            SoftAction::Delay => {
                if let Some(soft) = matched.limit.soft
                    && verdict.is_allowed()
                    && !matched.cost.is_peek()
                {
                    let used = matched.limit.limit.capacity().saturating_sub(remaining);
                    delay(folded, soft.delay(used, reset_after));
                }
                return;
            }
        };
        mark.get_or_insert(decided_by(matched));
    }
}

/// Delays the request by its last limit, as if the store's outcome had.
fn delay(folded: &mut DecisionDetails, delay: TimeDelta) {
    let verdict = Verdict::Allowed { delay };
    folded.limits.last_mut().into_iter().for_each(|status| status.outcome.verdict = verdict);
    folded.verdict = DecisionVerdict::Allowed { delay: folded.delay().max(delay) };
}

/// Adds the matched limits with unknown outcomes, for when the store decided none of them.
#[cold]
pub(crate) fn push_unknown(plan: &Plan<'_>, details: &mut DecisionDetails) {
    plan.limits.iter().for_each(|matched| push_status(details, matched, Outcome::UNKNOWN));
}

/// Sets the denying rule and the retry-after.
#[cold]
#[inline(never)]
fn deny(plan: &Plan<'_>, outcomes: &Outcomes, folded: &mut DecisionDetails) {
    let pairs = plan.limits.iter().zip(&outcomes.per_charge);
    let denying = pairs.filter(|(matched, outcome)| decides(matched) && outcome.verdict.is_denied());
    let named = denying.clone().reduce(|best, next| if rank(next) > rank(best) { next } else { best });
    folded.denied_by = named.map(|(matched, _)| decided_by(matched));
    // Nothing is served, so nothing is served in a reduced form or with a warning.
    (folded.degraded_by, folded.warned_by) = (None, None);
    let is_shedding = |matched: &MatchedLimit<'_>| matched.rule.is_some_and(|rule| rule.is_shedding);
    let is_shed = named.is_some_and(|(matched, _)| is_shedding(matched));
    // When load ends is not known; a permit's lifetime or a bucket says nothing about it.
    let counted = denying.filter(|(matched, _)| is_shed || !is_shedding(matched));
    let waits = counted.filter_map(|(_, outcome)| match outcome.verdict {
        Verdict::Denied { retry_after } => Some(retry_after),
        Verdict::Allowed { .. } | Verdict::Unknown => None,
    });
    // A limit that can never allow the request outlasts all others.
    let retry_after = waits.reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b))).flatten();
    folded.verdict = DecisionVerdict::Denied { retry_after };
    if is_shed {
        let wait = retry_after.unwrap_or(MIN_SHED).clamp(MIN_SHED, MAX_SHED);
        folded.verdict = DecisionVerdict::Denied { retry_after: Some(wait) };
    }
}

#[inline]
fn push_status(folded: &mut DecisionDetails, matched: &MatchedLimit<'_>, outcome: Outcome) {
    let limit = match &matched.limit {
        LimitOrigin::Rule(limit) => LimitRef::Rule(limit.id),
        LimitOrigin::Inline(_) | LimitOrigin::Override(_) => push_limit(folded, &matched.limit),
    };
    folded.limits.push(LimitStatus {
        outcome,
        rule: matched.rule.map(|rule| rule.id),
        limit,
        descriptor: matched.descriptor,
        role: matched.role,
    });
}

/// Adds a limit that is not in the rule set. Apart, as all that few decisions need is here: the loop around it is short
/// enough for the processor's registers then.
#[inline(never)]
fn push_limit(folded: &mut DecisionDetails, limit: &RuleLimit) -> LimitRef {
    folded.inline_limits.push(limit.clone());
    LimitRef::Inline(u16::try_from(folded.inline_limits.len() - 1).unwrap_or(u16::MAX))
}

/// Returns whether the request is denied. The store decides for required and alternative charges; if all charges are
/// independent (the Envoy profile), the same rule is applied to their outcomes here.
#[inline(never)]
pub(crate) fn is_denied(plan: &Plan<'_>, outcomes: &Outcomes) -> bool {
    if outcomes.admission == Admission::Denied {
        return true;
    }
    let (mut quotas, mut over) = (0, 0);
    for (matched, outcome) in plan.limits.iter().zip(&outcomes.per_charge) {
        if !decides(matched) {
            continue;
        }
        match matched.role {
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

/// Adds one status per descriptor of the request.
#[inline]
pub(crate) fn descriptors(plan: &Plan<'_>, details: &mut DecisionDetails) {
    for (matched, rule) in &plan.matches {
        details.descriptors.push(DescriptorStatus { matched: *matched, rule: rule.map(|rule| rule.id) });
    }
}
