//! Rule matcher: finds the limits that a request matches, by attributes or by descriptors.
//!
//! A set of attributes matches every path whose keys it has, parents and children alike. An RLS descriptor matches the
//! one node at which its last entry ends. At each level and for each key, both prefer the exact value, then wildcards
//! in the order of the file, then the key alone, and never backtrack.

mod all;

use crate::counter_shards::next_shard;
use crate::overrides::{general_tier, terms_for};
use crate::plan::{Attributes, Descriptor, LimitOrigin, MatchKind, MatchedLimit, Plan, PlanParts};
use crate::rule::{CostFrom, DescriptorMatch, Profile, Role, Rule, RuleLimit};
use crate::ruleset::Domain;
use crate::scope::Kind;
use crate::sensitivity::may_be_secret;
use crate::tree::{GLOBAL, KeyIndex, Level, TreeNode, ValueTest};
use crate::unit::Unit;
use smallvec::SmallVec;
use std::ops::Range;
use tollgate_core::{Algorithm, Cost, KeyPart, LimitSpec, Rate};

/// Returns the value of a key; the first, if it occurs twice. The value of `global` never comes from the request.
#[inline]
pub(crate) fn find<'p>(attributes: &Attributes<'p>, key: &str) -> Option<&'p str> {
    if key == GLOBAL.0 { Some(GLOBAL.1) } else { find_attribute(attributes, key) }
}

