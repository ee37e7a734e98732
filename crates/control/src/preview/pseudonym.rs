//! Pseudonymizes values in samples sent to other nodes. A value that identifies a caller is never written to the
//! database in clear, but as bits of its keyed hash, the same on every node, with the leading characters that may be
//! shown, and with the literal parts of the wildcards that the value matches.
//!
//! Addresses stay, because rules count by network, and so do short numbers, which rules use as costs; unless their
//! key may contain secrets and no active rule takes a cost from it. A pseudonymized value is replaced under every key
//! in which it occurs, and so is everything after a `?`. The requesting node restores values whose pseudonyms it
//! knows.

use crate::preview::sampled_request::SampledRequest;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use tollgate_replica::KeyHasher;
use tollgate_replica::pseudonym::{MARK, pseudonymize, table_hash};
use tollgate_rules::{Ruleset, Wildcards, identifies_caller, may_be_secret};

/// Maximum length of a number that counts as a cost, in bytes.
const MAX_COST_BYTES: usize = 7;
/// Minimum length of a value that is searched for in other values, in bytes.
const MIN_VALUE_BYTES: usize = 4;

/// Replaces the values of a sample with pseudonyms.
pub(crate) struct Pseudonymizer<'a> {
    hasher: &'a KeyHasher,
    /// Attributes that rules take costs from.
    costs: HashSet<&'a str>,
    /// Wildcards in the rules of the requesting node.
    wildcards: Wildcards,
    /// Pseudonyms computed so far: most values repeat.
    known: HashMap<String, String>,
}

impl<'a> Pseudonymizer<'a> {
    pub(crate) fn new(hasher: &'a KeyHasher, rules: &'a Ruleset, wildcards: Wildcards) -> Self {
        Self { hasher, costs: rules.cost_attributes().collect(), wildcards, known: HashMap::new() }
    }

    /// Returns whether a value is pseudonymized for its own sake.
    fn is_pseudonymized(&self, key: &str, value: &str) -> bool {
        let address = || value.parse::<IpAddr>().is_ok();
        let number = || value.len() <= MAX_COST_BYTES && value.parse::<u64>().is_ok();
        let stays = || match may_be_secret(key) {
            true => self.costs.contains(key) && number(),
            false => address() || number(),
        };
        value.contains(MARK) || identifies_caller(key) && !stays()
    }

    fn pseudonym(&mut self, value: &str) -> String {
        if let Some(known) = self.known.get(value) {
            return known.clone();
        }
        let disguised = self.wildcards.mask(value, &pseudonymize(self.hasher, value));
        self.known.insert(value.to_owned(), disguised.clone());
        disguised
    }

    /// Returns a request's values for other nodes, in order.
    pub(crate) fn values(&mut self, request: &SampledRequest) -> Vec<String> {
        let replaced: Vec<bool> =
            request.entries().map(|(key, value)| self.is_pseudonymized(key, value)).collect();
        let secrets: Vec<&str> = request
            .entries()
            .zip(&replaced)
            .filter(|(_, replaced)| **replaced)
            .map(|((_, value), _)| value)
            .collect();
        let reveals = |text: &str| {
            let mut long = secrets.iter().filter(|value| value.len() >= MIN_VALUE_BYTES);
            long.any(|value| text.contains(value))
        };
        let mut one = |((_, value), replaced): ((&str, &str), &bool)| {
            let (path, has_query) = value.split_once('?').map_or((value, false), |(path, _)| (path, true));
            if *replaced || reveals(path) {
                self.pseudonym(value)
            } else if has_query {
                format!("{path}?{}", pseudonymize(self.hasher, value))
            } else {
                value.to_owned()
            }
        };
        request.entries().zip(&replaced).map(&mut one).collect()
    }
}

/// Values whose pseudonyms this node can restore: those of its own requests, and those that rules name.
pub(crate) struct KnownValues(HashMap<u64, Box<str>>);

