//! Wildcards without their rules: masks a value with the patterns that it matches.

use super::Pattern;

/// A list of wildcard patterns.
#[derive(Clone, Debug, Default)]
pub struct Wildcards(Vec<Pattern>);

impl Wildcards {
    /// Creates the list from those texts that contain a `*`.
    #[must_use]
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self(texts.into_iter().filter_map(Pattern::new).filter(|pattern| !pattern.matches_all()).collect())
    }

    /// Returns a value that is matched by all the patterns that match `value`: their fixed parts around `instead`. So
    /// it reveals only what the patterns themselves contain. Other patterns may match it only through the text of
    /// `instead`, or through an order of inner parts that the value does not have.
    ///
    /// ```
    /// let wildcards = tollgate_rules::Wildcards::new(["bot-*", "bot-a*", "*@example.com", "*-abc*"]);
    /// assert_eq!(wildcards.mask("bot-abc@example.com", "?"), "bot-a?-abc?@example.com");
    /// assert_eq!(wildcards.mask("alice", "?"), "?");
    /// ```
    #[must_use]
    pub fn mask(&self, value: &str, instead: &str) -> String {
        let (mut first, mut last, mut middles) = ("", "", String::new());
        for pattern in self.0.iter().filter(|pattern| pattern.matches(value)) {
            let (prefix, suffix) =
                (&pattern.text[..pattern.prefix], &pattern.text[pattern.text.len() - pattern.suffix..]);
            // All of them match the same value at its start and end, so the longest contains the others.
            first = if prefix.len() > first.len() { prefix } else { first };
            last = if suffix.len() > last.len() { suffix } else { last };
            for middle in pattern.middles() {
                middles.push_str(middle);
                middles.push_str(instead);
            }
        }
        format!("{first}{instead}{middles}{last}")
    }
}