/// Returns the value of a key other than `global`.
#[inline]
fn find_attribute<'p>(attributes: &Attributes<'p>, key: &str) -> Option<&'p str> {
    attributes.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
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
    pub fn plan_into<'p>(&'p self, request: &'p Attributes<'p>, cost: Cost, plan: &mut Plan<'p>) {
        if self.depends_on_tier {
            plan.tier = general_tier(plan.quotas).or_else(|| find(request, &self.tier_key));
        }
        if let Some(attribute) = &self.shard_by {
            plan.shard = find(request, attribute).map(|value| value_part(may_be_secret(attribute), value));
        }
        let mut walk = AttributeMatcher::new(self, request, cost, plan);
        walk.match_level(&self.tree[0].children);
        let AttributeMatcher { uncharged: quiet, replacing, plan, .. } = walk;
        if plan.limits.len() > 1 && !plan.limits.is_sorted_by_key(|matched| matched.rule.map(|rule| rule.id))
        {
            plan.limits.sort_by_key(|matched| matched.rule.map(|rule| rule.id));
        }
        if !replacing.is_empty() {
            drop_replaced(plan, &replacing);
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
                let look = CostResolver { cost, attributes: descriptor.entries };
                (push_limits(plan, self.profile, rule, tier, path, look, i), Some(rule))
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

    /// Returns the counter that envoyproxy/ratelimit uses for a descriptor whatever its limit: the configured rule's,
    /// if that has the same unit. That service's key has the entries and the window's start, so only a pattern with one
    /// counter (`share_threshold`) and a split one have others.
    fn shared_counter<'p>(
        &'p self,
        entries: &'p Attributes<'p>,
        unit: Unit,
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
        let same = |limit: &&RuleLimit| limit.unit == Some(unit) && limit.role != Role::Candidate;
        let limit = rule.all_limits().find(same).filter(|_| rule.split.is_none())?;
        Some((&limit.scope, path))
    }

    /// Returns the child node that an entry matches.
    pub(crate) fn next(&self, node: &TreeNode, key: &str, value: &str) -> Option<u32> {
        let index = node.children.key(key)?;
        index.specific(value).or_else(|| index.network(value)).or(index.any)
    }

    fn has_tiers(&self, node: &TreeNode) -> bool {
        node.rule.is_some_and(|id| !self.rules[id as usize].tiers.is_empty())
    }

    /// Plans a limit that arrives with the request. The tree has no say in it; under `profile: envoy` it has the
    /// counter.
    fn inline_limit<'p>(
        &'p self,
        descriptor: &Descriptor<'p>,
        (count, unit): (u32, Unit),
        cost: Cost,
        i: u16,
        plan: &mut Plan<'p>,
    ) -> (MatchKind, Option<&'p Rule>) {
        let quota = Rate::per(u64::from(count), unit.length());
        let by = |algorithm| LimitSpec::new(algorithm, quota.clone());
        let spec = match self.profile {
            Profile::Envoy => by(Algorithm::FixedWindow).count_denied(),
            Profile::Native => by(self.algorithm),
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
                (
                    self.scope.in_store(self.store.as_deref()).inline(descriptor.entries).limit(
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
        let limit = RuleLimit::new(limit, scope, Some(unit), Role::Live, None);
        let enforcement = MatchedLimit::enforcement(Role::Live, crate::rule::Action::Reject, self.profile);
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

struct AttributeMatcher<'w, 'p> {
    domain: &'p Domain,
    request: &'w Attributes<'p>,
    cost: Cost,
    /// Index of the descriptor that is matched; zero for attributes.
    descriptor: u16,
    /// Number of attributes, from the first, whose keys may end a rule's path; the others only lead to it.
    ending: usize,
    /// Values of the nodes above, as a range of the plan's parts.
    path: Range<usize>,
    plan: &'w mut Plan<'p>,
    /// Strongest match that charges nothing.
    uncharged: (MatchKind, Option<&'p Rule>),
    /// Matched rules that replace others.
    replacing: SmallVec<[&'p Rule; 1]>,
}

impl<'w, 'p> AttributeMatcher<'w, 'p> {
    #[inline]
    fn new(domain: &'p Domain, request: &'w Attributes<'p>, cost: Cost, plan: &'w mut Plan<'p>) -> Self {
        Self {
            domain,
            request,
            cost,
            descriptor: 0,
            ending: usize::MAX,
            path: 0..0,
            plan,
            uncharged: (MatchKind::None, None),
            replacing: SmallVec::new(),
        }
    }

    fn match_level(&mut self, level: &'p Level) {
        if let Some(keys) = level.is_small() {
            for index in keys {
                let value =
                    if index.is_global { Some(GLOBAL.1) } else { find_attribute(self.request, &index.name) };
                if let Some(value) = value {
                    self.match_key(index, value);
                }
            }
            return;
        }
        for (i, (key, value)) in self.request.iter().enumerate() {
            let is_known = || self.request[..i].iter().any(|(other, _)| other == key);
            if let Some(index) = level.key(key)
                && *key != GLOBAL.0
                && !is_known()
            {
                self.match_key(index, value);
            }
        }
        if let Some(index) = level.key(GLOBAL.0) {
            self.match_key(index, GLOBAL.1);
        }
    }

    /// Visits the most specific rule for the value, and every network that contains it.
    #[inline]
    fn match_key(&mut self, index: &'p KeyIndex, value: &'p str) {
        if let (true, Some(node)) = (index.is_plain, index.any) {
            return self.visit(node, value);
        }
        if let Some(node) = index.specific(value).or(index.any) {
            self.visit(node, value);
        }
        for (_, node) in &index.networks {
            self.visit(*node, value);
        }
    }

    #[inline]
    fn visit(&mut self, id: u32, value: &'p str) {
        let node = &self.domain.tree[id as usize];
        let above = self.path.clone();
        let start = plan_end(self.plan, &above);
        if !push_part(&mut self.plan.parts, node, value) && matches!(node.element.test, ValueTest::Network(_))
        {
            return;
        }
        let path = start..self.plan.parts.len();
        if let Some(id) = node.rule
            && (self.ending == usize::MAX || self.may_end(&node.element.key))
        {
            let rule = &self.domain.rules[id as usize];
            let look = CostResolver { cost: self.cost, attributes: self.request };
            let tier = self.plan.tier;
            let matched =
                push_limits(self.plan, self.domain.profile, rule, tier, path.clone(), look, self.descriptor);
            if matches!(
                (matched, self.uncharged.0),
                (MatchKind::Exempt, MatchKind::None)
                    | (MatchKind::Unlimited, MatchKind::None | MatchKind::Exempt)
            ) {
                self.uncharged = (matched, Some(rule));
            }
            if !rule.is_plain && !rule.replaces.is_empty() {
                self.replacing.push(rule);
            }
        }
        if !node.children.is_empty() {
            self.path = path;
            self.match_level(&node.children);
            self.path = above;
        }
    }
}

/// Prepares the end of the plan's parts for one more after those at `path`. Returns where they begin: where they are,
/// if nothing follows them, else they are repeated.
#[inline]
fn plan_end(plan: &mut Plan<'_>, path: &Range<usize>) -> usize {
    let end = plan.parts.len();
    if path.end == end {
        return path.start;
    }
    repeat_parts(plan, path.clone());
    end
}

/// Adds the part that a value adds to a counter key. Returns `false` if it adds none, because the rule fixes the value,
/// or because it is not an address. Written in place in each case: a part that is first built elsewhere is read again
/// before its bytes have left the processor's store buffer, which takes as long as the rest of the visit.
#[inline]
fn push_part<'p>(parts: &mut PlanParts<'p>, node: &TreeNode, value: &'p str) -> bool {
    match &node.element.test {
        ValueTest::Any | ValueTest::Like(_) => parts.push(value_part(node.is_secret, value)),
        ValueTest::Exact(_) | ValueTest::Shared(_) => return false,
        ValueTest::Network(prefix) => match prefix.network(value) {
            Some(network) => parts.push(network),
            None => return false,
        },
    }
    true
}

#[inline]
const fn value_part(is_secret: bool, value: &str) -> KeyPart<'_> {
    if is_secret { KeyPart::Secret(value) } else { KeyPart::Text(value) }
}

/// Inputs from which a rule's cost is computed.
#[derive(Clone, Copy)]
struct CostResolver<'a> {
    cost: Cost,
    attributes: &'a Attributes<'a>,
}

impl Rule {
    /// Returns the cost of a request under this rule; `asked` is the cost that the request specifies. A peek stays a
    /// peek. A refund under an attribute cost uses `asked`: the attribute specified the units to take. `None` if the
    /// attribute is not a whole number.
    #[must_use]
    #[inline]
    pub fn resolve_cost(&self, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        if matches!(self.cost, CostFrom::Request) {
            Some(asked)
        } else {
            self.cost.resolve(asked, attributes)
        }
    }
}

impl CostFrom {
    /// Like [`Self::resolve`], for the cost of one limit of several: a correction is about what the request consumed, so
    /// that a fixed cost, such as one per request, stays counted.
    fn resolve_own(&self, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        match self {
            Self::Fixed(_) if asked.is_refund() => Some(Cost::PEEK),
            own => own.resolve(asked, attributes),
        }
    }

    #[inline(never)]
    fn resolve(&self, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        match self {
            Self::Request => Some(asked),
            Self::Fixed(_) if asked.is_peek() => Some(asked),
            Self::Fixed(units) if asked.is_refund() => Some(Cost::refund(*units)),
            Self::Fixed(units) => Some(Cost::new(*units)),
            Self::Attribute(name) => match find(attributes, name) {
                None => Some(asked),
                // What a peek or a refund does not use must be a number all the same.
                Some(value) if asked.is_peek() || asked.is_refund() => parse_units(value).map(|_| asked),
                Some(value) => parse_units(value).map(Cost::new),
            },
        }
    }
}

/// Parses the number in a cost attribute: digits alone, because every other spelling is somebody's mistake or trick.
fn parse_units(value: &str) -> Option<u64> {
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    value.parse().ok().filter(|_| is_number)
}

impl RuleLimit {
    /// Returns the units that this limit takes for a request; `asked` is the cost that the request specifies, and `None`
    /// means that the attribute which tells the cost is not a whole number.
    #[must_use]
    pub fn resolve_cost(&self, rule: &Rule, asked: Cost, attributes: &Attributes<'_>) -> Option<Cost> {
        let cost = match &self.cost {
            None => rule.resolve_cost(asked, attributes),
            Some(own) => own.resolve_own(asked, attributes),
        };
        cost.map(|cost| self.cost_for(cost))
    }

    /// Returns the units that this limit takes for a request of this cost: a request holds one permit whatever its
    /// cost, and gives one back.
    #[must_use]
    #[inline]
    pub fn cost_for(&self, cost: Cost) -> Cost {
        match self.limit.algorithm() {
            Algorithm::Concurrency if cost.is_peek() => cost,
            Algorithm::Concurrency if cost.is_refund() => Cost::refund(1),
            Algorithm::Concurrency => Cost::ONE,
            _ => cost,
        }
    }
}

/// What the limits of a matched rule have in common.
struct RuleMatch<'p> {
    limits: &'p [RuleLimit],
    /// Whether the limits come from the caller's quota.
    is_override: bool,
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
fn push_limits<'p>(
    plan: &mut Plan<'p>,
    profile: Profile,
    rule: &'p Rule,
    tier: Option<&str>,
    path: Range<usize>,
    look: CostResolver<'_>,
    descriptor: u16,
) -> MatchKind {
    let matched = if rule.is_plain && plan.quotas.is_empty() {
        RuleMatch {
            limits: &rule.limits.limits,
            is_override: false,
            counts_only: false,
            cost: look.cost,
            parts: path,
            shard: (0, 0, 0),
        }
    } else {
        match resolve(plan, rule, tier, path, look) {
            Ok(matched) => matched,
            Err(uncharged) => return uncharged,
        }
    };
    let RuleMatch { limits, is_override, counts_only, cost, parts, shard } = matched;
    let (shard, position, shard_at) = shard;
    // No server allows a request to have 65,536 values.
    let (Ok(start), Ok(end)) = (u16::try_from(parts.start), u16::try_from(parts.end)) else {
        return MatchKind::None;
    };
    for limit in limits {
        let cost = match &limit.cost {
            None => limit.cost_for(cost),
            Some(own) => limit.cost_for(own_cost(plan, limit.role.is_live() && !counts_only, own, look)),
        };
        let role = if counts_only && limit.role.is_live() { Role::Unenforced } else { limit.role };
        plan.limits.push(MatchedLimit {
            rule: Some(rule),
            limit: if is_override { LimitOrigin::Override(limit) } else { LimitOrigin::Rule(limit) },
            parts: (start, end),
            shard,
            shard_at,
            position,
            remaining: None,
            cost,
            descriptor,
            enforcement: MatchedLimit::enforcement(role, rule.action, profile),
            role,
        });
    }
    MatchKind::Limited
}

/// Resolves what a plain rule does not have: overrides, tiers, a share of callers, a cost of its own, shards. Returns the kind of match if
/// nothing is charged.
#[inline(never)]
fn resolve<'p>(
    plan: &mut Plan<'p>,
    rule: &'p Rule,
    tier: Option<&str>,
    path: Range<usize>,
    look: CostResolver<'_>,
) -> Result<RuleMatch<'p>, MatchKind> {
    let (agreed, own_tier) =
        if plan.quotas.is_empty() { (None, None) } else { terms_for(plan.quotas, rule.id) };
    if rule.unlimited && agreed.is_none() {
        return Err(MatchKind::Unlimited);
    }
    let limits = agreed.unwrap_or_else(|| rule.limits_for(own_tier.or(tier)));
    if limits.is_empty() {
        return Err(MatchKind::Exempt);
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
    let mut matched = RuleMatch {
        limits,
        is_override: agreed.is_some(),
        counts_only,
        cost,
        parts: path.clone(),
        shard: (0, 0, 0),
    };
    let first = plan.shard.filter(|_| rule.shard_by.is_some());
    if rule.split.is_none() && first.is_none() {
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
    matched.parts = start..plan.parts.len();
    Ok(matched)
}

/// Adds the parts at `path` once more.
fn repeat_parts(plan: &mut Plan<'_>, path: Range<usize>) {
    for at in path {
        let part = plan.parts[at];
        plan.parts.push(part);
    }
}

/// Returns the cost of a limit with its own source of it.
#[inline(never)]
fn own_cost<'p>(plan: &mut Plan<'p>, is_live: bool, own: &'p CostFrom, look: CostResolver<'_>) -> Cost {
    own.resolve_own(look.cost, look.attributes).unwrap_or_else(|| {
        if let (CostFrom::Attribute(name), true) = (own, is_live) {
            plan.malformed_cost = Some(name);
        }
        look.cost
    })
}

/// Returns `None` beyond 65,535 values, which no protocol server allows.
#[inline]
fn push_parts<'p>(plan: &mut Plan<'p>, parts: &[KeyPart<'p>]) -> Option<(u16, u16)> {
    let start = u16::try_from(plan.parts.len()).ok()?;
    let end = u16::try_from(plan.parts.len() + parts.len()).ok()?;
    plan.parts.extend_from_slice(parts);
    Some((start, end))
}

/// Removes the matched rules that other matched rules replace, in any order. Unlimited matches stay unlimited.
#[cold]
fn drop_replaced(plan: &mut Plan<'_>, replacing: &[&Rule]) {
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
