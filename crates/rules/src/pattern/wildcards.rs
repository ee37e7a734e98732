//! Wildcards without their rules: replaces a value by the pattern that it matches.

use super::Pattern;

/// Values with `*` in them.
#[derive(Clone, Debug, Default)]
pub struct Wildcards(Vec<Pattern>);

impl Wildcards {
    /// Those of these texts that have a `*`.
    #[must_use]
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self(texts.into_iter().filter_map(Pattern::new).filter(|pattern| !pattern.matches_all()).collect())
    }

    /// A value that all of these match which match `value`: their fixed parts around `instead`. So it tells of the value what
    /// they say themselves, and no more. Others may match it only by what stands in `instead`, or by an order of inner parts
    /// that the value has not.
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
            // All of them begin and end the same value, so the longest has the others in it.
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
