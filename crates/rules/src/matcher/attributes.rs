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

/// Walks the rule tree with a request's attributes, and adds the limits of every rule that matches.
pub(super) struct AttributeMatcher<'w, 'p> {
    pub(super) domain: &'p Domain,
    /// The request's attributes and cost.
    pub(super) look: CostResolver<'w, 'p>,
    /// Index of the descriptor that is matched; zero for attributes.
    pub(super) descriptor: u16,
    /// Number of attributes, from the first, whose keys may end a rule's path; the others only lead to it.
    pub(super) ending: usize,
    /// Values of the nodes above, as a range of the plan's parts.
    pub(super) path: Range<usize>,
    pub(super) plan: &'w mut Plan<'p>,
    /// Strongest match that charges nothing.
    pub(super) uncharged: (MatchKind, Option<&'p Rule>),
    /// Matched rules that replace others.
    pub(super) replacing: SmallVec<[&'p Rule; 1]>,
}

impl<'w, 'p> AttributeMatcher<'w, 'p> {
    #[inline]
    pub(super) fn new(
        domain: &'p Domain,
        request: &'w Attributes<'p>,
        cost: Cost,
        plan: &'w mut Plan<'p>,
    ) -> Self {
        Self {
            domain,
            look: CostResolver { cost, attributes: request },
            descriptor: 0,
            ending: usize::MAX,
            path: 0..0,
            plan,
            uncharged: (MatchKind::None, None),
            replacing: SmallVec::new(),
        }
    }

    pub(super) fn match_level(&mut self, level: &'p Level) {
        let Some(keys) = level.is_small() else { return self.match_many_keys(level) };
        for index in keys {
            let value = if index.is_global {
                Some(GLOBAL.1)
            } else {
                find_attribute(self.look.attributes, &index.name)
            };
            match (value, index.any) {
                (None, _) => {}
                (Some(value), Some(node)) if index.is_plain => self.visit(node, value),
                (Some(value), _) => self.match_value(index, value),
            }
        }
    }

    #[inline(never)]
    fn match_many_keys(&mut self, level: &'p Level) {
        for (i, (key, value)) in self.look.attributes.iter().enumerate() {
            let is_known = || self.look.attributes[..i].iter().any(|(other, _)| other == key);
            if let Some(index) = level.key(key)
                && *key != GLOBAL.0
                && !is_known()
            {
                self.match_value(index, value);
            }
        }
        if let Some(index) = level.key(GLOBAL.0) {
            self.match_value(index, GLOBAL.1);
        }
    }

    /// Visits the most specific rule for the value, and every network that contains it.
    #[inline(never)]
    fn match_value(&mut self, index: &'p KeyIndex, value: &'p str) {
        let specific = index.specific(value).or(index.any);
        for node in specific.into_iter().chain(index.networks.iter().map(|(_, node)| *node)) {
            self.visit(node, value);
        }
    }

    /// Adds the limits of a node and of those below it. Always inlined: a call would take as long as the rest.
    #[inline(always)]
    fn visit(&mut self, id: u32, value: &'p str) {
        let node = &self.domain.tree[id as usize];
        let above = self.path.clone();
        let start = plan_end(self.plan, &above);
        if !push_part(&mut self.plan.parts, node, value) {
            return;
        }
        let path = start..self.plan.parts.len();
        if let Some(id) = node.rule
            && (self.ending == usize::MAX || self.may_end(&node.element.key))
        {
            let rule = &self.domain.rules[id as usize];
            let tier = self.plan.tier;
            let matched = push_limits(self.plan, rule, tier, path.clone(), &self.look, self.descriptor);
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
