//! Rule diff: the changes between two rule sets, rule by rule. Rules are identified by domain and path, so a changed
//! number or a new name is a change of the rule, and a moved rule is a different one.

use crate::overload::{
    ADAPT_RULE, Adapt, AttributeValue, Condition, FLEET_RULE, Fairness, Overload, PriorityRule, TierFairness,
    WORKERS_RULE, Workers,
};
use crate::rule::{DescriptorMatch, LimitSet, Profile, Role, Rule};
use crate::ruleset::{Domain, Ruleset};
use std::collections::BTreeMap;
use std::fmt::Write;
use tollgate_core::Priority;

/// The change of one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleChange {
    /// Domain and path of the rule, as in `api: api_key/endpoint=POST /orders`.
    pub rule: String,
    /// Description before the change; `None` for an added rule.
    pub before: Option<String>,
    /// Description after the change; `None` for a removed rule.
    pub after: Option<String>,
}

impl Ruleset {
    /// Returns the changes if `after` replaced these rules, in the order of the rules' names.
    #[must_use]
    pub fn diff(&self, after: &Self) -> Vec<RuleChange> {
        let (mut before, mut after) = (self.descriptions(), after.descriptions());
        before.retain(|rule, text| {
            let same = after.get(rule) == Some(text);
            if same {
                after.remove(rule);
            }
            !same
        });
        let mut names: Vec<String> = before.keys().chain(after.keys()).cloned().collect();
        names.sort();
        names.dedup();
        let change = |rule: String| {
            let (before, after) = (before.remove(&rule), after.remove(&rule));
            RuleChange { rule, before, after }
        };
        names.into_iter().map(change).collect()
    }

    fn descriptions(&self) -> BTreeMap<String, String> {
        let of = |domain: &Domain| -> Vec<(String, String)> {
            let rules = domain.rules_by_path().map(|(path, rule)| (path, describe(domain, rule)));
            let parts =
                domain.overload().map_or_else(Vec::new, |overload| describe_overload(domain, overload));
            rules.chain(parts).map(|(path, text)| (format!("{}: {path}", domain.name), text)).collect()
        };
        self.domains().flat_map(of).collect()
    }
}

impl Domain {
    /// Returns the rules with their paths, as in `api_key/endpoint=POST /orders`.
    pub(crate) fn rules_by_path(&self) -> impl Iterator<Item = (String, &Rule)> {
        let rules =
            self.tree.iter().enumerate().filter_map(|(i, node)| Some((u32::try_from(i).ok()?, node.rule?)));
        rules.map(|(node, id)| (self.path_text(node), &self.rules[id as usize]))
    }

    /// Returns the path of a node in words.
    pub(crate) fn path_text(&self, node: u32) -> String {
        let path = self.path(node);
        let words: Vec<String> =
            path.iter().map(|node| self.tree[*node as usize].element.to_string()).collect();
        words.join("/")
    }
}

/// Describes a rule in one line; defaults are omitted.
pub(crate) fn describe(domain: &Domain, rule: &Rule) -> String {
    let mut text = limits(&rule.limits, rule);
    for (tier, set) in &rule.tiers {
        let _ = write!(text, "; tier {tier}: {}", limits(set, rule));
    }
    if domain.profile == Profile::Envoy {
        text.push_str("; profile envoy");
    }
    if domain.matching == DescriptorMatch::All {
        text.push_str("; match all");
    }
    if rule.depends_on_tier() && domain.tier_key != "tier" {
        let _ = write!(text, "; tier from {}", domain.tier_key);
    }
    if rule.has_explicit_name {
        let _ = write!(text, "; name {}", rule.name);
    }
    for (name, value) in rule.settings().iter().filter(|setting| **setting != ("class", "comfort".to_owned()))
    {
        let _ = write!(text, "; {name} {value}");
    }
    text
}

/// Describes the parts of an `overload` section in one line each.
fn describe_overload(domain: &Domain, overload: &Overload) -> Vec<(String, String)> {
    let Overload { priorities, fleet, workers, fairness, adapt, shadow } = overload;
    let percent = |thousandths: u64| format!("{}%", thousandths as f64 / 10.0);
    let mut parts: Vec<(&str, String)> = Vec::new();
    let one = |rule: &PriorityRule| {
        let condition = |Condition { name, values, .. }: &Condition| {
            let values: Vec<&str> = values.iter().map(AttributeValue::text).collect();
            format!("{name}={}", values.join("|"))
        };
        let when: Vec<String> = rule.when.iter().map(condition).collect();
        format!("{} if {}", rule.priority.name(), when.join(" and "))
    };
    if !priorities.is_empty() {
        let all: Vec<String> = priorities.iter().map(one).collect();
        parts.push(("overload/priorities", all.join("; ")));
    }
    if let Some(fleet) = fleet {
        let charged =
            Priority::ALL.map(|priority| format!("{} {}", priority.name(), fleet.charged[priority.index()]));
        let rule = &domain.rules[fleet.rule as usize];
        parts.push((
            FLEET_RULE,
            format!("{}; limits charged: {}", limits(&rule.limits, rule), charged.join(", ")),
        ));
    }
    if let Some(Workers { limit, floor, target, rule: _ }) = workers {
        let limit = match limit {
            Some(limit) => format!("limit {limit}"),
            None => format!("limit adaptive; floor {floor}"),
        };
        parts.push((WORKERS_RULE, format!("{limit}; target {target}x")));
    }
    if let Some(Fairness { by, tiers }) = fairness {
        let one = |tier: &TierFairness| {
            let scope = if tier.is_each { "each" } else { "together" };
            let weight = tier.weight as f64 / 1000.0;
            format!("; {} {} {scope} weight {weight}", tier.tier, percent(tier.guarantee))
        };
        parts.push(("overload/fairness", format!("by {by}{}", tiers.iter().map(one).collect::<String>())));
    }
    if let Some(Adapt { signals, order, least, step }) = adapt {
        let signals: Vec<String> = signals.iter().map(ToString::to_string).collect();
        let (signals, order) = (signals.join(", "), order.join(", "));
        let text = format!("signals {signals}; order {order}; least {}; step {step}", percent(*least));
        parts.push((ADAPT_RULE, text));
    }
    if *shadow {
        parts.push(("overload/shadow", "true".to_owned()));
    }
    parts.into_iter().map(|(path, text)| (path.to_owned(), text)).collect()
}

fn limits(set: &LimitSet, rule: &Rule) -> String {
    let one = |limit: &crate::rule::RuleLimit| {
        let mut text = limit.describe(Some(rule));
        text.push_str(match limit.role {
            Role::Live | Role::Unenforced => "",
            Role::Shadow => " shadow",
            Role::Candidate => " candidate",
            Role::Quota => " quota",
        });
        if let Some(soft) = limit.soft {
            let _ = write!(text, " {} at {}", soft.action.name(), soft.threshold);
        }
        text
    };
    let unlimited = set.unlimited.then(|| "unlimited".to_owned());
    let all: Vec<String> = unlimited.into_iter().chain(set.limits.iter().map(one)).collect();
    if all.is_empty() { "no limit".to_owned() } else { all.join(" and ") }
}
