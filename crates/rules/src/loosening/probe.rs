//! Probes: requests that a rule limits, made from its path and from the rules that may take its place.
//!
//! The first probe has the rule's own keys. Each of the others differs from it in one way that a new or changed rule
//! asks for: that rule's value where the rule accepts any, or that rule's attributes beside its own if it replaces
//! others. Bounded: rules that change by the thousand are judged by their own probes.

use crate::network::Prefix;
use crate::rule::Rule;
use crate::ruleset::Domain;
use crate::tree::ValueTest;
use std::collections::HashSet;

/// Maximum number of new or changed rules that probes are made from.
const MAX_CHANGED: usize = 500;

/// A value that no rule names.
const UNNAMED: &str = "~";

/// A request: its attributes, and as many of the first ones as the rule's path has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Probe {
    pub(super) attributes: Vec<(String, String)>,
    /// Number of attributes that are the entries of a descriptor.
    pub(super) entries: usize,
}

impl std::fmt::Display for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: Vec<String> = self.attributes.iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&all.join(" "))
    }
}

impl Probe {
    fn from_path(domain: &Domain, node: u32) -> Self {
        let mut attributes: Vec<(String, String)> = Vec::new();
        for at in domain.path(node) {
            let element = &domain.tree[at as usize].element;
            attributes.push((element.key.to_string(), example(&element.test)));
        }
        Self { entries: attributes.len(), attributes }
    }

    fn has(&self, key: &str) -> bool {
        self.attributes.iter().any(|(name, _)| name == key)
    }

    fn add(&mut self, key: &str, value: &str) {
        if !self.has(key) {
            self.attributes.push((key.to_owned(), value.to_owned()));
        }
    }
}

/// Returns a value that passes the test.
pub(crate) fn example(test: &ValueTest) -> String {
    match test {
        ValueTest::Any => UNNAMED.to_owned(),
        ValueTest::Exact(value) => value.to_string(),
        ValueTest::Like(pattern) | ValueTest::Shared(pattern) => pattern.text().replace('*', UNNAMED),
        ValueTest::Network(prefix) => example_address(*prefix).to_owned(),
    }
}

fn example_address(prefix: Prefix) -> &'static str {
    let v4 = "192.0.2.1";
    if prefix.network(v4).is_some() { v4 } else { "2001:db8::1" }
}

/// Returns whether a value passes the test.
fn accepts(test: &ValueTest, value: &str) -> bool {
    match test {
        ValueTest::Any => true,
        ValueTest::Exact(exact) => **exact == *value,
        ValueTest::Like(pattern) | ValueTest::Shared(pattern) => pattern.matches(value),
        ValueTest::Network(prefix) => prefix.network(value).is_some(),
    }
}

/// Returns the nodes of `after` that `before` has not, or has with other settings.
pub(super) fn changed_nodes(before: &Domain, after: &Domain) -> Vec<u32> {
    let known: HashSet<(String, String)> = texts(before).map(|(_, text)| text).collect();
    texts(after).filter(|(_, text)| !known.contains(text)).map(|(at, _)| at).take(MAX_CHANGED).collect()
}

/// Returns the nodes with their paths and what their rules say.
fn texts(domain: &Domain) -> impl Iterator<Item = (u32, (String, String))> {
    (1..).zip(domain.tree.iter().skip(1)).map(|(at, node)| {
        let path: Vec<String> =
            domain.path(at).iter().map(|at| domain.tree[*at as usize].element.to_string()).collect();
        let rule = node.rule.map(|id| crate::diff::describe(domain, &domain.rules[id as usize]));
        (at, (path.join("/"), rule.unwrap_or_default()))
    })
}

/// Returns the requests by which a rule of `before`, at this node, is compared.
pub(super) fn probes(before: &Domain, after: &Domain, node: u32, rule: &Rule, changed: &[u32]) -> Vec<Probe> {
    let mut own = Probe::from_path(before, node);
    for shard_by in [before, after].into_iter().filter_map(Domain::shard_by) {
        own.add(shard_by, UNNAMED);
    }
    let path = before.path(node);
    let mut all = vec![own.clone()];
    for other in changed.iter().map(|at| &after.tree[*at as usize]) {
        let value = example(&other.element.test);
        for (at, element) in path.iter().map(|at| &before.tree[*at as usize].element).enumerate() {
            if element.key == other.element.key && accepts(&element.test, &value) {
                let mut probe = own.clone();
                probe.attributes[at].1.clone_from(&value);
                all.push(probe);
            }
        }
    }
    let replacing = |at: &&u32| {
        let other = after.tree[**at as usize].rule.map(|id| &after.rules[id as usize]);
        other.is_some_and(|other| other.replaces.contains(&rule.name))
    };
    for at in changed.iter().filter(replacing) {
        let mut probe = own.clone();
        for (key, value) in Probe::from_path(after, *at).attributes {
            match path.iter().position(|at| *before.tree[*at as usize].element.key == *key) {
                Some(at) if accepts(&before.tree[path[at] as usize].element.test, &value) => {
                    probe.attributes[at].1 = value;
                }
                Some(_) => {}
                None => probe.add(&key, &value),
            }
        }
        all.push(probe);
    }
    let mut seen = HashSet::new();
    all.retain(|probe| seen.insert(probe.clone()));
    all
}
