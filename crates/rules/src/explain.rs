//! Rule explanation: why a rule matches a request, or does not, clause by clause.
//!
//! Each clause is a key of the rule's path, tested separately, so that a reader who expected a match sees the clause
//! that failed. The matcher itself is not instrumented: it stays fast, and this module evaluates the tree again.

use crate::matcher::find;
use crate::plan::Attributes;
use crate::ruleset::Domain;
use crate::tree::{TreeNode, ValueTest};
use std::fmt;
use tollgate_core::Cost;

/// The explanation of why each rule of a domain does or does not match a request.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Name of the domain.
    pub domain: String,
    /// Tier of the caller, if known.
    pub tier: Option<String>,
    /// One explanation per rule, in the order of the file.
    pub rules: Vec<RuleExplanation>,
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

impl Domain {
    /// Explains which rules match a request, and why the others do not.
    #[must_use]
    pub fn explain(&self, request: &Attributes<'_>) -> Explanation {
        let plan = self.plan(request, Cost::PEEK);
        let rules = self.tree.iter().filter_map(|node| node.rule.map(|id| (node, id)));
        let rules = rules.map(|(node, id)| {
            let rule = &self.rules[id as usize];
            let clauses = self.clauses(node, request);
            let charged: Vec<(String, String)> = plan
                .limits
                .iter()
                .filter(|matched| matched.rule.is_some_and(|matched| matched.id == id))
                .map(|matched| {
                    let parts = &plan.parts[usize::from(matched.parts.0)..usize::from(matched.parts.1)];
                    let values: Vec<String> = parts.iter().map(ToString::to_string).collect();
                    let limit = &matched.limit.limit;
                    (
                        match &matched.limit.cost {
                            Some(cost) => format!("{limit} cost {cost}"),
                            None => limit.to_string(),
                        },
                        format!("{} [{}]", matched.limit.scope.label(), values.join(", ")),
                    )
                })
                .collect();
            let finding = if clauses.iter().any(|clause| !clause.holds) {
                RuleResult::NoMatch
            } else if rule.unlimited {
                RuleResult::Unlimited
            } else if !charged.is_empty() {
                RuleResult::Limited(charged)
            } else if rule.limits_for(plan.tier).is_empty() {
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
            tier: plan.tier.map(ToOwned::to_owned),
            rules: rules.collect(),
        }
    }

    fn replacer(&self, name: &str, request: &Attributes<'_>) -> String {
        let nodes =
            self.tree.iter().filter(|node| self.clauses(node, request).iter().all(|clause| clause.holds));
        let mut rules = nodes.filter_map(|node| node.rule).map(|id| &self.rules[id as usize]);
        rules
            .find(|rule| rule.replaces.iter().any(|other| other == name))
            .map_or_else(String::new, |rule| rule.name.clone())
    }

    fn clauses(&self, node: &TreeNode, request: &Attributes<'_>) -> Vec<Clause> {
        let mut path = vec![node];
        while path[path.len() - 1].parent != 0 {
            path.push(&self.tree[path[path.len() - 1].parent as usize]);
        }
        let mut clauses = Vec::with_capacity(path.len());
        for node in path.into_iter().rev() {
            let clause = self.clause(node, request);
            let holds = clause.holds;
            clauses.push(clause);
            if !holds {
                break;
            }
        }
        clauses
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
            return Clause { condition: asked, actual: format!("`{value}` {why}"), holds: false };
        }
        if matches!(element.test, ValueTest::Network(_)) {
            return Clause { condition: asked, actual: format!("`{value}`"), holds: true };
        }
        let level = &self.tree[node.parent as usize].children;
        let winner = level.key(&element.key).and_then(|index| index.specific(value).or(index.any));
        match winner.map(|id| &self.tree[id as usize]) {
            Some(winner) if !std::ptr::eq(winner, node) => Clause {
                condition: asked,
                actual: format!("`{value}` belongs to the more specific or earlier `{}`", winner.element),
                holds: false,
            },
            _ => Clause { condition: asked, actual: format!("`{value}`"), holds: true },
        }
    }
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
