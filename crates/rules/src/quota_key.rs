//! Quota keys: the attributes that quotas can be about. A rule counts by an attribute if each value of it has a counter of
//! its own, so that another limit for one value changes nothing for the others.
//!
//! Where the quotas of several attributes apply to one request (its `tenant` and its `user_id`), each rule takes the terms
//! of the attribute that is last in its path, which is the narrowest. Rejected: one quota for the whole request, because
//! the tier of one user would then lift the limit that all users of the tenant share.

use crate::overrides::{CALLER_KEY, Overridable, canonical};
use crate::rule::CostFrom;
use crate::ruleset::{Domain, Ruleset};
use crate::tree::{Element, ValueTest};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// The rules that count by one attribute.
#[derive(Clone, Debug, Default)]
pub(crate) struct QuotaKey {
    /// Their numbers, each with the place of the attribute in its path, from 1; sorted.
    pub(crate) places: Arc<[(u32, u8)]>,
    /// Numbers of their domains.
    domains: Vec<usize>,
    /// Whether a rule counts any value of it, not only some fixed ones.
    counts_any: bool,
    /// The rules by all their names; computed on first use.
    names: OnceLock<Overridable>,
}

/// All quota keys of a rule set.
pub(crate) type QuotaKeys = HashMap<Box<str>, QuotaKey, foldhash::fast::RandomState>;

impl Ruleset {
    /// Returns the attributes that rules take costs from.
    pub fn cost_attributes(&self) -> impl Iterator<Item = &str> {
        let sources = self.rules().iter().flat_map(|rule| {
            std::iter::once(&rule.cost).chain(rule.all_limits().filter_map(|limit| limit.cost.as_deref()))
        });
        sources.filter_map(|cost| match cost {
            CostFrom::Attribute(name) => Some(name.as_str()),
            CostFrom::Request | CostFrom::Fixed(_) => None,
        })
    }

    /// Returns whether a rule takes its cost from this attribute.
    #[must_use]
    pub fn is_cost_attribute(&self, name: &str) -> bool {
        self.cost_attributes().any(|known| known == name)
    }

    /// Returns whether a rule has a counter for each value of this attribute, so that quotas can be about it.
    #[must_use]
    pub fn is_quota_key(&self, key: &str) -> bool {
        self.quota_keys().get(key).is_some_and(|known| known.counts_any)
    }

    /// Returns the attributes that quotas can be about, sorted.
    #[must_use]
    pub fn quota_key_names(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.quota_keys().iter().filter(|(_, key)| key.counts_any).map(|(name, _)| &**name).collect();
        names.sort_unstable();
        names
    }

    /// Returns whether a rule of this domain counts by this attribute.
    #[must_use]
    pub fn counts_by(&self, domain: &str, key: &str) -> bool {
        let at = self.domain_number(domain);
        at.zip(self.quota_keys().get(key)).is_some_and(|(at, key)| key.domains.contains(&at))
    }

    /// Returns whether a rule counts by this attribute.
    #[must_use]
    pub fn rule_counts_by(&self, rule: u32, key: &str) -> bool {
        let places = self.quota_keys().get(key).map(|key| &key.places);
        places.is_some_and(|places| places.binary_search_by_key(&rule, |(id, _)| *id).is_ok())
    }

    pub(crate) fn quota_keys(&self) -> &QuotaKeys {
        self.quota_keys.get_or_init(|| self.index_quota_keys())
    }

    /// Returns the rules that count by an attribute, by all their names.
    pub(crate) fn overridable(&self, key: &str) -> Option<&Overridable> {
        let known = self.quota_keys().get(key)?;
        Some(known.names.get_or_init(|| self.index_overridable(key)))
    }

    fn index_quota_keys(&self) -> QuotaKeys {
        let mut places: HashMap<&str, Vec<(u32, u8)>> = HashMap::new();
        let mut keys = QuotaKeys::default();
        for (number, domain) in self.domains().enumerate() {
            for (node, rule) in domain.rule_nodes() {
                for (place, element) in (1_u8..).zip(domain.elements(node)) {
                    if !counts_by_value(element) {
                        continue;
                    }
                    let own = places.entry(&element.key).or_default();
                    // Of a key that occurs twice in a path, the last place counts.
                    own.pop_if(|(other, _)| *other == rule);
                    own.push((rule, place));
                    let key = keys.entry(element.key.clone()).or_default();
                    key.counts_any |= !matches!(element.test, ValueTest::Exact(_));
                    if key.domains.last() != Some(&number) {
                        key.domains.push(number);
                    }
                }
            }
        }
        for (name, mut own) in places {
            own.sort_unstable();
            if let Some(key) = keys.get_mut(name) {
                key.places = own.into();
            }
        }
        keys
    }

    fn index_overridable(&self, key: &str) -> Overridable {
        let (mut names, mut loose) = (Overridable::default(), Overridable::default());
        for (at, domain) in self.domains().enumerate() {
            for (node, rule) in domain.rule_nodes() {
                let elements: Vec<&Element> = domain.elements(node).collect();
                let is_caller = |element: &&Element| &*element.key == key && counts_by_value(element);
                let Some(last) = elements.iter().rposition(is_caller) else { continue };
                let words: Vec<String> = elements.iter().map(ToString::to_string).collect();
                let mut own =
                    vec![canonical(key, &words.join("/")), canonical(key, &self.rules()[rule as usize].name)];
                if words.len() > 1 && words[0] == key {
                    own.push(canonical(key, &words[1..].join("/")));
                }
                // The rule on networks of the caller alone is its default too.
                if words.len() == 1 && matches!(elements[0].test, ValueTest::Network(_)) {
                    own.push(key.to_owned());
                }
                own.sort();
                own.dedup();
                for name in own {
                    names.entry(name).or_default().push((at, node));
                }
                let after = &words[last + 1..];
                let loosely =
                    if after.is_empty() { key.to_owned() } else { canonical(key, &after.join("/")) };
                loose.entry(loosely).or_default().push((at, node));
            }
        }
        // Where no rule is on the caller alone, those whose path ends with the caller are meant, and so on.
        for (name, nodes) in loose {
            names.entry(name).or_insert(nodes);
        }
        names
    }
}

impl Domain {
    /// Returns the nodes that have a rule, with the rule's number.
    pub(crate) fn rule_nodes(&self) -> impl Iterator<Item = (u32, u32)> {
        (0..).zip(&self.tree).filter_map(|(at, node)| Some((at, node.rule?)))
    }

    /// Returns the conditions on the path to a node, from the first level down.
    pub(crate) fn elements(&self, node: u32) -> impl Iterator<Item = &Element> {
        self.path(node).into_iter().map(|node| &self.tree[node as usize].element)
    }
}

/// Returns whether each value of this condition's key has its own counter. The clients of a network share one:
/// a quota of one of them must not change or reset it for the others.
pub(crate) fn counts_by_value(element: &Element) -> bool {
    match element.test {
        ValueTest::Any | ValueTest::Like(_) | ValueTest::Exact(_) => true,
        ValueTest::Network(prefix) => prefix.is_one_client(),
        ValueTest::Shared(_) => false,
    }
}

/// Returns whether the quotas of an attribute give their tier to rules that count by none of a request's quota keys, too.
pub(crate) fn is_general(key: &str) -> bool {
    key == CALLER_KEY
}
