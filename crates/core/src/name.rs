//! Comparison of short names, and sets of them.
//!
//! Names of attributes, domains and upstreams are compared several times for a request. A comparison of two strings is a call of
//! the C library, which takes as long as hashing one of them; from 4 to 16 bytes, which most names have, two comparisons of
//! numbers do. These are inlined: a call takes longer than they do.

/// Returns whether two names are the same: as `==`, faster for short ones.
///
/// ```
/// use tollgate_core::is_same_name;
/// assert!(is_same_name("tenant", "tenant") && !is_same_name("tenant", "method"));
/// ```
#[must_use]
#[inline]
pub fn is_same_name(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    if one.len() != other.len() {
        return false;
    }
    match one.len() {
        4..=7 => {
            one.first_chunk::<4>() == other.first_chunk::<4>()
                && one.last_chunk::<4>() == other.last_chunk::<4>()
        }
        8..=16 => {
            one.first_chunk::<8>() == other.first_chunk::<8>()
                && one.last_chunk::<8>() == other.last_chunk::<8>()
        }
        _ => has_same_bytes(one, other),
    }
}

/// Returns whether two names of the same length, shorter or longer than most, are the same.
#[inline(never)]
fn has_same_bytes(one: &[u8], other: &[u8]) -> bool {
    match one.len() {
        2..=3 => {
            one.first_chunk::<2>() == other.first_chunk::<2>()
                && one.last_chunk::<2>() == other.last_chunk::<2>()
        }
        0..=1 => one.first() == other.first(),
        _ => one == other,
    }
}

/// Names, so far as to tell that some are missing: the length and the first byte of each make one bit of 64.
///
/// ```
/// use tollgate_core::NameSet;
/// let request = NameSet::of(["tenant", "method"]);
/// assert!(request.may_contain(NameSet::of(["tenant"])) && !request.may_contain(NameSet::of(["endpoint"])));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NameSet(u64);

impl NameSet {
    /// All names.
    pub const ALL: Self = Self(u64::MAX);

    /// Creates a set of these names.
    #[must_use]
    #[inline]
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let bit = |name: &str| {
            let first = name.as_bytes().first().map_or(0, |first| usize::from(*first));
            1 << ((first + 5 * name.len()) % 64)
        };
        Self(names.into_iter().fold(0, |bits, name| bits | bit(name)))
    }

    /// Returns whether all names of another set may be in this one; `false` is certain.
    #[must_use]
    #[inline]
    pub const fn may_contain(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::{NameSet, is_same_name};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_set_may_contain_what_it_was_made_of(names in prop::collection::vec("[a-z_]{0,12}", 0..8), part in 0usize..9) {
            let (all, part) = (names.iter().map(String::as_str), part.min(names.len()));
            let all = NameSet::of(all);
            prop_assert!(all.may_contain(NameSet::of(names[..part].iter().map(String::as_str))));
            prop_assert!(!NameSet::default().may_contain(all) || names.is_empty());
        }

        #[test]
        fn names_are_the_same_if_they_are_equal(one in "[ab]{0,20}", other in "[ab]{0,20}", at in 0usize..20) {
            prop_assert_eq!(is_same_name(&one, &other), one == other);
            prop_assert!(is_same_name(&one, &one.clone()));
            let mut changed = one.clone().into_bytes();
            if let Some(byte) = changed.get_mut(at) {
                *byte = b'c';
                prop_assert!(!is_same_name(&one, &String::from_utf8(changed).expect("ASCII")));
            }
        }
    }
}
