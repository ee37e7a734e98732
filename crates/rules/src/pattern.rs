//! Values with `*` in them, and finding the first of thousands that matches.
//!
//! A pattern is fixed parts with anything between them. An index groups patterns by the lengths of their first and last
//! fixed part: for one group, a hash of the value's ends finds the few patterns that can match. So the cost grows with
//! the number of different lengths, not of patterns. A trie was rejected: it handles prefixes only. A regular
//! expression set was rejected: it compiles slowly and cannot say which pattern came first without trying all.

use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::hash::BuildHasher;

/// A value with wildcards: `*` is zero or more characters.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    text: Box<str>,
    prefix: usize,
    suffix: usize,
    /// Where the fixed parts between the outer ones stand in `text`.
    middles: Box<[(usize, usize)]>,
}

impl Pattern {
    /// `None` if there is no `*` in it.
    pub(crate) fn new(text: &str) -> Option<Self> {
        let first = text.find('*')?;
        let last = text.rfind('*')?;
        let mut middles = Vec::new();
        let mut start = first + 1;
        for (star, _) in text.match_indices('*').skip(1) {
            if star > start {
                middles.push((start, star));
            }
            start = star + 1;
        }
        Some(Self {
            text: text.into(),
            prefix: first,
            suffix: text.len() - last - 1,
            middles: middles.into(),
        })
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    fn prefix(&self) -> &[u8] {
        &self.text.as_bytes()[..self.prefix]
    }

    fn suffix(&self) -> &[u8] {
        &self.text.as_bytes()[self.text.len() - self.suffix..]
    }

    /// Whether the value is the fixed parts in their order, none overlapping, with anything between.
    pub(crate) fn matches(&self, value: &str) -> bool {
        let bytes = value.as_bytes();
        if bytes.len() < self.prefix + self.suffix
            || !bytes.starts_with(self.prefix())
            || !bytes.ends_with(self.suffix())
        {
            return false;
        }
        // The ends matched whole characters, so the cuts are at character bounds. Taking each middle part at its
        // first place leaves the most room for the rest.
        let mut rest = &value[self.prefix..value.len() - self.suffix];
        for (start, end) in &self.middles {
            match rest.find(&self.text[*start..*end]) {
                Some(at) => rest = &rest[at + end - start..],
                None => return false,
            }
        }
        true
    }

    /// Whether it matches every value.
    pub(crate) fn takes_all(&self) -> bool {
        self.text.bytes().all(|byte| byte == b'*')
    }

    /// Whether everything that `other` matches is surely matched by this one. May say no where yes is true.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        self.middles.is_empty()
            && other.prefix().starts_with(self.prefix())
            && other.suffix().ends_with(self.suffix())
    }
}

/// Patterns in the order of the file, each with what it stands for.
#[derive(Clone, Debug, Default)]
pub(crate) struct PatternIndex {
    patterns: Vec<(Pattern, u32)>,
    /// Only beyond [`Self::FEW`] patterns.
    groups: Vec<Group>,
    hasher: RandomState,
}

/// Patterns whose outer parts have the same lengths.
#[derive(Clone, Debug)]
struct Group {
    prefix: usize,
    suffix: usize,
    /// The first of them in the file.
    first: u32,
    by_ends: HashMap<u64, Vec<u32>, RandomState>,
}

impl PatternIndex {
    /// Up to here trying one after the other is faster.
    const FEW: usize = 8;

    pub(crate) fn push(&mut self, pattern: Pattern, target: u32) {
        self.patterns.push((pattern, target));
        let last = self.patterns.len() - 1;
        match self.patterns.len() {
            n if n <= Self::FEW => {}
            n if n == Self::FEW + 1 => (0..n).for_each(|i| self.file(i)),
            _ => self.file(last),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Pattern, u32)> {
        self.patterns.iter()
    }

    fn file(&mut self, i: usize) {
        let (prefix, suffix) = (self.patterns[i].0.prefix, self.patterns[i].0.suffix);
        let hash = self.ends(self.patterns[i].0.prefix(), self.patterns[i].0.suffix());
        let id = u32::try_from(i).unwrap_or(u32::MAX);
        let at = self.groups.iter().position(|group| (group.prefix, group.suffix) == (prefix, suffix));
        let at = at.unwrap_or_else(|| {
            self.groups.push(Group { prefix, suffix, first: id, by_ends: HashMap::default() });
            self.groups.len() - 1
        });
        self.groups[at].by_ends.entry(hash).or_default().push(id);
    }

    fn ends(&self, prefix: &[u8], suffix: &[u8]) -> u64 {
        self.hasher.hash_one((prefix, suffix))
    }

    /// What the first pattern that matches stands for.
    #[inline]
    pub(crate) fn find(&self, value: &str) -> Option<u32> {
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
                // Groups stand in the order of their first pattern: none of the rest can be earlier.
                break;
            }
            if bytes.len() < group.prefix + group.suffix {
                continue;
            }
            let hash = self.ends(&bytes[..group.prefix], &bytes[bytes.len() - group.suffix..]);
            let Some(candidates) = group.by_ends.get(&hash) else { continue };
            let found = candidates
                .iter()
                .take_while(|id| **id < best)
                .find(|id| self.patterns[**id as usize].0.matches(value));
            best = found.map_or(best, |id| *id);
        }
        self.patterns.get(best as usize).map(|(_, target)| *target)
    }
}

#[cfg(test)]
mod tests;
