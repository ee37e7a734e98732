//! What stands for a value on its way to another node: values that tell who asks are not written to the database as they are,
//! but as a word of their keyed hash, the same on every node, with the few first characters that people may see, and the fixed
//! parts of those wildcards around it that the value matches.
//!
//! Addresses stay, for rules count their networks, and so do short numbers, which rules take for costs; unless their key may
//! hold secrets, and no rule that acts takes a cost from it. A value that another one is hidden for is hidden under every name, and so is what follows a `?`. Where the
//! asking node knows what a word stands for, it puts the value back.

use crate::auth::key_hash::KeyHasher;
use crate::auth::pseudonym::{MARK, pseudonymize, table_hash};
use crate::preview::sampled_request::SampledRequest;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use tollgate_rules::{CostFrom, Ruleset, Wildcards, may_be_secret, tells_who};

/// The longest number that is taken for a cost.
const MAX_COST_BYTES: usize = 7;
/// The shortest value that is looked for in others.
const MIN_VALUE_BYTES: usize = 4;

/// Hides the values of a sample.
pub(crate) struct Pseudonymizer<'a> {
    hasher: &'a KeyHasher,
    /// The attributes that rules take costs from.
    costs: HashSet<&'a str>,
    /// The wildcards that the asking node has rules with.
    wildcards: Wildcards,
    /// Most values come many times.
    known: HashMap<String, String>,
}

impl<'a> Pseudonymizer<'a> {
    pub(crate) fn new(hasher: &'a KeyHasher, rules: &'a Ruleset, wildcards: Wildcards) -> Self {
        let costs = rules.rules().iter().filter_map(|rule| match &rule.cost {
            CostFrom::Attribute(name) => Some(name.as_str()),
            _ => None,
        });
        Self { hasher, costs: costs.collect(), wildcards, known: HashMap::new() }
    }

    /// Whether a value is hidden for its own sake.
    fn is_pseudonymized(&self, key: &str, value: &str) -> bool {
        let address = || value.parse::<IpAddr>().is_ok();
        let number = || value.len() <= MAX_COST_BYTES && value.parse::<u64>().is_ok();
        let stays = || match may_be_secret(key) {
            true => self.costs.contains(key) && number(),
            false => address() || number(),
        };
        value.contains(MARK) || tells_who(key) && !stays()
    }

    fn pseudonym(&mut self, value: &str) -> String {
        if let Some(known) = self.known.get(value) {
            return known.clone();
        }
        let disguised = self.wildcards.disguise(value, &pseudonymize(self.hasher, value));
        self.known.insert(value.to_owned(), disguised.clone());
        disguised
    }

    /// The values of a request as others may read them, in order.
    pub(crate) fn values(&mut self, request: &SampledRequest) -> Vec<String> {
        let hides: Vec<bool> =
            request.entries().map(|(key, value)| self.is_pseudonymized(key, value)).collect();
        let hidden: Vec<&str> =
            request.entries().zip(&hides).filter(|(_, hides)| **hides).map(|((_, value), _)| value).collect();
        let told = |text: &str| {
            let mut long = hidden.iter().filter(|value| value.len() >= MIN_VALUE_BYTES);
            long.any(|value| text.contains(value))
        };
        let mut one = |((_, value), hides): ((&str, &str), &bool)| {
            let (open, more) = value.split_once('?').map_or((value, false), |(open, _)| (open, true));
            if *hides || told(open) {
                self.pseudonym(value)
            } else if more {
                format!("{open}?{}", pseudonymize(self.hasher, value))
            } else {
                value.to_owned()
            }
        };
        request.entries().zip(&hides).map(&mut one).collect()
    }
}

/// What this node knows words to stand for: all that it has been asked about itself, and what rules name.
pub(crate) struct KnownValues(HashMap<u64, Box<str>>);

impl KnownValues {
    pub(crate) fn new<'a>(
        hasher: &KeyHasher,
        own: impl Iterator<Item = &'a SampledRequest>,
        rules: &'a [&'a Ruleset],
    ) -> Self {
        let named = rules.iter().flat_map(|rules| rules.domains()).flat_map(tollgate_rules::Domain::words);
        let all: HashSet<&str> =
            own.flat_map(SampledRequest::entries).map(|(_, value)| value).chain(named).collect();
        Self(all.into_iter().map(|value| (hasher.hash(value).table_hash(), value.into())).collect())
    }

    /// The value itself, where it is known.
    pub(crate) fn restore(&self, told: String) -> Box<str> {
        table_hash(&told).and_then(|word| self.0.get(&word)).cloned().unwrap_or_else(|| told.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::pseudonym::pseudonym_prefix;
    use tollgate_core::Timestamp;
    use tollgate_engine::Check;
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

    /// Whoever reads the database must not be able to call as somebody else.
    #[test]
    fn nothing_that_identifies_a_caller_is_sent_under_any_name() {
        let path = format!("/a/{KEY}/b");
        let told = encoded(&[
            ("api_key", KEY),
            ("user", "alice@example.com"),
            ("path", &path),
            ("session", "1234"),
            ("endpoint", "/o?token=abcdef"),
        ]);
        let all = told.join(" ");
        for secret in [&KEY[7..], "alice@", "1234", "abcdef"] {
            assert!(!all.contains(secret), "{secret}: {all}");
        }
        assert_eq!(
            (pseudonym_prefix(&told[0]), pseudonym_prefix(&told[4])),
            (Some("sk_liv"), Some("/o?")),
            "{all}"
        );
        assert!(told[4].starts_with("/o?"), "{all}");
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
