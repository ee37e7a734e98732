//! What is answered when the store is not: the policy of the rules that matched, never an error.
//!
//! The strictest policy of the deciding rules holds: if one of them fails closed, the request is turned away.

use crate::decision::{Answer, Origin, Ruling};
use crate::fold::by;
use tollgate_core::Span;
use tollgate_rules::{FailPolicy, OnError, Plan, Role};

/// When a caller turned away by a failing store should come back.
pub(crate) const RETRY: Span = Span::from_secs(1);

pub(crate) fn decide(plan: &Plan<'_>, answer: &mut Answer) {
    let closed = plan.hits.iter().find(|hit| {
        let policy = hit.rule.map(|rule| policy(&rule.on_error, plan.tier));
        matches!(hit.limit.role, Role::Live | Role::Quota) && policy == Some(FailPolicy::Closed)
    });
    match closed {
        Some(hit) => {
            answer.ruling = Ruling::Denied { retry_after: Some(RETRY) };
            answer.origin = Origin::FailClosed;
            answer.denied_by = Some(by(hit));
        }
        None => answer.origin = Origin::FailOpen,
    }
}

fn policy(on_error: &OnError, tier: Option<&str>) -> FailPolicy {
    match on_error {
        OnError::Open => FailPolicy::Open,
        OnError::Closed => FailPolicy::Closed,
        OnError::ByTier { tiers, otherwise } => {
            tier.and_then(|tier| tiers.get(tier)).copied().unwrap_or(*otherwise)
        }
    }
}
