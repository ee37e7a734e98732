//! What the name of an attribute tells about its values: whether they tell who asks, and whether they may be secrets. The
//! values themselves tell neither.

/// Keys whose values do not tell who asks.
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

/// Names with one of these in them may hold secrets.
const SECRET_WORDS: [&str; 9] =
    ["key", "token", "secret", "auth", "pass", "session", "cookie", "credential", "signature"];

/// Whether values of this key tell who asks.
#[must_use]
pub fn identifies_caller(key: &str) -> bool {
    !NOT_IDENTIFYING.contains(&key)
}

/// Whether values of this key may be secrets. Keys that do not tell who asks hold none, whatever they are called: the
/// `generic_key` of Envoy is a word of its configuration.
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
    // Names may be long, and callers' own: most places are passed over by their first letter.
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

    /// A word that is not found is a key in the logs.
    #[test]
    fn every_word_is_found_wherever_it_stands() {
        for word in SECRET_WORDS {
            for name in [word.to_owned(), word.to_uppercase(), format!("x-{word}"), format!("é{word}s")] {
                assert!(may_be_secret(&name), "{name}");
            }
            assert!(!may_be_secret(&word[..word.len() - 1]), "{word}");
        }
        assert!(!may_be_secret("") && !may_be_secret("user") && !may_be_secret("generic_key"));
    }
}
