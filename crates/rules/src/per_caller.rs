//! Per-caller rules: rules with a counter per caller, which `GET /admin/v1/usage` reports and resets.

use crate::matcher::find;
use crate::overrides::is_per_caller;
use crate::plan::Attributes;
use crate::rule::Rule;
use crate::ruleset::{Domain, Ruleset};
use crate::tree::ValueTest;

/// A rule that has counters for this caller.
#[derive(Clone, Debug)]
pub struct PerCallerRule<'r> {
    /// The rule.
    pub rule: &'r Rule,
    /// Path in the tree: `api_key/endpoint=POST /orders`.
    pub path: String,
    /// Attributes that the request lacks; if empty, the request matches the rule.
    pub missing: Vec<&'r str>,
}

impl Domain {
    /// Returns the rules that have counters for this caller, with the attributes that the request lacks to match them.
    /// Rules that it can never match, because it has another value than they require, are omitted.
    #[must_use]
    pub fn per_caller_rules<'r>(&'r self, request: &Attributes<'_>) -> Vec<PerCallerRule<'r>> {
        let mut found = Vec::new();
        for (at, node) in self.tree.iter().enumerate() {
            let (Some(rule), Ok(at)) = (node.rule, u32::try_from(at)) else { continue };
            let path = self.path(at);
            let nodes = || path.iter().map(|node| &self.tree[*node as usize]);
            if !nodes().any(|node| is_per_caller(&node.element)) {
                continue;
            }
            let (missing, asked): (Vec<_>, Vec<_>) =
                nodes().partition(|node| find(request, &node.element.key).is_none());
            let rule = &self.rules[rule as usize];
            // Without the value that places its counters, a request has others.
            let shard = rule.shard_by.as_deref().filter(|attribute| find(request, attribute).is_none());
            if asked.into_iter().all(|node| self.clause(node, request).holds) {
                let words: Vec<String> = nodes().map(|node| node.element.to_string()).collect();
                found.push(PerCallerRule {
                    rule,
                    path: words.join("/"),
                    missing: missing.into_iter().map(|node| &*node.element.key).chain(shard).collect(),
                });
            }
        }
        found
    }

    /// Returns the domain's rules by number, each with the keys of its path for which every value has its own counter:
    /// a caller identified by one of these keys shares the rule's counters with no other caller.
    pub fn per_value_keys(&self) -> impl Iterator<Item = (u32, Vec<&str>)> {
        (0..).zip(&self.tree).filter_map(|(at, node)| {
            let path = self.path(at);
            let apart = path.iter().map(|node| &self.tree[*node as usize].element).filter(|element| {
                match element.test {
                    ValueTest::Any | ValueTest::Like(_) | ValueTest::Exact(_) => true,
                    ValueTest::Network(prefix) => prefix.is_one_client(),
                    ValueTest::Shared(_) => false,
                }
            });
            let rule = node.rule?;
            let shard = self.rules[rule as usize].shard_by.as_deref();
            Some((rule, apart.map(|element| &*element.key).chain(shard).collect()))
        })
    }
}

impl Ruleset {
    /// Returns the rules with a counter per caller that `name` refers to: by name, by path, by what follows the caller
    /// in the path, or `default` for the rule on the caller alone. Sorted by number.
    #[must_use]
    pub fn find_per_caller_rules(&self, name: &str) -> Vec<u32> {
        let nodes = self.overridable().get(&crate::overrides::canonical(name)).map_or(&[][..], Vec::as_slice);
        let rule = |(domain, node): &(usize, u32)| self.domains().nth(*domain)?.tree[*node as usize].rule;
        let mut rules: Vec<u32> = nodes.iter().filter_map(rule).collect();
        rules.sort_unstable();
        rules
    }
}
