//! Sensitivity of attributes: whether their values identify a caller, and whether they may be secrets. Both are derived
//! from the attribute's name; the values themselves reveal neither.

/// Keys whose values do not identify a caller.
const NOT_IDENTIFYING: [&str; 9] = [
    "destination_cluster",
    "endpoint",
    "generic_key",
    "host",
    "method",
    "path",
    "route",
    "service",
    "source_cluster",
];

/// Words that mark an attribute as a possible secret when its name contains one of them.
const SECRET_WORDS: [&str; 9] =
    ["key", "token", "secret", "auth", "pass", "session", "cookie", "credential", "signature"];

/// Returns whether values of this key identify a caller.
#[must_use]
pub fn identifies_caller(key: &str) -> bool {
    !NOT_IDENTIFYING.contains(&key)
}

/// Returns whether values of this key may be secrets. Keys that do not identify a caller never are, whatever their
/// name: the `generic_key` of Envoy is a constant in its configuration.
///
/// ```
/// use tollgate_rules::may_be_secret;
/// assert!(may_be_secret("api_key") && may_be_secret("X-Auth-Token"));
/// assert!(!may_be_secret("user") && !may_be_secret("generic_key"));
/// ```
#[must_use]
pub fn may_be_secret(key: &str) -> bool {
    let begins = |rest: &[u8], word: &str| {
        rest.get(..word.len()).is_some_and(|part| part.eq_ignore_ascii_case(word.as_bytes()))
    };
    // Names may be long and chosen by callers: most positions are skipped by their first letter.
    let holds = |at: usize| {
        let rest = &key.as_bytes()[at..];
        matches!(rest[0].to_ascii_lowercase(), b'a' | b'c' | b'k' | b'p' | b's' | b't')
            && SECRET_WORDS.iter().any(|word| begins(rest, word))
    };
    identifies_caller(key) && (0..key.len()).any(holds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An undetected word would put a key into the logs.
    #[test]
    fn every_word_is_found_in_any_position() {
        for word in SECRET_WORDS {
            for name in [word.to_owned(), word.to_uppercase(), format!("x-{word}"), format!("é{word}s")] {
                assert!(may_be_secret(&name), "{name}");
            }
            assert!(!may_be_secret(&word[..word.len() - 1]), "{word}");
        }
        assert!(!may_be_secret("") && !may_be_secret("user") && !may_be_secret("generic_key"));
    }
}
