//! "Did you mean" suggestions: the known word nearest to an unknown one.

/// Returns the nearest of `known`, if it is near enough to be a plausible correction.
///
/// ```
/// assert_eq!(tollgate_rules::closest("lmit", &["limit", "burst"]), Some("limit"));
/// assert_eq!(tollgate_rules::closest("color", &["limit", "burst"]), None);
/// ```
#[must_use]
pub fn closest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let word = word.to_ascii_lowercase();
    let most = (word.chars().count() / 3).clamp(1, 3);
    known
        .iter()
        .map(|candidate| (distance(&word, candidate), *candidate))
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Returns the edit distance between two words: insert, delete, replace, swap neighbors.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = last;
        last = row;
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{closest, distance};

    #[test]
    fn a_typo_suggests_the_closest_key() {
        let known = ["rate_limit", "key", "value", "requests_per_unit", "shadow_mode"];
        for (written, meant) in [
            ("rate_limits", Some("rate_limit")),
            ("vlaue", Some("value")),
            ("request_per_unit", Some("requests_per_unit")),
            ("Key", Some("key")),
            ("shadow-mode", Some("shadow_mode")),
            ("colour", None),
        ] {
            assert_eq!(closest(written, &known), meant, "{written}");
        }
    }

    #[test]
    fn distance_counts_edits() {
        for (a, b, edits) in [("", "", 0), ("a", "", 1), ("ab", "ba", 1), ("kitten", "sitting", 3)] {
            assert_eq!(distance(a, b), edits, "{a} {b}");
        }
    }
}
