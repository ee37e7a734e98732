//! The patterns against the plainest matcher there is: try every way to stretch each star.

use super::{Pattern, PatternIndex, Wildcards};
use proptest::prelude::*;

/// Recursive, exponential, obviously right.
fn oracle(pattern: &[u8], value: &[u8]) -> bool {
    match pattern.split_first() {
        None => value.is_empty(),
        Some((b'*', rest)) => (0..=value.len()).any(|taken| oracle(rest, &value[taken..])),
        Some((byte, rest)) => value.first() == Some(byte) && oracle(rest, &value[1..]),
    }
}

#[test]
fn stars_match_as_the_contract_says() {
    for (pattern, value, matches) in [
        ("*", "", true),
        ("*", "anything", true),
        ("a*", "a", true),
        ("a*a", "a", false), // the fixed parts may not overlap
        ("a*a", "aa", true),
        ("*/admin/*", "/v1/admin/users", true),
        ("*/admin/*", "/v1/admin", false),
        ("GET *", "GET /x", true),
        ("a**b", "ab", true),
        ("*ab*ab", "ab", false),
        ("*ab*ab", "abab", true),
        ("é*é", "éé", true),
        ("é*", "è", false),
    ] {
        let compiled = Pattern::new(pattern).expect(pattern);
        assert_eq!(compiled.matches(value), matches, "{pattern} {value}");
        assert_eq!(oracle(pattern.as_bytes(), value.as_bytes()), matches, "oracle: {pattern} {value}");
    }
    assert!(Pattern::new("plain").is_none());
}

fn pattern_text() -> impl Strategy<Value = String> {
    ("[abé]{0,3}", proptest::collection::vec("[abé]{0,2}", 0..3), "[abé]{0,3}").prop_map(
        |(first, middles, last)| {
            format!("{first}*{}{last}", middles.iter().map(|m| format!("{m}*")).collect::<String>())
        },
    )
}

/// As envoyproxy/ratelimit finds it, however many there are.
#[test]
fn a_value_written_as_a_pattern_finds_that_pattern() {
    for others in [0, 20] {
        let mut index = PatternIndex::default();
        let texts = ["*".to_owned(), "a*".to_owned(), "a*b".to_owned()];
        for (i, text) in (0_u32..).zip(texts.into_iter().chain((0..others).map(|n| format!("{n}*")))) {
            index.push(Pattern::new(&text).expect("a pattern"), i);
        }
        for (value, expected) in [("a*", 1), ("a*b", 2), ("*", 0), ("a*c", 0), ("ab", 0)] {
            assert_eq!(index.find(value), Some(expected), "{value} among {others}");
        }
        assert!(index.contains("a*") && !index.contains("a"));
    }
}

proptest! {
    #[test]
    fn a_pattern_agrees_with_the_oracle(pattern in pattern_text(), value in "[abé]{0,8}") {
        let compiled = Pattern::new(&pattern).unwrap();
        prop_assert_eq!(compiled.matches(&value), oracle(pattern.as_bytes(), value.as_bytes()));
    }

    /// What stands for a value meets the rules that the value meets.
    #[test]
    fn a_disguise_matches_what_the_value_matches(
        patterns in proptest::collection::vec(pattern_text(), 0..6), value in "[abé]{0,8}",
    ) {
        let all = Wildcards::new(patterns.iter().map(String::as_str));
        let disguised = all.mask(&value, "\u{7f}");
        for pattern in &patterns {
            let pattern = Pattern::new(pattern).unwrap();
            prop_assert!(!pattern.matches(&value) || pattern.matches(&disguised), "{} {disguised}", pattern.text());
            // One without inner parts matches nothing else.
            let ends = pattern.middles().next().is_none();
            prop_assert!(!ends || pattern.matches(&value) == pattern.matches(&disguised), "{} {disguised}", pattern.text());
        }
    }

    #[test]
    fn what_covers_matches_all_that_is_covered(a in pattern_text(), b in pattern_text(), value in "[abé]{0,8}") {
        let (a, b) = (Pattern::new(&a).unwrap(), Pattern::new(&b).unwrap());
        if a.covers(&b) && b.matches(&value) {
            prop_assert!(a.matches(&value), "{} covers {} but not {value}", a.text(), b.text());
        }
    }

    #[test]
    fn the_index_finds_the_first_in_file_order(
        patterns in proptest::collection::vec(prop_oneof![pattern_text(), "[abé]{1,3}".prop_map(|m| format!("*{m}*"))], 0..120),
        values in proptest::collection::vec("[abé]{0,8}", 1..20),
    ) {
        let mut index = PatternIndex::default();
        for (i, pattern) in patterns.iter().enumerate() {
            index.push(Pattern::new(pattern).unwrap(), 100 + i as u32);
        }
        for value in &values {
            let first = patterns.iter().position(|p| oracle(p.as_bytes(), value.as_bytes()));
            prop_assert_eq!(index.find(value), first.map(|i| 100 + i as u32), "{}", value);
        }
    }
}
