//! Descriptors against rules: which rule each reaches, which reach none, and which rules nothing reaches.

use super::actions::Template;
use super::envoy::EnvoyParts;
use super::finding::Report;
use super::rule_tree::{Reached, RuleTree};
use super::sending::sent;
use std::collections::{BTreeMap, BTreeSet};
use tollgate_rules::{DescriptorMatch, Domain, Ruleset, closest};

/// The domains that filters use, with the rules that descriptors reach.
struct Checked<'r> {
    rules: &'r Ruleset,
    domains: BTreeMap<&'r str, CheckedDomain<'r>>,
}

struct CheckedDomain<'r> {
    tree: RuleTree<'r>,
    domain: &'r Domain,
    reached: BTreeSet<u32>,
    /// Whether anything is sent for it. If not, that is the problem, and not the rules.
    is_used: bool,
    /// The first filter that uses it.
    place: String,
}

/// Checks what filters send against the rules.
pub(super) fn check(parts: &EnvoyParts, rules: &Ruleset, report: &mut Report) {
    let mut checked = Checked { rules, domains: BTreeMap::new() };
    // Most routes of a configuration send what others do.
    let mut seen = BTreeSet::new();
    for scope in parts.scopes() {
        for filter in &scope.filters {
            let mut groups: Vec<(&str, &str, Vec<&Template>)> = Vec::new();
            groups.extend(scope.ways().map(|way| {
                let sent = sent(filter, way);
                (sent.domain, sent.domain_place, sent.templates)
            }));
            if scope.routes.is_empty() {
                groups.push((&filter.domain, &filter.place, filter.limits.templates.iter().collect()));
            }
            for (domain, place, templates) in groups {
                let places: Vec<&str> = templates.iter().map(|template| template.place.as_str()).collect();
                if !seen.insert((filter.place.as_str(), domain, places)) {
                    continue;
                }
                if let Some(checked) = checked.domain(domain, place, report) {
                    checked.descriptors(&templates, report);
                }
            }
        }
    }
    for filter in &parts.networks {
        if let Some(checked) = checked.domain(&filter.domain, &filter.place, report) {
            checked.descriptors(&filter.templates.iter().collect::<Vec<_>>(), report);
        }
    }
    for filter in &parts.quotas {
        if let Some(checked) = checked.domain(&filter.domain, &filter.place, report) {
            for bucket in &filter.buckets {
                checked.bucket(bucket, report);
            }
        }
    }
    for domain in checked.domains.values().filter(|domain| domain.is_used) {
        domain.report_unreached(report);
    }
}

impl<'r> Checked<'r> {
    /// Returns a domain of the rules; reports one that they do not have.
    fn domain(&mut self, name: &str, place: &str, report: &mut Report) -> Option<&mut CheckedDomain<'r>> {
        if name.is_empty() {
            return None;
        }
        let Some(domain) = self.rules.domain(name) else {
            let names: Vec<&str> = self.rules.domains().map(Domain::name).collect();
            let fix = match closest(name, &names) {
                Some(near) => format!("did you mean `{near}`?"),
                None if names.is_empty() => "load rules for it".to_owned(),
                None => format!("the rules have {}", names.join(", ")),
            };
            report.problem(place, format!("no rules for domain `{name}`: its requests are not limited"), fix);
            return None;
        };
        Some(self.domains.entry(domain.name()).or_insert_with(|| CheckedDomain {
            tree: RuleTree::new(domain),
            domain,
            reached: BTreeSet::new(),
            is_used: false,
            place: place.to_owned(),
        }))
    }
}

impl CheckedDomain<'_> {
    /// Checks the descriptors of one request.
    fn descriptors(&mut self, templates: &[&Template], report: &mut Report) {
        self.is_used |= !templates.is_empty();
        let mut known = Vec::with_capacity(templates.len());
        for template in templates {
            match &template.unknown {
                None => known.push(*template),
                Some(action) => report.note(
                    &template.place,
                    format!(
                        "the key of the action `{action}` is not known here; its descriptor is not checked"
                    ),
                ),
            }
        }
        match self.domain.matching() {
            DescriptorMatch::One => {
                for template in known {
                    let reached = self.tree.reached_by(template);
                    self.report(template, reached, report);
                }
            }
            // A request is judged by all its descriptors together.
            DescriptorMatch::All => {
                let reached = self.tree.reached_by_all(&known);
                let is_all_known = known.len() == templates.len();
                for template in known {
                    let own = self.about(template, &reached);
                    if own.is_empty() && (!reached.is_empty() || !is_all_known) {
                        report.warning(
                            &template.place,
                            format!("no rule is about the descriptor {template}"),
                            "remove it, or add a rule for one of its keys",
                        );
                    } else {
                        self.report(template, own, report);
                    }
                }
                self.reached.extend(reached.keys());
            }
        }
    }

    /// Checks a bucket of quotas, whose entries are attributes.
    fn bucket(&mut self, bucket: &Template, report: &mut Report) {
        self.is_used = true;
        let reached = self.tree.reached_by_attributes(bucket);
        self.report(bucket, reached, report);
    }

    /// Returns the rules that have a key of this descriptor, or the total.
    fn about(&self, template: &Template, reached: &Reached) -> Reached {
        let is_about = |id: u32| self.tree.is_about(id, template);
        reached.iter().filter(|(id, _)| is_about(**id)).map(|(id, text)| (*id, text.clone())).collect()
    }

    fn report(&mut self, template: &Template, reached: Reached, report: &mut Report) {
        for text in reached.values() {
            report.note(&template.place, format!("{template}: {text}"));
        }
        if reached.is_empty() && template.has_limit {
            report.note(
                &template.place,
                format!("{template}: limited by the `limit` that it brings, if the request has one"),
            );
        } else if reached.is_empty() {
            let begins: Vec<&str> = self.tree.first_elements().into_iter().take(20).collect();
            report.problem(
                &template.place,
                format!("no rule matches the descriptor {template}: it is not limited"),
                format!(
                    "a rule's path must have these keys in this order and end with the last; rules of domain `{}` begin with {}",
                    self.domain.name(),
                    begins.join(", ")
                ),
            );
        }
        self.reached.extend(reached.into_keys());
    }

    /// Reports rules that no descriptor reaches.
    fn report_unreached(&self, report: &mut Report) {
        const MAX: usize = 50;
        for rule in self.tree.rules().filter(|rule| !self.reached.contains(&rule.id)).take(MAX) {
            report.warning(
                &self.place,
                format!(
                    "no descriptor of this configuration reaches rule `{}` of domain `{}`",
                    rule.name,
                    self.domain.name()
                ),
                "add actions for its keys, in their order, or `match: all` to the rule file if another rule takes its descriptor; ignore this if \
                 another proxy sends them",
            );
        }
    }
}
