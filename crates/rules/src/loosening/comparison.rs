//! Comparison of what two rule sets apply to one request.

use super::probe::{Probe, changed_nodes, probes};
use super::protection::{Protection, Weakness, protections};
use crate::plan::{Descriptor, Plan};
use crate::rule::Rule;
use crate::ruleset::Domain;
use std::collections::HashMap;
use tollgate_core::Cost;

/// How the protection by a rule changes for a request.
pub(super) enum Change {
    /// No rule is left at its path.
    Removed,
    /// Another rule applies: its path.
    Replaced(String),
    /// It protects less.
    Weakened(Weakness),
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Removed => f.write_str("is removed"),
            Self::Replaced(path) => write!(f, "is replaced by `{path}` for some requests"),
            Self::Weakened(weakness) => weakness.fmt(f),
        }
    }
}

pub(super) struct Comparison<'r> {
    before: &'r Domain,
    after: &'r Domain,
    /// Factor from which a limit counts as raised.
    raised: f64,
    changed: Vec<u32>,
    /// Paths of the new rules, by number.
    paths: HashMap<u32, String>,
}

impl<'r> Comparison<'r> {
    pub(super) fn new(before: &'r Domain, after: &'r Domain, raised: f64) -> Self {
        let paths = after.rules_by_path().map(|(path, rule)| (rule.id, path)).collect();
        Self { before, after, raised, changed: changed_nodes(before, after), paths }
    }

    /// Returns the requests by which a rule at this node is compared; first the one with its own keys.
    pub(super) fn probes(&self, node: u32, rule: &Rule) -> Vec<Probe> {
        probes(self.before, self.after, node, rule, &self.changed)
    }

    /// Returns how the protection by a rule changes for a request; `same` is the new rule at its path.
    pub(super) fn changes(
        &self,
        probe: &Probe,
        rule: &Rule,
        same: Option<&Rule>,
        tier: Option<&str>,
    ) -> Vec<Change> {
        let mut attributes: Vec<(&str, &str)> =
            probe.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let entries = attributes[..probe.entries].to_vec();
        let mut found = Vec::new();
        // An entry for the tier is part of the path where a rule has tiers, and none where it has not.
        if tier.is_none() {
            let descriptors = [Descriptor { entries: &entries, ..Descriptor::default() }];
            let plan = |domain: &'r Domain| domain.plan_descriptors(&descriptors, Cost::ONE);
            let (old, new) = (plan(self.before), plan(self.after));
            self.compare(&old, &new, probe, (rule, same), &mut found);
        }
        let (old_tier, new_tier) = (self.before.tier_key(), self.after.tier_key());
        for key in [old_tier, new_tier] {
            if let Some(tier) = tier.filter(|_| attributes.iter().all(|(name, _)| *name != key)) {
                attributes.push((key, tier));
            }
        }
        let (old, new) = (self.before.plan(&attributes, Cost::ONE), self.after.plan(&attributes, Cost::ONE));
        self.compare(&old, &new, probe, (rule, same), &mut found);
        found
    }

    fn compare(
        &self,
        old: &Plan<'_>,
        new: &Plan<'_>,
        probe: &Probe,
        (rule, same): (&Rule, Option<&Rule>),
        found: &mut Vec<Change>,
    ) {
        // A rule that did not deny such a request protected nothing.
        let Some(before) = protections(old).into_iter().find(|one| one.rule.id == rule.id) else { return };
        let applied = protections(new);
        let judged: Vec<(&Protection<'_>, Vec<Weakness>)> = applied
            .iter()
            .filter(|one| one.rule.keys.iter().all(|key| rule.keys.contains(key)))
            .map(|one| (one, before.weaknesses(one, self.raised)))
            .collect();
        if judged.iter().any(|(_, weaknesses)| weaknesses.is_empty()) {
            return;
        }
        let Some(same) = same else { return found.push(Change::Removed) };
        if let Some((_, weaknesses)) = judged.into_iter().find(|(one, _)| one.rule.id == same.id) {
            return found.extend(weaknesses.into_iter().map(Change::Weakened));
        }
        let charged = new.limits.iter().filter_map(|matched| matched.rule);
        let mut matched = charged.chain(new.matches.iter().filter_map(|(_, rule)| *rule));
        found.push(if matched.clone().any(|rule| rule.id == same.id) {
            Change::Weakened(Weakness::DeniesNothing)
        } else if let Some(other) = matched.find_map(|rule| self.paths.get(&rule.id)) {
            Change::Replaced(other.clone())
        } else {
            Change::Weakened(Weakness::Unmatched(probe.to_string()))
        });
    }
}
