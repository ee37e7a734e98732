//! Descriptors against rules: which rule each reaches, which reach none, and which rules nothing reaches.

use super::actions::Template;
use super::envoy::Filter;
use super::finding::Report;
use std::collections::BTreeSet;
use tollgate_core::Cost;
use tollgate_rules::{Descriptor, DescriptorMatch, Domain, ExplainedRequest, RuleResult, Ruleset, closest};

/// Stands for a value that is known at run time, and that no rule names.
const ANY: &str = "\u{2026}";
/// Addresses for rules about networks.
const ADDRESSES: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
/// Maximum number of values tried for one descriptor.
const MAX_TRIES: usize = 512;

/// Checks what filters send against the rules.
pub(super) fn check(filters: &[Filter], templates: &[Template], rules: &Ruleset, report: &mut Report) {
    let mut used = BTreeSet::new();
    for filter in filters.iter().filter(|filter| !filter.domain.is_empty()) {
        let Some(domain) = rules.domain(&filter.domain) else {
            unknown_domain(filter, rules, report);
            continue;
        };
        let own = filter.sent(templates);
        let mut reached = BTreeSet::new();
        for template in &own {
            let together = match domain.matching() {
                // Under `match: all` a request is judged by all descriptors of its route.
                DescriptorMatch::All => {
                    let route = route(&template.place);
                    own.iter().copied().filter(|other| self::route(&other.place) == route).collect()
                }
                DescriptorMatch::One => vec![*template],
            };
            reached.extend(check_template(domain, template, &together, report));
        }
        if !own.is_empty() && used.insert(filter.domain.clone()) {
            unreached(domain, &reached, &filter.place, report);
        }
    }
}

/// Returns the place of the route that an entry of `rate_limits` belongs to.
fn route(place: &str) -> &str {
    place.rsplit_once('[').map_or(place, |(route, _)| route)
}

fn unknown_domain(filter: &Filter, rules: &Ruleset, report: &mut Report) {
    let names: Vec<&str> = rules.domains().map(Domain::name).collect();
    let fix = match closest(&filter.domain, &names) {
        Some(near) => format!("did you mean `{near}`?"),
        None if names.is_empty() => "load rules for it".to_owned(),
        None => format!("the rules have {}", names.join(", ")),
    };
    let message = format!("no rules for domain `{}`: its requests are not limited", filter.domain);
    report.problem(&filter.place, message, fix);
}

/// Checks one descriptor. Returns the rules that it reaches.
fn check_template(
    domain: &Domain,
    template: &Template,
    together: &[&Template],
    report: &mut Report,
) -> BTreeSet<u32> {
    if let Some(action) = &template.unknown {
        report.note(
            &template.place,
            format!("the action `{action}` is not known here; its descriptor is not checked"),
        );
        return BTreeSet::new();
    }
    let found = reaches(domain, together);
    for (_, text) in &found {
        report.note(&template.place, format!("{template}: {text}"));
    }
    if found.is_empty() && template.has_limit {
        report.note(
            &template.place,
            format!("{template}: limited by the `limit` that it brings, if the request has one"),
        );
    } else if found.is_empty() {
        let begins: BTreeSet<String> = domain
            .outline()
            .iter()
            .filter(|node| node.depth == 0)
            .take(20)
            .map(|node| node.element.clone())
            .collect();
        let begins = begins.into_iter().collect::<Vec<_>>().join(", ");
        report.problem(
            &template.place,
            format!("no rule matches the descriptor {template}: it is not limited"),
            format!("a rule's path must have these keys in this order and end with the last; rules of domain `{}` begin with {begins}", domain.name()),
        );
    }
    found.into_iter().map(|(id, _)| id).collect()
}

/// Returns the rules that descriptors reach with some values, and what these do.
fn reaches(domain: &Domain, templates: &[&Template]) -> BTreeSet<(u32, String)> {
    let outline = domain.outline();
    let mut found = BTreeSet::new();
    let known = templates.iter().filter(|template| template.unknown.is_none());
    let slots: Vec<(usize, &str, Vec<String>)> = known
        .enumerate()
        .flat_map(|(number, template)| {
            let outline = &outline;
            template.entries.iter().map(move |(key, value)| {
                let mut values = match (value, key.as_str()) {
                    (Some(value), _) => return (number, key.as_str(), vec![value.clone()]),
                    (None, "remote_address") => Vec::new(),
                    (None, _) => vec![ANY.to_owned()],
                };
                values.extend(ADDRESSES.map(str::to_owned));
                let prefix = format!("{key}=");
                let named = outline.iter().filter_map(|node| node.element.strip_prefix(&prefix));
                values.extend(named.map(|value| value.replace('*', "")).take(MAX_TRIES));
                values.dedup();
                (number, key.as_str(), values)
            })
        })
        .collect();
    let mut choice = vec![0_usize; slots.len()];
    for _ in 0..MAX_TRIES {
        let mut entries: Vec<Vec<(&str, &str)>> = vec![Vec::new(); templates.len()];
        for ((number, key, values), at) in slots.iter().zip(&choice) {
            entries[*number].push((key, &values[*at]));
        }
        let descriptors: Vec<Descriptor<'_>> = entries
            .iter()
            .filter(|entries| !entries.is_empty())
            .map(|entries| Descriptor { entries, hits: None, limit: None })
            .collect();
        let plan = domain.plan_descriptors(&descriptors, Cost::PEEK);
        let explained = domain.explain_plan(ExplainedRequest::Descriptors(&descriptors), &plan);
        // A rule without a replacement is one whose descriptor a more specific rule takes.
        let is_taken = |result: &RuleResult| matches!(result, RuleResult::Replaced(by) if by.is_empty());
        let matched = explained.matched().filter(|rule| !is_taken(&rule.result));
        found.extend(matched.map(|rule| (rule.id, effect(&rule.name, &rule.result))));
        // The next combination of values.
        let Some(at) = (0..slots.len()).find(|at| choice[*at] + 1 < slots[*at].2.len()) else { break };
        choice[..at].fill(0);
        choice[at] += 1;
    }
    found
}

fn effect(name: &str, result: &RuleResult) -> String {
    match result {
        RuleResult::Limited(limits) => {
            let limits: Vec<&str> = limits.iter().map(|(limit, _)| limit.as_str()).collect();
            format!("rule `{name}`, {}", limits.join(", "))
        }
        RuleResult::Unlimited => format!("rule `{name}`, unlimited"),
        RuleResult::Replaced(other) => format!("rule `{name}`, replaced by `{other}`"),
        RuleResult::Exempt | RuleResult::NoMatch => format!("rule `{name}`, no limit"),
    }
}

/// Reports rules that no descriptor reaches.
fn unreached(domain: &Domain, reached: &BTreeSet<u32>, place: &str, report: &mut Report) {
    const MAX: usize = 50;
    for rule in domain.domain_rules().filter(|rule| !reached.contains(&rule.id)).take(MAX) {
        report.warning(
            place,
            format!(
                "no descriptor of this configuration reaches rule `{}` of domain `{}`",
                rule.name,
                domain.name()
            ),
            "add actions for its keys, in their order, or `match: all` to the rule file if another rule takes its descriptor; ignore this if \
             another proxy sends them",
        );
    }
}
