//! Matching by attributes: every path of the rule tree whose keys the request has.

use super::cost::CostResolver;
use super::limits::{push_limits, repeat_parts};
use super::{find_attribute, push_part};
use crate::plan::{Attributes, MatchKind, Plan};
use crate::rule::Rule;
use crate::ruleset::Domain;
use crate::tree::{GLOBAL, KeyIndex, Level};
use smallvec::SmallVec;
use std::ops::Range;
use tollgate_core::Cost;

/// Walks the rule tree with a request's attributes, and adds the limits of every rule that matches. Apart from what a walk
/// changes: so the compiler knows it all where a walk begins, and drops what that does not need.
pub(super) struct AttributeMatcher<'w, 'p> {
    pub(super) domain: &'p Domain,
    /// The request's attributes and cost.
    pub(super) look: CostResolver<'w, 'p>,
    /// Index of the descriptor that is matched; zero for attributes.
    pub(super) descriptor: u16,
    /// Number of attributes, from the first, whose keys may end a rule's path; the others only lead to it.
    pub(super) ending: usize,
}

/// What a walk adds to.
pub(super) struct Matches<'w, 'p> {
    pub(super) plan: &'w mut Plan<'p>,
    /// Strongest match that charges nothing.
    pub(super) uncharged: (MatchKind, Option<&'p Rule>),
    /// Matched rules that replace others.
    pub(super) replacing: SmallVec<[&'p Rule; 1]>,
}

impl<'w, 'p> Matches<'w, 'p> {
    #[inline]
    pub(super) fn new(plan: &'w mut Plan<'p>) -> Self {
        Self { plan, uncharged: (MatchKind::None, None), replacing: SmallVec::new() }
    }
}

impl<'w, 'p> AttributeMatcher<'w, 'p> {
    #[inline]
    pub(super) fn new(domain: &'p Domain, request: &'w Attributes<'p>, cost: Cost) -> Self {
        let look = CostResolver { cost, attributes: request };
        Self { domain, look, descriptor: 0, ending: usize::MAX }
    }

    /// Visits every node of the tree that the request matches. Always inlined: a call would take as long as the usual walk,
    /// which has one level.
    #[inline(always)]
    pub(super) fn match_tree(&self, found: &mut Matches<'_, 'p>) {
        self.match_level(&self.domain.tree[0].children, 0..0, found);
    }

    /// Visits every node of a level, below nodes whose values are the plan's parts at `path`.
    #[inline(always)]
    fn match_level(&self, level: &'p Level, path: Range<usize>, found: &mut Matches<'_, 'p>) {
        let Some(keys) = level.is_small() else { return self.match_many_keys(level, path, found) };
        for index in keys {
            let value = if index.is_global {
                Some(GLOBAL.1)
            } else {
                find_attribute(self.look.attributes, &index.name)
            };
            match (value, index.any) {
                (None, _) => {}
                (Some(value), Some(node)) if index.is_plain => self.visit(node, value, path.clone(), found),
                (Some(value), _) => self.match_value(index, value, path.clone(), found),
            }
        }
    }

    #[inline(never)]
    fn match_many_keys(&self, level: &'p Level, path: Range<usize>, found: &mut Matches<'_, 'p>) {
        for (i, (key, value)) in self.look.attributes.iter().enumerate() {
            let is_known = || self.look.attributes[..i].iter().any(|(other, _)| other == key);
            if let Some(index) = level.key(key)
                && *key != GLOBAL.0
                && !is_known()
            {
                self.match_value(index, value, path.clone(), found);
            }
        }
        if let Some(index) = level.key(GLOBAL.0) {
            self.match_value(index, GLOBAL.1, path, found);
        }
    }

    /// Visits the most specific rule for the value, and every network that contains it.
    #[inline(never)]
    fn match_value(
        &self,
        index: &'p KeyIndex,
        value: &'p str,
        path: Range<usize>,
        found: &mut Matches<'_, 'p>,
    ) {
        let specific = index.specific(value).or(index.any);
        for node in specific.into_iter().chain(index.networks.iter().map(|(_, node)| *node)) {
            self.visit(node, value, path.clone(), found);
        }
    }

    #[inline(never)]
    fn match_children(&self, level: &'p Level, path: Range<usize>, found: &mut Matches<'_, 'p>) {
        self.match_level(level, path, found);
    }

    /// Adds the limits of a node and of those below it, whose first values are the plan's parts at `above`. Always inlined: a
    /// call would take as long as the rest.
    #[inline(always)]
    fn visit(&self, id: u32, value: &'p str, above: Range<usize>, found: &mut Matches<'_, 'p>) {
        let node = &self.domain.tree[id as usize];
        let plan = &mut *found.plan;
        let start = plan_end(plan, &above);
        if !push_part(&mut plan.parts, node, value) {
            return;
        }
        let path = start..plan.parts.len();
        if let Some(id) = node.rule
            && (self.ending == usize::MAX || self.may_end(&node.element.key))
        {
            let rule = &self.domain.rules[id as usize];
            let tier = plan.tier;
            let matched = push_limits(plan, rule, tier, path.clone(), &self.look, self.descriptor);
            if matches!(
                (matched, found.uncharged.0),
                (MatchKind::Exempt, MatchKind::None)
                    | (MatchKind::Unlimited, MatchKind::None | MatchKind::Exempt)
            ) {
                found.uncharged = (matched, Some(rule));
            }
            if !rule.is_plain && !rule.replaces.is_empty() {
                found.replacing.push(rule);
            }
        }
        if !node.children.is_empty() {
            self.match_children(&node.children, path, found);
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
