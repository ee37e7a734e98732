//! Loosened protection: what a new rule set no longer protects, derived from the two rule sets alone.
//!
//! Recent traffic shows whom new rules would deny, and barely shows what a limit on logins prevents: while nobody
//! attacks, removing it changes no decision. So the removal of a domain, and whatever weakens a rule of class
//! `security`, is found by comparing rules, whatever the traffic.
//!
//! The comparison is of what the two rule sets apply to a request, not of their texts: for each security rule,
//! requests that match it (`probe`) are planned with both, and one of the rules that the new set applies must protect
//! at least as much (`protection`). So it does not matter whether a rule was edited, removed, or is hidden by another
//! one that now wins. Settings that this module does not know are a reason to ask.
//!
//! Rejected: comparing every rule, because raising an ordinary limit is daily work, and a question that is always
//! asked is always answered with yes. Rejected: replaying an attack, because where counters are kept, and what happens
//! while the store is unavailable, show in no replay.

mod comparison;
pub(crate) mod probe;
pub(crate) mod protection;

use crate::rule::{Class, DescriptorMatch, Rule};
use crate::ruleset::{Domain, Ruleset};
use comparison::{Change, Comparison};
use protection::Weakness;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Factor from which a raised limit counts as no protection.
const ENORMOUS: f64 = 10.0;
/// Factor from which a limit counts as raised at all.
const RAISED: f64 = 1.000_001;

/// One loosened protection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loosening {
    /// What is loosened.
    pub kind: LooseningKind,
    /// What happens, for a person: "domain `api` is removed".
    pub detail: String,
}

/// Kind of a loosened protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LooseningKind {
    /// A domain is removed, or has no limit left that denies anything.
    DomainRemoved,
    /// A rule of class `security` is removed.
    SecurityRuleRemoved,
    /// A rule of class `security` protects less.
    SecurityRuleWeakened,
}

impl Ruleset {
    /// Returns the protections that these rules have and `after` does not, in the order of the domains.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let load = |text: &str| Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap();
    /// let live = load("{domain: d, descriptors: [{key: login, class: security, limit: 5/minute}]}");
    /// let shadow = load("{domain: d, descriptors: [{key: login, class: security, shadow: true, limit: 5/minute}, {key: a, limit: 1/s}]}");
    /// assert_eq!(live.loosened(&shadow)[0].detail, "security rule `d: login` no longer denies anything");
    /// assert_eq!(shadow.loosened(&live), []);
    /// ```
    #[must_use]
    pub fn loosened(&self, after: &Self) -> Vec<Loosening> {
        let mut all = Vec::new();
        for before in self.domains() {
            let removed = |detail| Loosening { kind: LooseningKind::DomainRemoved, detail };
            match after.domain(before.name()) {
                None => all.push(removed(format!("domain `{}` is removed", before.name()))),
                Some(after) if denies_anything(before) && !denies_anything(after) => {
                    let detail = format!("domain `{}` has no limit left that denies anything", before.name());
                    all.push(removed(detail));
                }
                Some(after) => {
                    let is_secure = |rule: &Rule| rule.class == Class::Security;
                    let narrower =
                        (before.matching, after.matching) == (DescriptorMatch::All, DescriptorMatch::One);
                    if narrower && before.domain_rules().any(is_secure) {
                        let detail = format!("domain `{}` no longer has `match: all`", before.name());
                        all.push(Loosening { kind: LooseningKind::SecurityRuleWeakened, detail });
                    }
                    let found = compare_security_rules(before, after, ENORMOUS);
                    all.extend(found.into_iter().map(|one| one.loosening(before, "")));
                }
            }
        }
        all
    }

