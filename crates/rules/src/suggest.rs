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

/// Returns whether a name is most probably meant as a known one: the same apart from case and separators, or with one
/// letter too many, missing, replaced or swapped. Stricter than [`closest`], because the name may be right: the first
/// letter is the same, or swapped, and of a short name the last one too.
pub(crate) fn is_slip_of(name: &str, known: &str) -> bool {
    let bare = |text: &str| -> String {
        text.chars().filter(|c| !matches!(c, '_' | '-' | '.' | ' ')).map(|c| c.to_ascii_lowercase()).collect()
    };
    let (name, known) = (bare(name), bare(known));
    if name == known {
        return true;
    }
    // Names may be long: what differs in length by more cannot be near.
    if name.len().abs_diff(known.len()) > 1 || distance(&name, &known) != 1 {
        return false;
    }
    let sorted = |text: &str| {
        let mut bytes = text.as_bytes().to_vec();
        bytes.sort_unstable();
        bytes
    };
    let is_swapped = sorted(&name) == sorted(&known);
    let is_short = known.len() < 6;
    let ends_alike =
        name.chars().next_back() == known.chars().next_back() || name.strip_suffix('s') == Some(&known);
    let is_replaced = name.len() == known.len();
    is_swapped || name.chars().next() == known.chars().next() && (!is_short || ends_alike && !is_replaced)
}

/// Returns whether two texts differ in at most one edit, apart from case.
pub(crate) fn is_one_edit(one: &str, other: &str) -> bool {
    one.len().abs_diff(other.len()) <= 4 && distance(&one.to_lowercase(), &other.to_lowercase()) <= 1
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
