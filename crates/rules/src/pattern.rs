//! Wildcard patterns: values that contain `*`.

mod index;
mod wildcards;

pub(crate) use index::PatternIndex;
pub use wildcards::Wildcards;

/// A value with wildcards: `*` matches zero or more characters.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    text: Box<str>,
    prefix: usize,
    suffix: usize,
    /// Ranges in `text` of the fixed parts between the outer ones.
    middles: Box<[(usize, usize)]>,
}

impl Pattern {
    /// Creates a pattern. Returns `None` if the text contains no `*`.
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

    fn middles(&self) -> impl Iterator<Item = &str> {
        self.middles.iter().map(|(start, end)| &self.text[*start..*end])
    }

    /// Returns the first fixed part between the outer ones.
    fn middle(&self) -> Option<&[u8]> {
        self.middles.first().map(|(start, end)| &self.text.as_bytes()[*start..*end])
    }

    fn suffix(&self) -> &[u8] {
        &self.text.as_bytes()[self.text.len() - self.suffix..]
    }

    /// Returns whether the value consists of the fixed parts in order, without overlap, with anything between them.
    pub(crate) fn matches(&self, value: &str) -> bool {
        let bytes = value.as_bytes();
        if bytes.len() < self.prefix + self.suffix
            || !bytes.starts_with(self.prefix())
            || !bytes.ends_with(self.suffix())
        {
            return false;
        }
        // The ends matched whole characters, so the cuts are at character boundaries. Matching each middle part at its
        // first occurrence leaves the most room for the rest.
        let mut rest = &value[self.prefix..value.len() - self.suffix];
        for (start, end) in &self.middles {
            match rest.find(&self.text[*start..*end]) {
                Some(at) => rest = &rest[at + end - start..],
                None => return false,
            }
        }
        true
    }

    /// Returns whether the pattern matches every value.
    pub(crate) fn matches_all(&self) -> bool {
        self.text.bytes().all(|byte| byte == b'*')
    }

    /// Returns whether this pattern certainly matches everything that `other` matches. May return a false negative.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        self.middles.is_empty()
            && other.prefix().starts_with(self.prefix())
            && other.suffix().ends_with(self.suffix())
    }
}

#[cfg(test)]
mod tests;