impl KnownValues {
    pub(crate) fn new<'a>(
        hasher: &KeyHasher,
        own: impl Iterator<Item = &'a SampledRequest>,
        rules: &'a [&'a Ruleset],
    ) -> Self {
        let named =
            rules.iter().flat_map(|rules| rules.domains()).flat_map(tollgate_rules::Domain::literal_values);
        let all: HashSet<&str> =
            own.flat_map(SampledRequest::entries).map(|(_, value)| value).chain(named).collect();
        Self(all.into_iter().map(|value| (hasher.hash(value).table_hash(), value.into())).collect())
    }

    /// Returns the original value if it is known, else the pseudonym.
    pub(crate) fn restore(&self, pseudonym: String) -> Box<str> {
        table_hash(&pseudonym).and_then(|hash| self.0.get(&hash)).cloned().unwrap_or_else(|| pseudonym.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::Timestamp;
    use tollgate_engine::Check;
    use tollgate_replica::pseudonym::pseudonym_prefix;
    use tollgate_rules::{Options, Source};

    const KEY: &str = "sk_live_4242424242424242";

    fn encoded(pairs: &[(&str, &str)]) -> Vec<String> {
        let hasher = KeyHasher::new(b"secret");
        let request = SampledRequest::new(&Check::attributes("d", pairs), Timestamp::from_secs(1), 1, 1)
            .expect("short");
        let text = "{domain: d, descriptors: [{key: user, value: bob, tiers: {gold: 2/minute}, limit: 1/minute, cost: tokens}]}";
        let rules = Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules");
        Pseudonymizer::new(&hasher, &rules, Wildcards::new(["bot-*", "sk_*_42*"])).values(&request)
    }

    /// A reader of the database must not be able to impersonate a caller.
    #[test]
    fn nothing_that_identifies_a_caller_is_sent_under_any_name() {
        let path = format!("/a/{KEY}/b");
        let sent = encoded(&[
            ("api_key", KEY),
            ("user", "alice@example.com"),
            ("path", &path),
            ("session", "1234"),
            ("endpoint", "/o?token=abcdef"),
        ]);
        let all = sent.join(" ");
        for secret in [&KEY[7..], "alice@", "1234", "abcdef"] {
            assert!(!all.contains(secret), "{secret}: {all}");
        }
        assert_eq!(
            (pseudonym_prefix(&sent[0]), pseudonym_prefix(&sent[4])),
            (Some("sk_liv"), Some("/o?")),
            "{all}"
        );
        assert!(sent[4].starts_with("/o?"), "{all}");
    }

    #[test]
    fn values_that_rules_name_are_kept() {
        let pairs = [
            ("path", "/a"),
            ("remote_address", "10.1.2.3"),
            ("tokens", "4096"),
            ("method", "GET"),
            ("ip", "::1"),
        ];
        assert_eq!(encoded(&pairs), pairs.map(|(_, value)| value));
    }

    #[test]
    fn known_values_are_restored() {
        let text =
            "{domain: d, descriptors: [{key: user, value: bob, tiers: {gold: 2/minute}, limit: 1/minute}]}";
        let rules = Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules");
        let hasher = KeyHasher::new(b"secret");
        let own = SampledRequest::new(
            &Check::attributes("d", &[("api_key", "mine"), ("path", "/a?b")]),
            Timestamp::from_secs(1),
            1,
            1,
        )
        .expect("short");
        let known = KnownValues::new(&hasher, [&own].into_iter(), &[&rules]);
        let pairs =
            [("user", "bob"), ("tier", "gold"), ("api_key", "mine"), ("client", "theirs"), ("path", "/a?b")];
        let back: Vec<Box<str>> = encoded(&pairs).into_iter().map(|one| known.restore(one)).collect();
        assert_eq!([&*back[0], &*back[1], &*back[2], &*back[4]], ["bob", "gold", "mine", "/a?b"]);
        assert_eq!(table_hash(&back[3]), Some(hasher.hash("theirs").table_hash()));
    }
}
