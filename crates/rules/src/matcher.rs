//! Rule matcher: finds the limits that a request matches, by attributes or by descriptors.
//!
//! A set of attributes matches every path whose keys it has, parents and children alike. An RLS descriptor matches the
//! one node at which its last entry ends. At each level and for each key, both prefer the exact value, then wildcards
//! in the order of the file, then the key alone, and never backtrack.

mod all;
mod attributes;
mod cost;
mod inline;
mod limits;

use crate::fleet_match::{FleetMatch, FleetStanding};
use crate::overload::Overload;
use crate::overrides::general_tier;
use crate::plan::{Attributes, Descriptor, MatchKind, Plan, PlanParts};
use crate::rule::{DescriptorMatch, Rule};
use crate::ruleset::Domain;
use crate::sensitivity::may_be_secret;
use crate::tree::{GLOBAL, TreeNode, ValueTest};
use attributes::{AttributeMatcher, Matches};
use cost::CostResolver;
use limits::{drop_replaced, push_limits};
use smallvec::SmallVec;
use tollgate_core::{Cost, KeyPart, is_same_name};

/// Returns the value of a key; the first, if it occurs twice. The value of `global` never comes from the request.
#[inline]
pub(crate) fn find<'p>(attributes: &Attributes<'p>, key: &str) -> Option<&'p str> {
    if key == GLOBAL.0 { Some(GLOBAL.1) } else { find_attribute(attributes, key) }
}

/// Returns the value of a key other than `global`.
#[inline]
pub(crate) fn find_attribute<'p>(attributes: &Attributes<'p>, key: &str) -> Option<&'p str> {
    attributes.iter().find(|(name, _)| is_same_name(name, key)).map(|(_, value)| *value)
}

