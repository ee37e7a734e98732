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

/// Whether values of this key may be secrets.
///
/// ```
/// assert!(tollgate_rules::may_be_secret("X-Auth-Token"));
/// assert!(!tollgate_rules::may_be_secret("user"));
/// ```
#[must_use]
pub fn may_be_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    SECRET.iter().any(|word| key.contains(word))
}
