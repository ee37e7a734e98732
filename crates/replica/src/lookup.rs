//! Which attributes of a request are looked up among quotas and grants, and by which hashes.
//!
//! An attribute is looked up while some quota or grant is about it, and only where a rule of the request's domain counts by
//! it: without quotas of users, a request pays nothing for its `user_id`. An address is looked up in each network length
//! in use, the longest first, so that a lookup costs as much as there are lengths, not networks.

use crate::key_hash::{KeyHasher, Subject, network};
use crate::pseudonym;
use smallvec::SmallVec;
use std::fmt::Write;
use tollgate_engine::{Check, Network};
use tollgate_rules::{CALLER_KEY, Ruleset};

/// Maximum number of lengths of networks that quotas of one attribute may have.
pub const MAX_LENGTHS: usize = 16;

/// The attribute that contains the client's address.
const ADDRESS: &str = "remote_address";

/// The hashes by which one caller may be found, the most specific first.
pub(crate) type Hashes = SmallVec<[u64; MAX_LENGTHS]>;

/// One attribute to look up.
#[derive(Debug)]
pub(crate) struct Lookup {
    key: Box<str>,
    /// What distinguishes its hashes from those of other attributes.
    mask: u64,
    /// Lengths of the networks in use, longest first.
    lengths: Vec<u8>,
}

impl Lookup {
    /// Returns the lookups for these subjects.
    pub(crate) fn all(hasher: &KeyHasher, subjects: impl IntoIterator<Item = Subject>) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for Subject { key, bits } in subjects {
            let at = all.iter().position(|one| one.key == key).unwrap_or_else(|| {
                all.push(Self { mask: hasher.attribute_mask(&key), key, lengths: Vec::new() });
                all.len() - 1
            });
            let lengths = &mut all[at].lengths;
            lengths.extend(bits.filter(|bits| !lengths.contains(bits)));
            lengths.sort_unstable_by(|a, b| b.cmp(a));
        }
        all.sort_by(|a, b| a.key.cmp(&b.key));
        all
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) fn lengths(&self) -> &[u8] {
        &self.lengths
    }

    /// Returns the value of a request that is looked up; `None` if it has none, or no rule there counts by it.
    #[inline]
    pub(crate) fn value<'a>(&self, check: &Check<'a>, rules: &Ruleset) -> Option<&'a str> {
        // The tier of an API key is for all rules.
        if &*self.key == CALLER_KEY {
            return check.value(&self.key);
        }
        // Of two values, the terms of one must not apply to the counters of the other.
        check.only_value(&self.key).filter(|_| rules.counts_by(check.domain, &self.key))
    }

    /// Returns the hashes by which the caller of a request may be found.
    #[inline]
    pub(crate) fn hashes(&self, hasher: &KeyHasher, check: &Check<'_>, value: &str) -> Hashes {
        let known = || network(&self.key, value);
        if let (false, Some(network)) = (self.lengths.is_empty(), known()) {
            // Rules identify an IPv6 client by its network, but a quota may be for a single address in it.
            let address = check.address.filter(|_| &*self.key == ADDRESS).map(Network::from_address);
            let network = address.unwrap_or(network);
            let within = self.lengths.iter().filter_map(|bits| network.widened(*bits));
            return within
                .map(|network| hasher.hash(Text::of(network).as_str()).table_hash() ^ self.mask)
                .collect();
        }
        let hash = hasher.hash(value).table_hash() ^ self.mask;
        std::iter::once(hash).collect()
    }

    /// Like [`Lookup::hashes`], for the sample of another node: there, only the hash in a value's pseudonym is known.
    pub(crate) fn sampled_hashes(&self, hasher: &KeyHasher, check: &Check<'_>, value: &str) -> Hashes {
        match pseudonym::table_hash(value) {
            Some(hash) => std::iter::once(hash ^ self.mask).collect(),
            None => self.hashes(hasher, check, value),
        }
    }
}

/// Text of a network, without allocation.
struct Text {
    bytes: [u8; 64],
    length: usize,
}

impl Text {
    fn of(network: Network) -> Self {
        let mut text = Self { bytes: [0; 64], length: 0 };
        let _ = write!(text, "{network}");
        text
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}