impl Domain {
    /// Returns the limits that a request with these attributes matches, in the order of the file. A cost of zero is a
    /// peek.
    #[inline]
    #[must_use]
    pub fn plan<'p>(&'p self, request: &'p Attributes<'p>, cost: Cost) -> Plan<'p> {
        let mut plan = Plan::default();
        self.plan_into(request, cost, &mut plan);
        plan
    }

    /// Like [`Domain::plan`], but writes into a caller-supplied plan, because plans are expensive to move.
    #[inline(always)]
    pub fn plan_into<'p>(&'p self, request: &'p Attributes<'p>, cost: Cost, plan: &mut Plan<'p>) {
        if self.depends_on_tier {
            plan.tier = general_tier(plan.quotas).or_else(|| find(request, &self.tier_key));
        }
        if let Some(attribute) = &self.shard_by {
            plan.shard = find(request, attribute).map(|value| value_part(may_be_secret(attribute), value));
        }
        let mut found = Matches::new(plan);
        AttributeMatcher::new(self, request, cost).match_tree(&mut found);
        let Matches { ref mut plan, uncharged: quiet, ref replacing } = found;
        if plan.limits.len() > 1 && !plan.limits.is_sorted_by_key(|matched| matched.rule.map(|rule| rule.id))
        {
            plan.limits.sort_by_key(|matched| matched.rule.map(|rule| rule.id));
        }
        if self.replaces && !replacing.is_empty() {
            drop_replaced(plan, replacing);
        }
        if let Some(overload) = &self.overload {
            self.push_fleet(overload, cost, plan, |key| find(request, key));
        }
        plan.matches.push(match plan.limits.first() {
            Some(matched) => (MatchKind::Limited, matched.rule),
            None => quiet,
        });
    }

    /// Returns the limits that each descriptor matches. Zero hits count as one, unless a descriptor itself specifies
    /// zero.
    #[inline]
    #[must_use]
    pub fn plan_descriptors<'p>(&'p self, descriptors: &'p [Descriptor<'p>], hits: Cost) -> Plan<'p> {
        let mut plan = Plan::default();
        self.plan_descriptors_into(descriptors, hits, &mut plan);
        plan
    }

    /// Like [`Domain::plan_descriptors`], but writes into a caller-supplied plan.
    #[inline(never)]
    pub fn plan_descriptors_into<'p>(
        &'p self,
        descriptors: &'p [Descriptor<'p>],
        hits: Cost,
        plan: &mut Plan<'p>,
    ) {
        if self.depends_on_tier {
            plan.tier = general_tier(plan.quotas);
        }
        if let Some(attribute) = &self.shard_by {
            let value = descriptors.iter().find_map(|descriptor| find(descriptor.entries, attribute));
            plan.shard = value.map(|value| value_part(may_be_secret(attribute), value));
        }
        if let Some(overload) = &self.overload {
            let cost = request_cost(descriptors, hits);
            let value = |key: &str| descriptors.iter().find_map(|one| find(one.entries, key));
            self.push_fleet(overload, cost, plan, value);
        }
        if self.matching == DescriptorMatch::All {
            return self.plan_all(descriptors, hits, plan);
        }
        for (i, descriptor) in descriptors.iter().enumerate() {
            let i = u16::try_from(i).unwrap_or(u16::MAX);
            let cost = descriptor.cost(hits);
            if self.depends_on_tier && plan.tier.is_none() {
                plan.tier = find(descriptor.entries, &self.tier_key);
            }
            let matched = match descriptor.limit {
                Some(limit) => self.inline_limit(descriptor, limit, cost, i, plan),
                None => self.descriptor(descriptor, cost, i, plan),
            };
            plan.matches.push(matched);
        }
        if self.replaces {
            let replacing: SmallVec<[&Rule; 4]> = plan.matches.iter().filter_map(|(_, rule)| *rule).collect();
            drop_replaced(plan, &replacing);
        }
    }

    /// Adds the limits of the fleet's capacity for the request's priority.
    #[cold]
    fn push_fleet<'p>(
        &'p self,
        overload: &'p Overload,
        cost: Cost,
        plan: &mut Plan<'p>,
        value: impl Fn(&str) -> Option<&'p str>,
    ) {
        let Some(fleet) = &overload.fleet else { return };
        let rule = &self.rules[fleet.rule as usize];
        let look = &CostResolver { cost, attributes: &[] };
        let before = plan.limits.len();
        let parts = plan.parts.len();
        push_limits(plan, rule, None, parts..parts, look, 0);
        let priority = overload.priority_of(&value);
        plan.limits.truncate(before + fleet.charged[priority.index()]);
        let share = match (&fleet.shares, &overload.fairness) {
            (Some(shares), Some(fairness)) => {
                // As the gates of upstreams do: requests that name no tenant have no guarantee of the kind `each`.
                let tenant = value(&fairness.by);
                let tier =
                    plan.quotas.iter().find_map(|quota| quota.tier()).or_else(|| value(&self.tier_key));
                let has_share = |at: &usize| tenant.is_some() || !fairness.tiers[*at].is_each;
                let tier = overload.tier_index(tier).filter(has_share);
                (&self.rules[shares.rule as usize], tenant, tier)
            }
            // A capacity that only counts is charged apart, as it would be if it were enforced.
            _ if overload.shadow => (rule, None, None),
            _ => return,
        };
        let (rule, tenant, tier) = share;
        plan.fleet = Some(FleetMatch::new(&self.name, overload, rule, (tenant, tier), priority));
        if cost.is_refund() {
            plan.push_claim(FleetStanding::Guaranteed);
            plan.push_claim(FleetStanding::Reserved);
        }
    }

    fn descriptor<'p>(
        &'p self,
        descriptor: &Descriptor<'p>,
        cost: Cost,
        i: u16,
        plan: &mut Plan<'p>,
    ) -> (MatchKind, Option<&'p Rule>) {
        let start = plan.parts.len();
        let Some((node, tier)) = self.walk(descriptor.entries, &mut plan.parts) else {
            plan.parts.truncate(start);
            return (MatchKind::None, None);
        };
        let path = start..plan.parts.len();
        let tier = general_tier(plan.quotas).or(tier);
        match node.rule {
            Some(id) => {
                let rule = &self.rules[id as usize];
                let look = &CostResolver { cost, attributes: descriptor.entries };
                (push_limits(plan, rule, tier, path, look, i), Some(rule))
            }
            None => (MatchKind::None, None),
        }
    }

    /// Returns the node at which a descriptor's last entry ends, and the tier if an entry for it follows. Adds the
    /// values on the way to `path`.
    fn walk<'p>(
        &'p self,
        entries: &'p Attributes<'p>,
        path: &mut PlanParts<'p>,
    ) -> Option<(&'p TreeNode, Option<&'p str>)> {
        let (mut node, mut tier) = (&self.tree[0], None);
        for (at, (key, value)) in entries.iter().enumerate() {
            if let Some(next) = self.next(node, key, value) {
                node = &self.tree[next as usize];
                push_part(path, node, value);
            } else if at + 1 == entries.len() && *key == self.tier_key && self.has_tiers(node) {
                tier = Some(*value);
            } else {
                return None;
            }
        }
        Some((node, tier))
    }

    /// Returns the child node that an entry matches.
    pub(crate) fn next(&self, node: &TreeNode, key: &str, value: &str) -> Option<u32> {
        let index = node.children.key(key)?;
        index.specific(value).or_else(|| index.network(value)).or(index.any)
    }

    fn has_tiers(&self, node: &TreeNode) -> bool {
        node.rule.is_some_and(|id| !self.rules[id as usize].tiers.is_empty())
    }
}

/// Returns the cost of a request as a whole: it is a peek only if all its descriptors are, and a refund if none is charged.
fn request_cost(descriptors: &[Descriptor<'_>], hits: Cost) -> Cost {
    let costs = || descriptors.iter().map(|descriptor| descriptor.cost(hits));
    let charged = costs().find(|cost| !cost.is_peek() && !cost.is_refund());
    charged.or_else(|| costs().find(|cost| cost.is_refund())).or_else(|| costs().next()).unwrap_or(hits)
}

/// Adds the part that a value adds to a counter key, if the rule does not fix the value. Returns `false` if the node is for
/// addresses and the value is none. Written in place in each case: a part that is first built elsewhere is read again
/// before its bytes have left the processor's store buffer, which takes as long as the rest of the visit.
#[inline(always)]
fn push_part<'p>(parts: &mut PlanParts<'p>, node: &TreeNode, value: &'p str) -> bool {
    match &node.element.test {
        ValueTest::Any | ValueTest::Like(_) => {
            parts.push(value_part(node.is_secret, value));
            true
        }
        other => push_other_part(parts, other, value),
    }
}

/// Adds the part of a value that is not a part as it is. Apart, because one test of the usual case is faster than a table.
#[inline(never)]
fn push_other_part(parts: &mut PlanParts<'_>, test: &ValueTest, value: &str) -> bool {
    let ValueTest::Network(prefix) = test else { return true };
    let network = prefix.network(value);
    parts.extend(network);
    network.is_some()
}

#[inline]
pub(crate) const fn value_part(is_secret: bool, value: &str) -> KeyPart<'_> {
    if is_secret { KeyPart::Secret(value) } else { KeyPart::Text(value) }
}
