//! The limits that a matched rule adds to a plan: overrides, tiers, shards, and what the rule replaces.

use super::cost::{CostResolver, own_cost};
use super::find;
use crate::counter_shards::next_shard;
use crate::overrides::set_for;
use crate::plan::{LimitOrigin, MatchKind, MatchedLimit, Plan};
use crate::rule::{CostFrom, Role, Rule, RuleLimit};
use std::ops::Range;
use tollgate_core::{Cost, KeyPart};

/// What the limits of a matched rule have in common.
struct RuleMatch<'p> {
    limits: &'p [RuleLimit],
    /// Whether the rule is not enforced for this caller.
    counts_only: bool,
    cost: Cost,
    /// Values of the counter keys, as a range of the plan's parts.
    parts: Range<usize>,
    /// The shard to charge, its position in the round, and where its name is among the parts.
    shard: (u16, u16, u16),
}

/// Adds the limits of one rule, whose values are the plan's parts at `path`.
#[inline(always)]
pub(super) fn push_limits<'p>(
    plan: &mut Plan<'p>,
    rule: &'p Rule,
    tier: Option<&str>,
    path: Range<usize>,
    look: &CostResolver<'_, 'p>,
    descriptor: u16,
) -> MatchKind {
    if !rule.is_plain || !plan.quotas.is_empty() {
        return push_resolved(plan, rule, tier, path, look, descriptor);
    }
    let matched = RuleMatch {
        limits: &rule.limits.limits,
        counts_only: false,
        cost: look.cost,
        parts: path,
        shard: (0, 0, 0),
    };
    // No server allows a request to have 65,536 values.
    let Some(parts) = matched.short_parts() else { return MatchKind::None };
    for limit in matched.limits {
        plan.limits.push(matched.limit(rule, limit, limit.cost_for(look.cost), parts, descriptor));
    }
    MatchKind::Limited
}

/// Adds the limits of a rule that is not plain. Apart, so that a plain one is added by a loop without what it does not have.
#[inline(never)]
fn push_resolved<'p>(
    plan: &mut Plan<'p>,
    rule: &'p Rule,
    tier: Option<&str>,
    path: Range<usize>,
    look: &CostResolver<'_, 'p>,
    descriptor: u16,
) -> MatchKind {
    let matched = match resolve(plan, rule, tier, path, *look) {
        Ok(matched) => matched,
        Err(uncharged) => return uncharged,
    };
    let Some(parts) = matched.short_parts() else { return MatchKind::None };
    for limit in matched.limits {
        let cost = match &limit.cost {
            None => matched.cost,
            Some(own) => own_cost(plan, limit.role.is_live() && !matched.counts_only, own, *look),
        };
        plan.limits.push(matched.limit(rule, limit, limit.cost_for(cost), parts, descriptor));
    }
    MatchKind::Limited
}

impl<'p> RuleMatch<'p> {
    /// Returns the range of its parts as a plan has it; `None` if there are too many.
    #[inline]
    fn short_parts(&self) -> Option<(u16, u16)> {
        u16::try_from(self.parts.start).ok().zip(u16::try_from(self.parts.end).ok())
    }

    /// Returns one of its limits, with this cost.
    #[inline(always)]
    fn limit(
        &self,
        rule: &'p Rule,
        limit: &'p RuleLimit,
        cost: Cost,
        parts: (u16, u16),
        descriptor: u16,
    ) -> MatchedLimit<'p> {
        let (shard, position, shard_at) = self.shard;
        let role = if self.counts_only && limit.role.is_live() { Role::Unenforced } else { limit.role };
        MatchedLimit {
            rule: Some(rule),
            limit: match limit.id {
                RuleLimit::NO_ID => LimitOrigin::Override(limit),
                _ => LimitOrigin::Rule(limit),
            },
            parts,
            shard,
            shard_at,
            position,
            remaining: None,
            cost,
            descriptor,
            enforcement: rule.enforcement[role as usize],
            role,
        }
    }
}

/// Resolves what a plain rule does not have: overrides, tiers, a share of callers, a cost of its own, shards. Returns the kind of match if
/// nothing is charged.
fn resolve<'p>(
    plan: &mut Plan<'p>,
    rule: &'p Rule,
    tier: Option<&str>,
    path: Range<usize>,
    look: CostResolver<'_, 'p>,
) -> Result<RuleMatch<'p>, MatchKind> {
    let set = set_for(plan.quotas, rule, tier);
    let limits = &set.limits[..];
    if limits.is_empty() {
        return Err(if set.unlimited { MatchKind::Unlimited } else { MatchKind::Exempt });
    }
    let counts_only = rule.enforce.as_ref().is_some_and(|enforce| {
        let caller = plan.parts[path.clone()].get(enforce.part);
        caller.is_some_and(|caller| !enforce.contains(caller))
    });
    let cost = rule.resolve_cost(look.cost, look.attributes).unwrap_or_else(|| {
        if let CostFrom::Attribute(name) = &rule.cost
            && !counts_only
            && limits.iter().any(|limit| limit.role.is_live() && limit.cost.is_none())
        {
            plan.malformed_cost = Some(name);
        }
        look.cost
    });
    let mut matched = RuleMatch { limits, counts_only, cost, parts: path.clone(), shard: (0, 0, 0) };
    let first = plan.shard.filter(|_| rule.shard_by.is_some());
    let home = rule.home();
    if rule.split.is_none() && first.is_none() && home.is_none() {
        return Ok(matched);
    }
    let start = plan.parts.len();
    plan.parts.extend(first);
    if let Some(split) = rule.split {
        plan.is_split = true;
        let (shard, position) = next_shard(split, rule.id, plan.parts[path.clone()].iter(), cost);
        matched.shard = (shard, position, u16::from(first.is_some()));
        plan.parts.push(KeyPart::Text(rule.shard_names()[usize::from(shard)]));
    }
    repeat_parts(plan, path);
    if let Some(attribute) = home {
        // Present in every key, so that the last value is always the home.
        plan.parts.push(KeyPart::Text(rule.known_home(find(look.attributes, attribute))));
    }
    matched.parts = start..plan.parts.len();
    Ok(matched)
}

/// Adds the parts at `path` once more.
pub(super) fn repeat_parts(plan: &mut Plan<'_>, path: Range<usize>) {
    for at in path {
        let part = plan.parts[at];
        plan.parts.push(part);
    }
}

/// Removes the matched rules that other matched rules replace, in any order. Unlimited matches stay unlimited.
#[cold]
pub(super) fn drop_replaced(plan: &mut Plan<'_>, replacing: &[&Rule]) {
    let replaced = |rule: Option<&Rule>| {
        rule.is_some_and(|rule| {
            rule.has_explicit_name && replacing.iter().any(|other| other.replaces.contains(&rule.name))
        })
    };
    plan.limits.retain(|matched| !replaced(matched.rule));
    for (matched, rule) in &mut plan.matches {
        if *matched == MatchKind::Limited && replaced(*rule) {
            (*matched, *rule) = (MatchKind::None, None);
        }
    }
}
