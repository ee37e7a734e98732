//! What the name of an attribute tells about its values: whether they tell who asks, and whether they may be secrets. The
//! values themselves tell neither.

/// Keys whose values do not tell who asks.
const NOBODYS: [&str; 9] = [
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
const SECRET: [&str; 9] =
    ["key", "token", "secret", "auth", "pass", "session", "cookie", "credential", "signature"];

/// Whether values of this key tell who asks.
#[must_use]
pub fn tells_who(key: &str) -> bool {
    !NOBODYS.contains(&key)
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
    let holds = |word: &str| {
        key.as_bytes().windows(word.len()).any(|part| part.eq_ignore_ascii_case(word.as_bytes()))
    };
    tells_who(key) && SECRET.iter().any(|word| holds(word))
}
