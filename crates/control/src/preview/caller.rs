//! Who asks, for those who watch requests: the API key where there is one, else the first thing that tells who it is.

use crate::auth::key_hash::prefix;
use crate::auth::pseudonym;
use std::hash::BuildHasher;
use tollgate_engine::{Check, CheckInput};
use tollgate_rules::{CALLER_KEY, identifies_caller};

/// The key and the value that tell who asks; nothing, where a request says nothing at all.
#[inline]
pub(crate) fn of<'a>(check: &Check<'a>) -> Option<(&'a str, &'a str)> {
    let named = |entries: &'a [(&'a str, &'a str)]| entries.iter().find(|(key, _)| *key == CALLER_KEY);
    let telling = |entries: &'a [(&'a str, &'a str)]| entries.iter().find(|(key, _)| identifies_caller(key));
    let found = match check.input {
        CheckInput::Attributes(all) => named(all).or_else(|| telling(all)).or_else(|| all.first()),
        CheckInput::Descriptors(all) => {
            let first = || all.iter().find_map(|one| telling(one.entries));
            let any = || all.iter().find_map(|one| one.entries.first());
            all.iter().find_map(|one| named(one.entries)).or_else(first).or_else(any)
        }
    };
    found.copied()
}

/// A caller as a number that is never zero.
#[inline]
pub(crate) fn number(hasher: &impl BuildHasher, check: &Check<'_>) -> Option<u64> {
    of(check).map(|caller| hasher.hash_one(caller).max(1))
}

/// A caller as people may see it: API keys and the like are shown by their first characters alone.
pub(crate) fn masked(check: &Check<'_>) -> String {
    of(check).map_or_else(String::new, |(key, value)| {
        let first = pseudonym::pseudonym_prefix(value).map_or_else(|| prefix(value), str::to_owned);
        format!("{key}={first}…")
    })
}
