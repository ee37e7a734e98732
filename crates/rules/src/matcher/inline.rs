//! Inline limits: limits that arrive with a descriptor instead of coming from a rule.

use super::value_part;
use crate::plan::{Attributes, Descriptor, LimitOrigin, MatchKind, MatchedLimit, Plan, PlanParts};
use crate::rule::{Profile, Role, Rule, RuleLimit};
use crate::ruleset::Domain;
use crate::scope::Kind;
use crate::sensitivity::may_be_secret;
use crate::tree::ValueTest;
use crate::unit::Unit;
use tollgate_core::{Algorithm, Cost, KeyPart, LimitSpec, Rate, TimeDelta};

impl Domain {
    /// Returns the counter that envoyproxy/ratelimit uses for a descriptor whatever its limit: the configured rule's,
    /// if that has the same unit. That service's key has the entries and the window's start, so only a pattern with one
    /// counter (`share_threshold`) and a split one have others.
    fn shared_counter<'p>(
        &'p self,
        entries: &'p Attributes<'p>,
        unit: Option<Unit>,
    ) -> Option<(&'p tollgate_core::Scope, PlanParts<'p>)> {
        let mut path = PlanParts::new();
        let (node, None) = self.walk(entries, &mut path)? else { return None };
        let rule = &self.rules[node.rule? as usize];
        let mut above = node;
        loop {
            if matches!(above.element.test, ValueTest::Shared(_)) {
                return None;
            }
            if above.parent == 0 {
                break;
            }
            above = &self.tree[above.parent as usize];
        }
        let same =
            |limit: &&RuleLimit| limit.unit.is_some() && limit.unit == unit && limit.role != Role::Candidate;
        let limit = rule.all_limits().find(same).filter(|_| rule.split.is_none())?;
        Some((&limit.scope, path))
    }

    /// Plans a limit that arrives with the request. The tree has no say in it; under `profile: envoy` it has the
    /// counter.
    pub(super) fn inline_limit<'p>(
        &'p self,
        descriptor: &Descriptor<'p>,
        (count, length): (u32, TimeDelta),
        cost: Cost,
        i: u16,
        plan: &mut Plan<'p>,
    ) -> (MatchKind, Option<&'p Rule>) {
        let unit = Unit::from_length(length);
        let quota = Rate::per(u64::from(count), length);
        let by = |algorithm| LimitSpec::new(algorithm, quota.clone());
        let spec = match self.profile {
            Profile::Envoy => by(Algorithm::FixedWindow).count_denied(),
            Profile::Native => by(self.algorithm.unwrap_or(self.class.algorithm())),
        };
        // A log of millions of units is not kept; a strict window has the same bound in any span.
        let built = spec.build().or_else(|_| by(Algorithm::StrictWindow).build());
        let Ok(limit) = built.or_else(|_| by(Algorithm::FixedWindow).build()) else {
            return (MatchKind::None, None);
        };
        let configured = match self.profile {
            Profile::Envoy => self.shared_counter(descriptor.entries, unit),
            Profile::Native => None,
        };
        let (scope, values) = match configured {
            Some((scope, values)) => (scope.clone(), values),
            None => {
                let has_shard =
                    descriptor.entries.first().is_some_and(|(key, _)| Some(*key) == self.shard_by());
                let values =
                    descriptor.entries.iter().map(|(key, value)| value_part(may_be_secret(key), value));
                let shard = plan.shard.filter(|_| !has_shard);
                let per_second = self.per_second_store.as_deref().filter(|_| unit == Some(Unit::Second));
                let store = per_second.or(self.store.as_deref());
                (
                    self.scope.in_store(store).inline(descriptor.entries).limit(
                        Kind::Inline,
                        &limit,
                        None,
                        None,
                    ),
                    shard.into_iter().chain(values).collect(),
                )
            }
        };
        let Some(parts) = push_parts(plan, &values) else {
            return (MatchKind::None, None);
        };
        let limit = RuleLimit::new(limit, scope, unit, Role::Live, None);
        let enforcement = MatchedLimit::enforcement(Role::Live, crate::rule::Action::Reject, self.coupling);
        plan.limits.push(MatchedLimit {
            rule: None,
            limit: LimitOrigin::Inline(Box::new(limit)),
            parts,
            shard: 0,
            shard_at: 0,
            position: 0,
            remaining: None,
            cost,
            descriptor: i,
            enforcement,
            role: Role::Live,
        });
        (MatchKind::Limited, None)
    }
}

/// Returns `None` beyond 65,535 values, which no protocol server allows.
#[inline]
fn push_parts<'p>(plan: &mut Plan<'p>, parts: &[KeyPart<'p>]) -> Option<(u16, u16)> {
    let start = u16::try_from(plan.parts.len()).ok()?;
    let end = u16::try_from(plan.parts.len() + parts.len()).ok()?;
    plan.parts.extend_from_slice(parts);
    Some((start, end))
}
