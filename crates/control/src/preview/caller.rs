//! Caller of a sampled request: the API key if there is one, else the first attribute that identifies a caller.

use std::hash::BuildHasher;
use tollgate_engine::Check;
use tollgate_replica::pseudonym;
use tollgate_replica::{KeyHasher, prefix};

/// Returns the caller as a number that is never zero.
#[inline]
pub(crate) fn number(hasher: &impl BuildHasher, check: &Check<'_>) -> Option<u64> {
    check.caller().map(|caller| hasher.hash_one(caller).max(1))
}

/// Returns the caller for display, and its id: a value is masked as lists mask it, to its first characters and the
/// first digits of its id, so that callers with the same prefix are told apart. Without a hasher there is no id.
pub(crate) fn masked(check: &Check<'_>, hasher: Option<&KeyHasher>) -> (String, Option<u64>) {
    let Some((key, value)) = check.caller() else { return (String::new(), None) };
    let first = pseudonym::pseudonym_prefix(value).map_or_else(|| prefix(value), str::to_owned);
    // A pseudonym holds the same hash, in the order of the quota table.
    let theirs = || pseudonym::table_hash(value).map(u64::swap_bytes);
    let id = theirs().or_else(|| Some(hasher?.hash(value).short_id()));
    let digits = id.map(|id| format!("{:08x}", id >> 32)).unwrap_or_default();
    (format!("{key}={first}…{digits}"), id)
}
