//! Loosened protection: what a new rule set no longer protects, told from the two rule sets alone.
//!
//! Recent traffic shows whom new rules would deny, and barely shows what a limit on logins prevents: while nobody
//! attacks, removing it changes no decision. So the removal of a domain, and whatever weakens a rule of class
//! `security`, is found by comparing rules, whatever the traffic. Rules are identified by domain and path, as in a
//! diff: a rule that moves is a removed one. Rejected: comparing every rule, because raising an ordinary limit is daily
//! work, and a question that is always asked is always answered with yes.

use crate::rule::{Class, CostFrom, DescriptorMatch, Enforce, FailPolicy, OnError, Rule, RuleLimit};
use crate::ruleset::{Domain, Ruleset};
use std::collections::{BTreeMap, BTreeSet};
use tollgate_core::Algorithm;

/// Factor from which a raised limit counts as no protection.
const ENORMOUS: f64 = 10.0;

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
            match after.domain(before.name()) {
                None => {
                    let detail = format!("domain `{}` is removed", before.name());
                    all.push(Loosening { kind: LooseningKind::DomainRemoved, detail });
                }
                Some(after) if denies_anything(before) && !denies_anything(after) => {
                    let detail = format!("domain `{}` has no limit left that denies anything", before.name());
                    all.push(Loosening { kind: LooseningKind::DomainRemoved, detail });
                }
                Some(after) => {
                    let is_secure = |rule: &Rule| rule.class == Class::Security;
                    let narrower =
                        (before.matching, after.matching) == (DescriptorMatch::All, DescriptorMatch::One);
                    if narrower && before.domain_rules().any(is_secure) {
                        let detail = format!("domain `{}` no longer has `match: all`", before.name());
                        all.push(Loosening { kind: LooseningKind::SecurityRuleWeakened, detail });
                    }
                    compare_security_rules(before, after, &mut all);
                }
            }
        }
        all
    }
}

fn denies_anything(domain: &Domain) -> bool {
    domain.domain_rules().any(|rule| rule.all_limits().any(|limit| denies(rule, limit)))
}

fn denies(rule: &Rule, limit: &RuleLimit) -> bool {
    !rule.unlimited
        && limit.role.is_enforced(rule.action)
        && limit.cost.as_deref() != Some(&CostFrom::Fixed(0))
}

fn by_path(domain: &Domain) -> BTreeMap<String, &Rule> {
    domain.rules_by_path().collect()
}

fn compare_security_rules(before: &Domain, after: &Domain, all: &mut Vec<Loosening>) {
    let (old_rules, new_rules) = (by_path(before), by_path(after));
    for (path, old) in old_rules.iter().filter(|(_, rule)| rule.class == Class::Security) {
        let name = format!("security rule `{}: {path}`", before.name());
        let Some(new) = new_rules.get(path) else {
            // One that never denied anything protected nothing.
            if old.all_limits().any(|limit| denies(old, limit)) {
                let detail = format!("{name} is removed");
                all.push(Loosening { kind: LooseningKind::SecurityRuleRemoved, detail });
            }
            continue;
        };
        let mut weaker = weaknesses(old, new);
        let exempt = |rules: &BTreeMap<String, &Rule>, name: &str| -> BTreeSet<String> {
            let exempts = |rule: &&Rule| {
                rule.class != Class::Security && rule.replaces.iter().any(|other| other == name)
            };
            rules.iter().filter(|(_, rule)| exempts(rule)).map(|(path, _)| path.clone()).collect()
        };
        let known = exempt(&old_rules, &old.name);
        weaker.extend(
            exempt(&new_rules, &new.name)
                .difference(&known)
                .map(|path| format!("is replaced by `{path}` for some requests")),
        );
        let weakened = |what: String| Loosening {
            kind: LooseningKind::SecurityRuleWeakened,
            detail: format!("{name} {what}"),
        };
        all.extend(weaker.into_iter().map(weakened));
    }
}

/// Returns what a rule no longer does, as predicates.
fn weaknesses(old: &Rule, new: &Rule) -> Vec<String> {
    let mut all = Vec::new();
    let tiers: BTreeSet<&str> =
        [old, new].iter().flat_map(|rule| &rule.tiers).map(|(tier, _)| &**tier).collect();
    let looser = |tier: Option<&str>| looser(old, new, tier);
    match looser(None) {
        // What holds for everybody needs no list of tiers.
        Some(what) => all.push(what),
        None => all
            .extend(tiers.iter().filter_map(|tier| Some(format!("{} for tier {tier}", looser(Some(tier))?)))),
    }
    if new.class != Class::Security {
        all.push("is no longer of class security".to_owned());
    }
    let enforced = |rule: &Rule| rule.enforce.as_ref().map_or(Enforce::ALL, |enforce| enforce.thousandths);
    if enforced(new) < enforced(old) {
        all.push(format!("is enforced for {} of the callers only", Enforce::percent(enforced(new))));
    }
    if fails_more_openly(&old.on_error, &new.on_error) {
        all.push("no longer fails closed while the store is unavailable".to_owned());
    }
    if new.cost == CostFrom::Fixed(0) && old.cost != CostFrom::Fixed(0) {
        all.push("no longer counts anything (cost 0)".to_owned());
    }
    all
}

/// Returns how the limits of a tier are looser than before.
fn looser(old: &Rule, new: &Rule, tier: Option<&str>) -> Option<String> {
    for concurrent in [false, true] {
        let limits = |rule: &Rule| -> Option<(f64, f64)> {
            let limits = rule.limits_for(tier).iter().filter(|limit| {
                denies(rule, limit) && (limit.limit.algorithm() == Algorithm::Concurrency) == concurrent
            });
            // The tightest decides: the rate over time, and what passes at once.
            limits
                .map(|limit| {
                    let rate = limit.limit.rate();
                    let length = rate.period.length().as_micros().max(1) as f64;
                    (rate.count as f64 / length, limit.limit.capacity() as f64)
                })
                .reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)))
        };
        let Some((rate, capacity)) = limits(old) else { continue };
        let Some((new_rate, new_capacity)) = limits(new) else {
            return Some(
                if concurrent { "no longer limits concurrency" } else { "no longer denies anything" }
                    .to_owned(),
            );
        };
        let factor = |before: f64, after: f64| {
            if before > 0.0 { after / before } else { f64::from(after > 0.0) * ENORMOUS }
        };
        let raised =
            if concurrent { 0.0 } else { factor(rate, new_rate) }.max(factor(capacity, new_capacity));
        if raised >= ENORMOUS {
            return Some(format!("allows {raised:.0} times as much"));
        }
    }
    None
}

fn fails_more_openly(old: &OnError, new: &OnError) -> bool {
    let tiers = |policy: &OnError| match policy {
        OnError::Always(_) => Vec::new(),
        OnError::ByTier { tiers, .. } => tiers.keys().cloned().collect::<Vec<_>>(),
    };
    let named = tiers(old).into_iter().chain(tiers(new)).map(Some).chain([None]);
    named.into_iter().any(|tier| {
        let policies = [old, new].map(|policy| policy.policy(tier.as_deref()));
        policies[0] == FailPolicy::Closed && policies[1] != FailPolicy::Closed
    })
}

#[cfg(test)]
mod tests;
