//! Rule explanation: why a rule matches a request, or does not, clause by clause.
//!
//! Each clause is a key of the rule's path, tested separately, so that a reader who expected a match sees the clause
//! that failed. The matcher itself is not instrumented: it stays fast, and this module evaluates the tree again. What is
//! charged comes from the plan of the request, which may have a caller's quota in it. Values that may be secrets are
//! masked.

use crate::matcher::find;
use crate::overload_explanation::OverloadExplanation;
use crate::plan::{Attributes, Descriptor, Plan};
use crate::rule::DescriptorMatch;
use crate::ruleset::Domain;
use crate::sensitivity::may_be_secret;
use crate::tree::{TreeNode, ValueTest};
use std::fmt;
use tollgate_core::{Cost, KeyPart};

/// The explanation of why each rule of a domain does or does not match a request.
#[derive(Clone, Debug, Default)]
pub struct Explanation {
    /// Name of the domain.
    pub domain: String,
    /// Tier of the caller, if known.
    pub tier: Option<String>,
    /// One explanation per rule, in the order of the file.
    pub rules: Vec<RuleExplanation>,
    /// What the domain's `overload` section makes of the request, if it has one.
    pub overload: Option<OverloadExplanation>,
}

/// The explanation of why one rule does or does not match.
#[derive(Clone, Debug)]
pub struct RuleExplanation {
    /// ID of the rule.
    pub id: u32,
    /// Name of the rule.
    pub name: String,
    /// Location of the rule: file and line.
    pub location: (String, u32),
    /// Results of the path's clauses, key by key, up to the first that fails.
    pub clauses: Vec<Clause>,
    /// Result for the rule.
    pub result: RuleResult,
    /// Effective settings, with what the rule inherits.
    pub settings: Vec<(&'static str, String)>,
}

/// One clause of a rule's path and its result for the request.
#[derive(Clone, Debug)]
pub struct Clause {
    /// Condition: `endpoint=POST /orders`.
    pub condition: String,
    /// Actual value in the request.
    pub actual: String,
    /// Whether the value satisfies the condition.
    pub holds: bool,
}

/// The result of a rule for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleResult {
    /// The rule does not match.
    NoMatch,
    /// The rule matches, and these limits are charged: limit and counter.
    Limited(Vec<(String, String)>),
    /// The rule matches and never limits.
    Unlimited,
    /// The rule matches and has no limit for this caller.
    Exempt,
    /// The rule matches, and another rule with this name replaces it.
    Replaced(String),
}

/// A request to explain.
#[derive(Clone, Copy, Debug)]
pub enum ExplainedRequest<'a> {
    /// Attributes, which match every rule whose keys they contain.
    Attributes(&'a Attributes<'a>),
    /// Descriptors, each of which matches one rule unless the domain says `match: all`.
    Descriptors(&'a [Descriptor<'a>]),
}

impl Plan<'_> {
    /// Returns the limit and the counter of a matched limit, as explanations show them.
    #[must_use]
    pub fn describe(&self, at: usize) -> (String, String) {
        let matched = &self.limits[at];
        let parts = &self.parts[usize::from(matched.parts.0)..usize::from(matched.parts.1)];
        let values: Vec<String> = parts.iter().map(ToString::to_string).collect();
        (
            matched.limit.describe(matched.rule),
            format!("{} [{}]", matched.limit.scope.label(), values.join(", ")),
        )
    }
}

impl Domain {
    /// Explains which rules match a request, and why the others do not.
    #[must_use]
    pub fn explain(&self, request: &Attributes<'_>) -> Explanation {
        let plan = self.plan(request, Cost::PEEK);
        self.explain_plan(ExplainedRequest::Attributes(request), &plan)
    }

