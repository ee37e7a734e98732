//! What is told of a caller's attributes. A value that may be a secret is never told: what stands for it is its first few
//! characters and a keyed hash, enough to recognise it and to search by it, not enough to use it.

use crate::capture::LONGEST;
use ring::hmac;
use ring::rand::SystemRandom;
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use tollgate_core::beginning;
use tollgate_rules::{TENANT_KEY, may_be_secret};

/// The attributes that tell who asks, the first that is there.
const CALLERS: [&str; 11] = [
    TENANT_KEY,
    "tenant",
    "tenant_id",
    "user",
    "user_id",
    "client",
    "client_id",
    "customer",
    "account",
    "remote_address",
    "ip",
];
/// Attributes that are addresses.
const ADDRESSES: [&str; 4] = ["remote_address", "ip", "client_ip", "source_address"];
/// Attributes that tell what is asked for, and not by whom.
const NOBODY: [&str; 5] = ["endpoint", "path", "method", "host", "route"];

/// A keyed hash of a text.
type Hash = dyn Fn(&str) -> u64 + Send + Sync;

/// What is hidden, and what stands for it.
#[derive(Clone)]
pub struct Mask {
    hash: Arc<Hash>,
    hide: Hide,
    form: HiddenAs,
}

/// What is hidden beside what may be a secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Hide {
    /// Nothing.
    #[default]
    Secrets,
    /// Attributes of these names.
    Also(Vec<String>),
    /// Every value.
    All,
}

/// What stands for a hidden value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HiddenAs {
    /// Its first characters and a keyed hash, so that one caller can be told from another.
    #[default]
    Hash,
    /// Its first characters alone.
    Mask,
}

/// Who asks.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) id: u64,
    pub(crate) shown: String,
    /// Its API key, if that is what it is known by and all of it was kept: so that an operator can act on somebody who is
    /// listed. Known to this process alone, told to nobody, and forgotten with the lists.
    pub(crate) key: Option<ApiKey>,
}

/// A key that is not to be told.
pub(crate) struct ApiKey(Box<str>);

impl ApiKey {
    /// For acting on, never for telling.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey")
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mask").field("hide", &self.hide).field("form", &self.form).finish()
    }
}

impl Mask {
    /// Hashes by a secret of this process: the same caller has another id after a restart.
    #[must_use]
    pub fn of_this_process() -> Self {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        // Without randomness the key is known: values are then masked and not hashed.
        match key {
            Ok(key) => Self::by(move |text| first_word(hmac::sign(&key, text.as_bytes()).as_ref())),
            Err(_) => Self { form: HiddenAs::Mask, ..Self::by(|_| 0) },
        }
    }

    /// Hashes by somebody else's secret.
    #[must_use]
    pub fn by(hash: impl Fn(&str) -> u64 + Send + Sync + 'static) -> Self {
        Self { hash: Arc::new(hash), hide: Hide::Secrets, form: HiddenAs::Hash }
    }

    /// Hides other things, in another way.
    #[must_use]
    pub fn hiding(mut self, hide: Hide, form: HiddenAs) -> Self {
        (self.hide, self.form) = (hide, form);
        self
    }

    pub(crate) fn id(&self, value: &str) -> u64 {
        (self.hash)(value)
    }

    /// Whether the log tells one hidden value from another.
    pub(crate) fn tells_apart(&self) -> bool {
        self.form == HiddenAs::Hash
    }

    fn hides(&self, name: &str) -> bool {
        match &self.hide {
            Hide::All => true,
            Hide::Secrets => may_be_secret(name),
            Hide::Also(names) => names.iter().any(|known| known == name) || may_be_secret(name),
        }
    }

    /// What stands for each value; the ids of all, for searching.
    pub(crate) fn shown(&self, pairs: &[(&str, &str)]) -> (Vec<(String, String)>, Vec<u64>) {
        let ids: Vec<u64> = pairs.iter().map(|(_, value)| self.id(value)).collect();
        let hides: SmallVec<[bool; 16]> = pairs.iter().map(|(name, _)| self.hides(name)).collect();
        // A secret is one under any name that it is sent by.
        let secret = |value: &str| {
            let mut secrets =
                pairs.iter().zip(&hides).filter(|((_, other), hidden)| **hidden && other.len() >= 4);
            secrets.any(|((_, other), _)| value.contains(other))
        };
        let shown = pairs.iter().zip(&ids).zip(&hides).map(|(((name, value), id), hidden)| {
            let hidden = *hidden || secret(value);
            // What follows in an address may hold anything.
            let open = value.split('?').next().unwrap_or_default();
            ((*name).to_owned(), if hidden { self.hidden(value, *id) } else { open.to_owned() })
        });
        (shown.collect(), ids)
    }

