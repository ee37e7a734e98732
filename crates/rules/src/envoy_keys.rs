//! The names of descriptors in envoyproxy/ratelimit: in its metrics, its configuration dump and its errors. A name is the
//! domain, then `key` or `key_value` for each level, joined by dots.

use crate::rule::Rule;
use crate::ruleset::Domain;
use crate::tree::{Element, TreeNode, ValueTest};

/// Returns the name of a node of a tree.
pub(crate) fn path(domain: &str, tree: &[TreeNode], node: u32) -> String {
    let mut levels = levels(tree, node);
    levels.push(domain.to_owned());
    levels.reverse();
    levels.join(".")
}

/// Returns the levels of a node, the innermost first.
fn levels(tree: &[TreeNode], mut node: u32) -> Vec<String> {
    let mut levels = Vec::new();
    while let Some(TreeNode { element, parent, .. }) = tree.get(node as usize).filter(|_| node != 0) {
        levels.push(level(element));
        node = *parent;
    }
    levels
}

fn level(element: &Element) -> String {
    let Element { key, test } = element;
    match test {
        ValueTest::Any => key.to_string(),
        ValueTest::Exact(value) if value.is_empty() => key.to_string(),
        ValueTest::Exact(value) => format!("{key}_{value}"),
        ValueTest::Like(pattern) | ValueTest::Shared(pattern) => format!("{key}_{}", pattern.text()),
        ValueTest::Network(prefix) => format!("{key}{prefix}"),
    }
}

impl Domain {
    /// Returns every rule with its levels as envoyproxy/ratelimit names them: `key`, or `key_value`.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let text = "{domain: d, descriptors: [{key: a, value: b, descriptors: [{key: c, limit: 1/hour}]}]}";
    /// let rules = Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap();
    /// let keys: Vec<_> = rules.domain("d").unwrap().envoy_keys().map(|(_, levels)| levels.join(".")).collect();
    /// assert_eq!(keys, ["a_b.c"]);
    /// ```
    pub fn envoy_keys(&self) -> impl Iterator<Item = (&Rule, Vec<String>)> {
        (0_u32..).zip(&self.tree).filter_map(|(id, node)| {
            let rule = self.rules.get(node.rule? as usize)?;
            let mut levels = levels(&self.tree, id);
            levels.reverse();
            Some((rule, levels))
        })
    }
}