    /// Explains `plan`, which is the plan of `request` in this domain.
    #[must_use]
    pub fn explain_plan(&self, request: ExplainedRequest<'_>, plan: &Plan<'_>) -> Explanation {
        let all: Vec<(&str, &str)>;
        let request = match request {
            ExplainedRequest::Descriptors(descriptors) if self.matching() == DescriptorMatch::All => {
                all = descriptors.iter().flat_map(|one| one.entries.iter().copied()).collect();
                ExplainedRequest::Attributes(&all)
            }
            request => request,
        };
        let entries: Vec<(&str, &str)> = match request {
            ExplainedRequest::Attributes(attributes) => attributes.to_vec(),
            ExplainedRequest::Descriptors(descriptors) => {
                descriptors.iter().flat_map(|one| one.entries.iter().copied()).collect()
            }
        };
        let rules = self.tree.iter().filter_map(|node| node.rule.map(|id| (node, id)));
        let rules = rules.map(|(node, id)| {
            let rule = &self.rules[id as usize];
            let clauses = self.clauses(node, request);
            let own = |at: &usize| plan.limits[*at].rule.is_some_and(|matched| matched.id == id);
            let charged: Vec<(String, String)> =
                (0..plan.limits.len()).filter(own).map(|at| plan.describe(at)).collect();
            let finding = if clauses.iter().any(|clause| !clause.holds) {
                RuleResult::NoMatch
            } else if !charged.is_empty() {
                RuleResult::Limited(charged)
            } else if plan.set_for(rule).unlimited {
                RuleResult::Unlimited
            } else if plan.set_for(rule).limits.is_empty() {
                RuleResult::Exempt
            } else {
                RuleResult::Replaced(self.replacer(&rule.name, request))
            };
            RuleExplanation {
                id,
                name: rule.name.clone(),
                location: rule.location.clone(),
                clauses,
                result: finding,
                settings: rule.settings(),
            }
        });
        Explanation {
            domain: self.name.clone(),
            tier: plan.any_tier().map(ToOwned::to_owned),
            rules: rules.collect(),
            overload: {
                let request = entries.iter().find(|(key, _)| *key == self.tier_key()).map(|(_, tier)| *tier);
                let quota = plan.quotas.iter().find_map(|quota| quota.tier());
                self.explain_overload(&entries, quota.or(request))
            },
        }
    }

    /// Explains what the `overload` section makes of a request of a caller of this tier; `None` if there is no section.
    #[must_use]
    pub fn explain_overload(
        &self,
        request: &Attributes<'_>,
        tier: Option<&str>,
    ) -> Option<OverloadExplanation> {
        self.overload().map(|overload| overload.explain(&self.rules, request, tier))
    }

    fn replacer(&self, name: &str, request: ExplainedRequest<'_>) -> String {
        let nodes =
            self.tree.iter().filter(|node| self.clauses(node, request).iter().all(|clause| clause.holds));
        let mut rules = nodes.filter_map(|node| node.rule).map(|id| &self.rules[id as usize]);
        rules
            .find(|rule| rule.replaces.iter().any(|other| other == name))
            .map_or_else(String::new, |rule| rule.name.clone())
    }

    fn clauses(&self, node: &TreeNode, request: ExplainedRequest<'_>) -> Vec<Clause> {
        let mut path = vec![node];
        while path[path.len() - 1].parent != 0 {
            path.push(&self.tree[path[path.len() - 1].parent as usize]);
        }
        path.reverse();
        match request {
            ExplainedRequest::Attributes(attributes) => {
                until_first_failure(path.iter().map(|node| self.clause(node, attributes)))
            }
            ExplainedRequest::Descriptors(descriptors) => {
                // Of the descriptor that comes closest: the first of those with the most clauses that hold.
                let mut best: Option<Vec<Clause>> = None;
                for one in descriptors {
                    let clauses = path.iter().enumerate().map(|(at, node)| self.entry(node, one, at));
                    let mut clauses = until_first_failure(clauses);
                    let (path, entries) = (path.len(), one.entries.len());
                    if clauses.iter().all(|clause| clause.holds) && entries > path {
                        clauses.push(Clause {
                            condition: format!("{path} entries"),
                            actual: format!("the descriptor has {entries}"),
                            holds: false,
                        });
                    }
                    let held = |clauses: &[Clause]| clauses.iter().filter(|clause| clause.holds).count();
                    let is_whole = |clauses: &[Clause]| clauses.iter().all(|clause| clause.holds);
                    let rank = |clauses: &[Clause]| (is_whole(clauses), held(clauses));
                    if best.as_deref().is_none_or(|best| rank(&clauses) > rank(best)) {
                        best = Some(clauses);
                    }
                }
                best.unwrap_or_default()
            }
        }
    }

