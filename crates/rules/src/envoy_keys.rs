//! The names of descriptors in envoyproxy/ratelimit: in its metrics, its configuration dump and its errors. A name is the
//! domain, then `key` or `key_value` for each level, joined by dots.

use crate::rule::Rule;
use crate::ruleset::Domain;
use crate::tree::{Element, TreeNode, ValueTest};

/// Returns the name of a node of a tree.
pub(crate) fn path(domain: &str, tree: &[TreeNode], node: u32) -> String {
    let mut levels: Vec<String> = levels(tree, node).into_iter().map(|level| level.name).collect();
    levels.push(domain.to_owned());
    levels.reverse();
    levels.join(".")
}

/// One level of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvoyLevel {
    /// `key`, or `key_value`.
    pub name: String,
    /// Whether metrics have the value of the request here (`value_to_metric`).
    pub shows_value: bool,
    /// Whether all values of a wildcard share a counter, and so a metric (`share_threshold`).
    pub is_shared: bool,
}

/// Returns the levels of a node, the innermost first.
fn levels(tree: &[TreeNode], mut node: u32) -> Vec<EnvoyLevel> {
    let mut levels = Vec::new();
    while let Some(TreeNode { element, parent, shows_value, .. }) =
        tree.get(node as usize).filter(|_| node != 0)
    {
        levels.push(EnvoyLevel {
            name: level(element),
            shows_value: *shows_value,
            is_shared: matches!(element.test, ValueTest::Shared(_)),
        });
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
    /// Returns every rule with its levels as envoyproxy/ratelimit names them.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let text = "{domain: d, descriptors: [{key: a, value: b, descriptors: [{key: c, limit: 1/hour}]}]}";
    /// let rules = Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap();
    /// let (_, levels) = rules.domain("d").unwrap().envoy_keys().next().unwrap();
    /// assert_eq!((levels[0].name.as_str(), levels[1].name.as_str()), ("a_b", "c"));
    /// ```
    pub fn envoy_keys(&self) -> impl Iterator<Item = (&Rule, Vec<EnvoyLevel>)> {
        (0_u32..).zip(&self.tree).filter_map(|(id, node)| {
            let rule = self.rules.get(node.rule? as usize)?;
            let mut levels = levels(&self.tree, id);
            levels.reverse();
            Some((rule, levels))
        })
    }
}