    fn hidden(&self, value: &str, id: u64) -> String {
        let first = beginning(value);
        match self.form {
            HiddenAs::Hash => format!("{first}…{:08x}", id >> 32),
            HiddenAs::Mask => format!("{first}…"),
        }
    }

    /// Who asks, by the attributes; what was shown of them stands in the same order.
    pub(crate) fn caller(
        &self,
        pairs: &[(&str, &str)],
        shown: &[(String, String)],
        ids: &[u64],
    ) -> Option<Caller> {
        let by_name = CALLERS.iter().find_map(|name| pairs.iter().position(|(key, _)| key == name));
        let at = by_name.or_else(|| pairs.iter().position(|(key, _)| !NOBODY.contains(key)))?;
        let (name, value) = pairs[at];
        let key = (name == TENANT_KEY && value.len() < LONGEST).then(|| ApiKey(value.into()));
        Some(Caller { id: ids[at], shown: shown[at].1.clone(), key })
    }
}

/// The network that a request came from: 24 bits of an IPv4 address, 64 of another.
pub(crate) fn network(pairs: &[(&str, &str)]) -> Option<String> {
    let (_, value) = pairs.iter().find(|(key, _)| ADDRESSES.contains(key))?;
    let address: std::net::IpAddr = value.parse().ok()?;
    Some(match address.to_canonical() {
        std::net::IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            format!("{a}.{b}.{c}.0/24")
        }
        std::net::IpAddr::V6(v6) => {
            let cleared = std::net::Ipv6Addr::from(u128::from(v6) >> 64 << 64);
            format!("{cleared}/64")
        }
    })
}

fn first_word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_be_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "sk_live_4242424242424242";

    fn shown(mask: &Mask, pairs: &[(&str, &str)]) -> Vec<String> {
        mask.shown(pairs).0.into_iter().map(|(_, value)| value).collect()
    }

    /// Whoever reads the log must not be able to call as somebody else.
    #[test]
    fn secrets_are_not_told_under_any_name() {
        let mask = Mask::of_this_process();
        let told = shown(
            &mask,
            &[("api_key", KEY), ("user", KEY), ("path", &format!("/a/{KEY}/b")), ("endpoint", "/o?x=1")],
        );
        assert!(told.iter().all(|value| !value.contains(&KEY[7..])), "{told:?}");
        assert!(told[0].starts_with("sk_liv…"), "{told:?}");
        assert_eq!((told[0] == told[1], told[3].as_str()), (true, "/o"));
        assert_ne!(told, shown(&Mask::of_this_process(), &[("api_key", KEY)]), "the hash is keyed");
    }

    #[test]
    fn more_can_be_hidden() {
        let mask = Mask::by(|_| 0x1234_5678_0000_0000);
        let pairs = [("user", "alice@example.com"), ("plan", "a")];
        assert_eq!(shown(&mask, &pairs), ["alice@example.com", "a"]);
        let also = mask.clone().hiding(Hide::Also(vec!["user".to_owned()]), HiddenAs::Hash);
        assert_eq!(shown(&also, &pairs), ["alic…12345678", "a"]);
        assert_eq!(shown(&mask.hiding(Hide::All, HiddenAs::Mask), &pairs), ["alic…", "…"]);
    }

    #[test]
    fn callers_and_networks_are_found() {
        let mask = Mask::by(|text| text.len() as u64);
        let who = |pairs: &[(&str, &str)]| {
            let (shown, ids) = mask.shown(pairs);
            mask.caller(pairs, &shown, &ids).map(|caller| caller.shown)
        };
        assert_eq!(
            who(&[("endpoint", "/"), ("remote_address", "10.1.2.3"), ("user", "bob")]).as_deref(),
            Some("bob")
        );
        assert_eq!(who(&[("endpoint", "/"), ("shop", "s1")]).as_deref(), Some("s1"));
        assert_eq!(who(&[("endpoint", "/")]), None);
        assert_eq!(network(&[("ip", "10.1.2.3")]).as_deref(), Some("10.1.2.0/24"));
        assert_eq!(network(&[("remote_address", "2001:db8:1:2:3::4")]).as_deref(), Some("2001:db8:1:2::/64"));
        assert_eq!(network(&[("remote_address", "unix")]), None);
    }
}