    /// Like [`Ruleset::loosened`], and also finds limits that are raised in small steps: those that `after` raises
    /// further and that are enormous beside `baseline`, the rules of a day ago.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let load = |limit: &str| {
    ///     let text = format!("{{domain: d, descriptors: [{{key: login, class: security, limit: {limit}}}]}}");
    ///     Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap()
    /// };
    /// let (yesterday, now, next) = (load("5/minute"), load("30/minute"), load("90/minute"));
    /// assert_eq!(now.loosened(&next), []);
    /// let found = now.loosened_since(&yesterday, &next);
    /// assert_eq!(found[0].detail, "security rule `d: login` allows 18 times as much as a day ago");
    /// ```
    #[must_use]
    pub fn loosened_since(&self, baseline: &Self, after: &Self) -> Vec<Loosening> {
        let mut all = self.loosened(after);
        for before in self.domains() {
            let (Some(old), Some(new)) = (baseline.domain(before.name()), after.domain(before.name())) else {
                continue;
            };
            let raised = |found: Vec<Found>| found.into_iter().filter(|one| one.factor().is_some());
            let step: BTreeMap<String, f64> = raised(compare_security_rules(before, new, RAISED))
                .filter_map(|one| Some((one.path.clone(), one.factor()?)))
                .collect();
            let steps = raised(compare_security_rules(old, new, ENORMOUS))
                .filter(|one| step.get(&one.path).is_some_and(|factor| *factor < ENORMOUS));
            all.extend(steps.map(|one| one.loosening(before, " as a day ago")));
        }
        all
    }
}

fn denies_anything(domain: &Domain) -> bool {
    // Shedding protects a service; it limits no caller.
    domain
        .domain_rules()
        .filter(|rule| !rule.is_shedding)
        .any(|rule| rule.all_limits().any(|limit| limit.role.is_enforced(rule.action)))
}

/// How one security rule protects less.
struct Found {
    path: String,
    change: Change,
    /// The only tier that it concerns.
    tier: Option<String>,
}

impl Found {
    fn factor(&self) -> Option<f64> {
        match self.change {
            Change::Weakened(Weakness::Raised(factor)) => Some(factor),
            _ => None,
        }
    }

    fn loosening(self, domain: &Domain, since: &str) -> Loosening {
        let kind = match self.change {
            Change::Removed => LooseningKind::SecurityRuleRemoved,
            Change::Replaced(_) | Change::Weakened(_) => LooseningKind::SecurityRuleWeakened,
        };
        let tier = self.tier.map(|tier| format!(" for tier {tier}")).unwrap_or_default();
        let detail = format!("security rule `{}: {}` {}{since}{tier}", domain.name(), self.path, self.change);
        Loosening { kind, detail }
    }
}

/// Compares what two rule sets of a domain apply to the requests that a security rule of the first one limits. A limit
/// counts as raised from this factor on.
fn compare_security_rules(before: &Domain, after: &Domain, raised: f64) -> Vec<Found> {
    let old_paths: HashMap<u32, String> =
        before.rules_by_path().map(|(path, rule)| (rule.id, path)).collect();
    let new_rules: HashMap<String, &Rule> = after.rules_by_path().collect();
    let comparison = Comparison::new(before, after, raised);
    let mut all = Vec::new();
    for (node, rule) in security_rules(before) {
        let path = &old_paths[&rule.id];
        let same = new_rules.get(path).copied();
        let tiers = [Some(rule), same].into_iter().flatten().flat_map(|rule| &rule.tiers);
        let tiers: BTreeSet<&str> = tiers.map(|(tier, _)| tier.as_str()).collect();
        let mut found: Vec<Found> = Vec::new();
        for probe in comparison.probes(node, rule) {
            if found.iter().any(|one| matches!(one.change, Change::Removed)) {
                break;
            }
            for tier in std::iter::once(None).chain(tiers.iter().map(|tier| Some(*tier))) {
                // What holds for everybody needs no list of tiers.
                if tier.is_some() && found.iter().any(|one| one.tier.is_none()) {
                    break;
                }
                for change in comparison.changes(&probe, rule, same, tier) {
                    let text = change.to_string();
                    if found.iter().all(|one| one.change.to_string() != text) {
                        found.push(Found { path: path.clone(), change, tier: tier.map(str::to_owned) });
                    }
                }
            }
        }
        all.append(&mut found);
    }
    all
}

/// Returns the nodes with rules of class `security`.
fn security_rules(domain: &Domain) -> impl Iterator<Item = (u32, &Rule)> {
    (0..).zip(&domain.tree).filter_map(|(at, node)| {
        let rule = &domain.rules[node.rule? as usize];
        (rule.class == Class::Security).then_some((at, rule))
    })
}

#[cfg(test)]
mod tests;
