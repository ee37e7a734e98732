//! Pattern index: finds the first of thousands of patterns that matches a value.
//!
//! Patterns are grouped by the lengths of their first and last fixed part: for one group, a hash of the value's ends
//! finds the few candidates. Where many have the same ends (`*chrome*`, `*firefox*`, ...), a hash of each substring of
//! the value finds those whose first inner part it contains. So the cost grows with the number of different lengths and
//! the length of the value, not with the number of patterns. Rejected: a trie, because it handles prefixes only, and a
//! set of regular expressions, because it compiles slowly and cannot report the first match without trying all.

use super::Pattern;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::hash::BuildHasher;

/// Patterns in the order of the file, each with its associated value.
#[derive(Clone, Debug, Default)]
pub(crate) struct PatternIndex {
    patterns: Vec<(Pattern, u32)>,
    /// Indexes of the patterns, by how they are written.
    by_text: HashMap<Box<str>, u32, RandomState>,
    /// Hash index, used only beyond [`Self::MAX_LINEAR`] patterns.
    groups: Vec<Group>,
    hasher: RandomState,
}

/// Patterns whose outer parts have the same lengths.
#[derive(Clone, Debug)]
struct Group {
    prefix: usize,
    suffix: usize,
    /// Index of the first pattern of the group in the file.
    first: u32,
    by_ends: HashMap<u64, Bucket, RandomState>,
}

/// Patterns with the same outer parts, except for a rare hash collision, which costs one extra comparison.
#[derive(Clone, Debug, Default)]
struct Bucket {
    /// Patterns tried one by one, in order: all while they are few, beyond that those without an inner part.
    tried: Vec<u32>,
    /// Other patterns, by the hash of their first inner part.
    by_middle: HashMap<u64, Vec<u32>, RandomState>,
    /// Lengths of these inner parts.
    middles: Vec<usize>,
}

impl PatternIndex {
    /// The maximum number of patterns for which a linear search is faster.
    const MAX_LINEAR: usize = 8;

    pub(crate) fn push(&mut self, pattern: Pattern, target: u32) {
        let last = self.patterns.len();
        let own = self.by_text.entry(pattern.text().into());
        own.or_insert(u32::try_from(last).unwrap_or(u32::MAX));
        self.patterns.push((pattern, target));
        match self.patterns.len() {
            n if n <= Self::MAX_LINEAR => {}
            n if n == Self::MAX_LINEAR + 1 => (0..n).for_each(|i| self.index(i)),
            _ => self.index(last),
        }
    }

    /// Returns whether it has a pattern that is written so.
    pub(crate) fn contains(&self, text: &str) -> bool {
        self.by_text.contains_key(text)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Pattern, u32)> {
        self.patterns.iter()
    }

    fn index(&mut self, i: usize) {
        let pattern = &self.patterns[i].0;
        let hash = self.hasher.hash_one((pattern.prefix(), pattern.suffix()));
        let id = u32::try_from(i).unwrap_or(u32::MAX);
        let (prefix, suffix) = (pattern.prefix, pattern.suffix);
        let at = self.groups.iter().position(|group| (group.prefix, group.suffix) == (prefix, suffix));
        let at = at.unwrap_or_else(|| {
            self.groups.push(Group { prefix, suffix, first: id, by_ends: HashMap::default() });
            self.groups.len() - 1
        });
        self.groups[at].by_ends.entry(hash).or_default().push(id, &self.patterns, &self.hasher);
    }

    /// Returns the value associated with the pattern that is written as `value` is, else with the first that matches.
    #[inline]
    pub(crate) fn find(&self, value: &str) -> Option<u32> {
        if value.as_bytes().contains(&b'*')
            && let Some(own) = self.by_text.get(value)
        {
            return self.patterns.get(*own as usize).map(|(_, target)| *target);
        }
        if self.groups.is_empty() {
            return self
                .patterns
                .iter()
                .find(|(pattern, _)| pattern.matches(value))
                .map(|(_, target)| *target);
        }
        self.find_in_groups(value)
    }

    fn find_in_groups(&self, value: &str) -> Option<u32> {
        let bytes = value.as_bytes();
        let mut best = u32::MAX;
        for group in &self.groups {
            if group.first >= best {
                // Groups are in the order of their first pattern: none of the rest can be earlier.
                break;
            }
            if bytes.len() < group.prefix + group.suffix {
                continue;
            }
            let (prefix, rest) = bytes.split_at(group.prefix);
            let (inner, suffix) = rest.split_at(rest.len() - group.suffix);
            if let Some(bucket) = group.by_ends.get(&self.hasher.hash_one((prefix, suffix))) {
                best = self.earlier(&bucket.tried, value, best);
                for length in &bucket.middles {
                    for stretch in inner.windows(*length) {
                        if let Some(ids) = bucket.by_middle.get(&self.hasher.hash_one(stretch)) {
                            best = self.earlier(ids, value, best);
                        }
                    }
                }
            }
        }
        self.patterns.get(best as usize).map(|(_, target)| *target)
    }

    /// Returns the first of `ids` that matches, if it is before `best`.
    fn earlier(&self, ids: &[u32], value: &str, best: u32) -> u32 {
        let mut before = ids.iter().take_while(|id| **id < best);
        before.find(|id| self.patterns[**id as usize].0.matches(value)).map_or(best, |id| *id)
    }
}

impl Bucket {
    /// The maximum number of patterns for which a linear search is faster than hashing every substring of a value.
    const MAX_LINEAR: usize = 32;

    fn push(&mut self, id: u32, patterns: &[(Pattern, u32)], hasher: &RandomState) {
        self.tried.push(id);
        if self.tried.len() <= Self::MAX_LINEAR && self.middles.is_empty() {
            return;
        }
        self.tried.retain(|id| {
            let Some(middle) = patterns[*id as usize].0.middle() else { return true };
            if !self.middles.contains(&middle.len()) {
                self.middles.push(middle.len());
            }
            self.by_middle.entry(hasher.hash_one(middle)).or_default().push(*id);
            false
        });
    }
}