    /// Evaluates the clause of a node for the entry of a descriptor in the same place.
    fn entry(&self, node: &TreeNode, descriptor: &Descriptor<'_>, at: usize) -> Clause {
        match descriptor.entries.get(at) {
            Some(entry) if *entry.0 == *node.element.key => self.clause(node, std::slice::from_ref(entry)),
            other => Clause {
                condition: node.element.to_string(),
                actual: match other {
                    Some((key, _)) => format!("entry {} of the descriptor is `{key}`", at + 1),
                    None => format!("the descriptor has no entry {}", at + 1),
                },
                holds: false,
            },
        }
    }

    pub(crate) fn clause(&self, node: &TreeNode, request: &Attributes<'_>) -> Clause {
        let element = &node.element;
        let asked = element.to_string();
        let Some(value) = find(request, &element.key) else {
            return Clause {
                condition: asked,
                actual: format!("the request has no `{}`", element.key),
                holds: false,
            };
        };
        let shown = match may_be_secret(&element.key) {
            true => KeyPart::Secret(value).to_string(),
            false => value.to_owned(),
        };
        let agrees = match &element.test {
            ValueTest::Any => true,
            ValueTest::Exact(wanted) => **wanted == *value,
            ValueTest::Like(pattern) | ValueTest::Shared(pattern) => pattern.matches(value),
            ValueTest::Network(prefix) => prefix.network(value).is_some(),
        };
        if !agrees {
            let why = match &element.test {
                ValueTest::Network(_) => "is no address of that family",
                _ => "is another value",
            };
            return Clause { condition: asked, actual: format!("`{shown}` {why}"), holds: false };
        }
        if matches!(element.test, ValueTest::Network(_)) {
            return Clause { condition: asked, actual: format!("`{shown}`"), holds: true };
        }
        let level = &self.tree[node.parent as usize].children;
        let winner = level.key(&element.key).and_then(|index| index.specific(value).or(index.any));
        match winner.map(|id| &self.tree[id as usize]) {
            Some(winner) if !std::ptr::eq(winner, node) => Clause {
                condition: asked,
                actual: format!("`{shown}` belongs to the more specific or earlier `{}`", winner.element),
                holds: false,
            },
            _ => Clause { condition: asked, actual: format!("`{shown}`"), holds: true },
        }
    }
}

/// Returns clauses up to the first that does not hold.
fn until_first_failure(clauses: impl Iterator<Item = Clause>) -> Vec<Clause> {
    let mut all = Vec::new();
    for clause in clauses {
        let holds = clause.holds;
        all.push(clause);
        if !holds {
            break;
        }
    }
    all
}

impl Explanation {
    /// Returns the rules that match.
    pub fn matched(&self) -> impl Iterator<Item = &RuleExplanation> {
        self.rules.iter().filter(|rule| rule.result != RuleResult::NoMatch)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let matched = self.matched().count();
        write!(f, "domain {}: {matched} of {} rules match", self.domain, self.rules.len())?;
        if let Some(tier) = &self.tier {
            write!(f, ", tier {tier}")?;
        }
        for rule in &self.rules {
            write!(f, "\n\n{rule}")?;
        }
        if let Some(overload) = &self.overload {
            write!(f, "\n\n{overload}")?;
        }
        Ok(())
    }
}

impl fmt::Display for RuleExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (file, line) = &self.location;
        let finding = match &self.result {
            RuleResult::NoMatch => "no match".to_owned(),
            RuleResult::Limited(limits) if limits.len() == 1 => "matches, 1 limit".to_owned(),
            RuleResult::Limited(limits) => format!("matches, {} limits", limits.len()),
            RuleResult::Unlimited => "matches, unlimited".to_owned(),
            RuleResult::Exempt => "matches, no limit for this caller".to_owned(),
            RuleResult::Replaced(by) => format!("matches, replaced by {by}"),
        };
        write!(f, "{} ({file}:{line}): {finding}", self.name)?;
        for clause in &self.clauses {
            let mark = if clause.holds { "yes" } else { "no " };
            write!(f, "\n  {mark}  {}: {}", clause.condition, clause.actual)?;
        }
        if let RuleResult::Limited(limits) = &self.result {
            for (limit, counter) in limits {
                write!(f, "\n  {limit}, counter {counter}")?;
            }
            f.write_str("\n  ")?;
            for (at, (name, value)) in self.settings.iter().enumerate() {
                write!(f, "{}{name}: {value}", if at == 0 { "" } else { ", " })?;
            }
        }
        Ok(())
    }
}
