//! The rules that may limit a caller, which `GET /admin/v1/usage` reports, and which of them have counters of its own.

use crate::matcher::find;
use crate::plan::Attributes;
use crate::quota_key::counts_by_value;
use crate::rule::Rule;
use crate::ruleset::{Domain, Ruleset};
use crate::tree::{TreeNode, ValueTest};

/// A rule that may limit a caller.
#[derive(Clone, Debug)]
pub struct PerCallerRule<'r> {
    /// The rule.
    pub rule: &'r Rule,
    /// Path in the tree: `api_key/endpoint=POST /orders`.
    pub path: String,
    /// How an override of the caller refers to it: `default`, or what follows the caller in the path
    /// (`endpoint:POST /orders`); the path if other callers share its counters.
    pub reference: String,
    /// Attributes that the request lacks and whose values are unknown; if empty, a request with those given matches the
    /// rule.
    pub missing: Vec<&'r str>,
    /// Attributes that the request lacks, with the values that the rule is about.
    pub given: Vec<(&'r str, &'r str)>,
    /// Whether other callers share its counters.
    pub is_shared: bool,
}

impl Domain {
    /// Returns the rules that have counters of their own for the caller that the attribute `key` identifies. Rules that
    /// the request can never match, because it has another value than they require, are omitted.
    #[must_use]
    pub fn per_caller_rules<'r>(&'r self, key: &str, request: &Attributes<'_>) -> Vec<PerCallerRule<'r>> {
        self.rules_for_caller(key, request, |is_shared| !is_shared)
    }

    /// Returns all rules that may limit this caller, also those whose counters it shares with others.
    #[must_use]
    pub fn caller_rules<'r>(&'r self, key: &str, request: &Attributes<'_>) -> Vec<PerCallerRule<'r>> {
        self.rules_for_caller(key, request, |_| true)
    }

    fn rules_for_caller<'r>(
        &'r self,
        key: &str,
        request: &Attributes<'_>,
        is_wanted: impl Fn(bool) -> bool,
    ) -> Vec<PerCallerRule<'r>> {
        let mut found = Vec::new();
        for (at, rule) in self.rule_nodes() {
            let path = self.path(at);
            let nodes = || path.iter().map(|node| &self.tree[*node as usize]);
            let is_own = |node: &TreeNode| &*node.element.key == key && counts_by_value(&node.element);
            let own = path.iter().rposition(|node| is_own(&self.tree[*node as usize]));
            let is_shared = own.is_none();
            if !is_wanted(is_shared) {
                continue;
            }
            let (lacking, asked): (Vec<_>, Vec<_>) =
                nodes().partition(|node| find(request, &node.element.key).is_none());
            if !asked.into_iter().all(|node| self.clause(node, request).holds) {
                continue;
            }
            let rule = &self.rules[rule as usize];
            let (mut missing, mut given) = (Vec::new(), Vec::new());
            for TreeNode { element, .. } in lacking {
                match known_value(&element.test) {
                    Some(value) => given.push((&*element.key, value)),
                    None => missing.push(&*element.key),
                }
            }
            // Without the value that places its counters, a request has others.
            missing.extend(rule.shard_by.as_deref().filter(|attribute| find(request, attribute).is_none()));
            let words: Vec<String> = nodes().map(|node| node.element.to_string()).collect();
            let reference = match own.map(|own| &words[own + 1..]) {
                None => words.join("/"),
                Some([]) => "default".to_owned(),
                Some(after) => after.join("/").replace('=', ":"),
            };
            found.push(PerCallerRule { rule, path: words.join("/"), reference, missing, given, is_shared });
        }
        found
    }

    /// Returns the domain's rules by number, each with the keys of its path for which every value has its own counter:
    /// a caller identified by one of these keys shares the rule's counters with no other caller.
    pub fn per_value_keys(&self) -> impl Iterator<Item = (u32, Vec<&str>)> {
        (0..).zip(&self.tree).filter_map(|(at, node)| {
            let path = self.path(at);
            let elements = path.iter().map(|node| &self.tree[*node as usize].element);
            let apart = elements.filter(|element| counts_by_value(element));
            let rule = node.rule?;
            let shard = self.rules[rule as usize].shard_by.as_deref();
            Some((rule, apart.map(|element| &*element.key).chain(shard).collect()))
        })
    }
}

/// Returns a value that a condition is about, if all of them have the same counter.
fn known_value(test: &ValueTest) -> Option<&str> {
    match test {
        ValueTest::Exact(value) => Some(value),
        // A pattern matches its own text.
        ValueTest::Shared(pattern) => Some(pattern.text()),
        ValueTest::Any | ValueTest::Like(_) | ValueTest::Network(_) => None,
    }
}

impl Ruleset {
    /// Returns the rules with a counter for each value of `key` that `name` refers to: by name, by path, by what follows
    /// the caller in the path, or `default` for the rule on the caller alone. Sorted by number.
    #[must_use]
    pub fn find_per_caller_rules(&self, key: &str, name: &str) -> Vec<u32> {
        let name = crate::overrides::canonical(key, name);
        let nodes = self.overridable(key).and_then(|names| names.get(&name)).map_or(&[][..], Vec::as_slice);
        let rule = |(domain, node): &(usize, u32)| self.domains().nth(*domain)?.tree[*node as usize].rule;
        let mut rules: Vec<u32> = nodes.iter().filter_map(rule).collect();
        rules.sort_unstable();
        rules
    }
}
