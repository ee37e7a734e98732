//! Outline of a domain: its descriptors nested as in the file.

use crate::rule::Rule;
use crate::ruleset::Domain;

/// One descriptor.
#[derive(Clone, Debug)]
pub struct OutlineNode<'r> {
    /// Condition: `endpoint=POST /orders`.
    pub element: String,
    /// Nesting depth: the number of ancestors.
    pub depth: u32,
    /// Rule of the descriptor, if it limits or exempts anything.
    pub rule: Option<&'r Rule>,
}

impl Domain {
    /// Returns the descriptors, each after its parent, in the order of the file.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let text = "
    /// domain: d
    /// descriptors:
    ///   - key: api_key
    ///     descriptors:
    ///       - {key: endpoint, value: POST /login, limit: 5/minute}
    /// ";
    /// let rules = Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap();
    /// let outline = rules.domain("d").unwrap().outline();
    /// let listed: Vec<_> = outline.iter().map(|node| (node.depth, &*node.element, node.rule.is_some())).collect();
    /// assert_eq!(listed, [(0, "api_key", false), (1, "endpoint=POST /login", true)]);
    /// ```
    #[must_use]
    pub fn outline(&self) -> Vec<OutlineNode<'_>> {
        let mut depths = vec![0; self.tree.len()];
        let mut outline = Vec::with_capacity(self.tree.len().saturating_sub(1));
        for (at, node) in self.tree.iter().enumerate().skip(1) {
            depths[at] = depths[node.parent as usize] + 1;
            outline.push(OutlineNode {
                element: node.element.to_string(),
                depth: depths[at] - 1,
                rule: node.rule.map(|id| &self.rules[id as usize]),
            });
        }
        outline
    }
}
