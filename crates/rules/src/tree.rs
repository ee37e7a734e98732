//! Rule tree of a domain, laid out for matching.
//!
//! At each level a key is found by linear search if there are few, by hash beyond that; a value by hash; wildcards by
//! their index. So a match costs the same among ten rules as among a hundred thousand.

use crate::network::Prefix;
use crate::pattern::{Pattern, PatternIndex};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// A descriptor's condition on one key.
#[derive(Clone, Debug)]
pub(crate) struct Element {
    pub(crate) key: Box<str>,
    pub(crate) test: ValueTest,
}

/// The condition on the value.
#[derive(Clone, Debug)]
pub(crate) enum ValueTest {
    /// Any value, with a counter per value.
    Any,
    /// Exactly this value.
    Exact(Box<str>),
    /// Any value that matches the pattern, with a counter per value.
    Like(Pattern),
    /// Any value that matches the pattern, with one counter for all.
    Shared(Pattern),
    /// An address, with one counter per network.
    Network(Prefix),
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.key)?;
        match &self.test {
            ValueTest::Any => Ok(()),
            ValueTest::Exact(value) => write!(f, "={value}"),
            ValueTest::Like(pattern) | ValueTest::Shared(pattern) => write!(f, "={}", pattern.text()),
            ValueTest::Network(prefix) => prefix.fmt(f),
        }
    }
}

/// One descriptor of the file.
#[derive(Clone, Debug)]
pub(crate) struct TreeNode {
    pub(crate) element: Element,
    /// Whether the key's values may be secrets.
    pub(crate) is_secret: bool,
    /// Whether metrics of envoyproxy/ratelimit have the value of the request here (`value_to_metric`).
    pub(crate) shows_value: bool,
    /// Index of the parent node; the root is its own parent.
    pub(crate) parent: u32,
    /// Rule of the descriptor, if it limits or exempts anything.
    pub(crate) rule: Option<u32>,
    pub(crate) children: Level,
}

/// The descriptors below one node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level {
    keys: Vec<KeyIndex>,
    /// Hash index, used only beyond [`Self::MAX_LINEAR`] keys.
    by_name: HashMap<Box<str>, u32, RandomState>,
}

/// The descriptors of one level with the same key.
#[derive(Clone, Debug)]
pub(crate) struct KeyIndex {
    pub(crate) name: Box<str>,
    pub(crate) exact: HashMap<Box<str>, u32, RandomState>,
    pub(crate) patterns: PatternIndex,
    pub(crate) networks: Vec<(Prefix, u32)>,
    pub(crate) any: Option<u32>,
    /// Whether this is the key that every request has, with one value: [`GLOBAL`].
    pub(crate) is_global: bool,
    /// Whether only `any` is set, so that nothing depends on the value.
    pub(crate) is_plain: bool,
}

/// The attribute that every request has, and its only value: a rule on it limits the total.
pub const GLOBAL: (&str, &str) = ("global", "aggregate");

impl Level {
    /// The maximum number of keys for which a linear search is faster than hashing.
    const MAX_LINEAR: usize = 8;

    pub(crate) fn insert(&mut self, element: &Element, node: u32) {
        let at = self.position(&element.key).unwrap_or_else(|| {
            self.keys.push(KeyIndex::new(&element.key));
            let last = self.keys.len() - 1;
            match self.keys.len() {
                n if n <= Self::MAX_LINEAR => {}
                n if n == Self::MAX_LINEAR + 1 => (0..n).for_each(|i| self.index_by_name(i)),
                _ => self.index_by_name(last),
            }
            last
        });
        let index = &mut self.keys[at];
        match &element.test {
            ValueTest::Any => index.any = Some(node),
            ValueTest::Exact(value) => {
                index.exact.insert(value.clone(), node);
            }
            ValueTest::Like(pattern) | ValueTest::Shared(pattern) => {
                index.patterns.push(pattern.clone(), node);
            }
            ValueTest::Network(prefix) => index.networks.push((*prefix, node)),
        }
        index.is_plain = index.exact.is_empty() && index.patterns.is_empty() && index.networks.is_empty();
    }

    /// Returns whether the level has a descriptor with the same key and value.
    pub(crate) fn contains(&self, element: &Element) -> bool {
        let Some(index) = self.key(&element.key) else { return false };
        match &element.test {
            ValueTest::Any => index.any.is_some(),
            ValueTest::Exact(value) => index.exact.contains_key(value),
            ValueTest::Like(pattern) | ValueTest::Shared(pattern) => index.patterns.contains(pattern.text()),
            ValueTest::Network(prefix) => index.networks.iter().any(|(known, _)| known == prefix),
        }
    }

    fn index_by_name(&mut self, i: usize) {
        self.by_name.insert(self.keys[i].name.clone(), u32::try_from(i).unwrap_or(u32::MAX));
    }

    #[inline]
    fn position(&self, key: &str) -> Option<usize> {
        if self.by_name.is_empty() {
            return self.keys.iter().position(|index| *index.name == *key);
        }
        self.by_name.get(key).map(|i| *i as usize)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the keys of the level, if they are few enough for a linear search.
    #[inline]
    pub(crate) fn is_small(&self) -> Option<&[KeyIndex]> {
        self.by_name.is_empty().then_some(&self.keys)
    }

    /// Returns all keys of the level.
    pub(crate) fn keys(&self) -> &[KeyIndex] {
        &self.keys
    }

    #[inline]
    pub(crate) fn key(&self, key: &str) -> Option<&KeyIndex> {
        self.position(key).map(|i| &self.keys[i])
    }
}

impl KeyIndex {
    fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            exact: HashMap::default(),
            patterns: PatternIndex::default(),
            networks: Vec::new(),
            any: None,
            is_global: name == GLOBAL.0,
            is_plain: true,
        }
    }

    /// Returns the node of the exact value, which may be written with a `*`, else of the first wildcard.
    #[inline]
    pub(crate) fn specific(&self, value: &str) -> Option<u32> {
        if !self.exact.is_empty()
            && let Some(node) = self.exact.get(value)
        {
            return Some(*node);
        }
        if self.patterns.is_empty() { None } else { self.patterns.find(value) }
    }

    /// Returns the node of the first network key that accepts this value as an address.
    pub(crate) fn network(&self, value: &str) -> Option<u32> {
        self.networks.iter().find(|(prefix, _)| prefix.network(value).is_some()).map(|(_, node)| *node)
    }
}
