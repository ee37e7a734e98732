//! What is told of a caller's attributes. A value that may be a secret is never told: what stands for it is its first few
//! characters and a keyed hash, enough to recognise it and to search by it, not enough to use it.

mod secret;

use crate::recorder::capture::MAX_VALUE;
use ring::hmac;
use ring::rand::SystemRandom;
use secret::DecodedValue;
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use tollgate_core::{KeyPart, secret_prefix};
use tollgate_rules::{CALLER_KEY, may_be_secret};

/// The attributes that tell who asks, the first that is there.
const CALLERS: [&str; 11] = [
    CALLER_KEY,
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
const ANONYMOUS: [&str; 5] = ["endpoint", "path", "method", "host", "route"];

/// A keyed hash of a text.
type Hash = dyn Fn(&str) -> u64 + Send + Sync;

/// What is hidden, and what stands for it.
#[derive(Clone)]
pub struct Mask {
    hash: Arc<Hash>,
    masked: MaskedAttributes,
    style: MaskStyle,
}

/// What is hidden beside what may be a secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MaskedAttributes {
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
pub enum MaskStyle {
    /// Its first characters and a keyed hash, so that one caller can be told from another.
    #[default]
    Hash,
    /// Its first characters alone.
    Mask,
}

/// Who asks.
#[derive(Debug)]
pub(crate) struct MaskedCaller {
    pub(crate) id: u64,
    pub(crate) display: String,
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
        f.debug_struct("Mask").field("masked", &self.masked).field("style", &self.style).finish()
    }
}

impl Mask {
    /// Hashes by a secret of this process: the same caller has another id after a restart.
    #[must_use]
    pub fn random() -> Self {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        // Without randomness the key is known: values are then masked and not hashed.
        match key {
            Ok(key) => Self::with_hash(move |text| short_id(hmac::sign(&key, text.as_bytes()).as_ref())),
            Err(_) => Self { style: MaskStyle::Mask, ..Self::with_hash(|_| 0) },
        }
    }

    /// Hashes by somebody else's secret.
    #[must_use]
    pub fn with_hash(hash: impl Fn(&str) -> u64 + Send + Sync + 'static) -> Self {
        Self { hash: Arc::new(hash), masked: MaskedAttributes::Secrets, style: MaskStyle::Hash }
    }

    /// Hides other things, in another way.
    #[must_use]
    pub fn with_masked(mut self, hide: MaskedAttributes, form: MaskStyle) -> Self {
        (self.masked, self.style) = (hide, form);
        self
    }

    pub(crate) fn id(&self, value: &str) -> u64 {
        (self.hash)(value)
    }

    /// Whether the log tells one hidden value from another.
    pub(crate) fn is_injective(&self) -> bool {
        self.style == MaskStyle::Hash
    }

    pub(crate) fn is_masked(&self, name: &str) -> bool {
        match &self.masked {
            MaskedAttributes::All => true,
            MaskedAttributes::Secrets => may_be_secret(name),
            MaskedAttributes::Also(names) => names.iter().any(|known| known == name) || may_be_secret(name),
        }
    }

    /// What stands for each value; the ids of all, for searching.
    pub(crate) fn display(&self, pairs: &[(&str, &str)]) -> (Vec<(String, String)>, Vec<u64>) {
        let ids: Vec<u64> = pairs.iter().map(|(_, value)| self.id(value)).collect();
        // What a name that was cut said at its end is not known.
        let hides: SmallVec<[bool; 16]> =
            pairs.iter().map(|(name, _)| is_truncated(name) || self.is_masked(name)).collect();
        let hidden = pairs.iter().zip(&hides).filter(|(_, hidden)| **hidden);
        let secrets: SmallVec<[DecodedValue<'_>; 4]> =
            hidden.filter_map(|((_, value), _)| DecodedValue::secret(value)).collect();
        let shown = pairs.iter().zip(&ids).zip(&hides).map(|(((name, value), id), hidden)| {
            // A secret is one under any name that it is sent by.
            let tells = |value| {
                let value = DecodedValue::new(value);
                secrets.iter().any(|secret| value.reveals(secret))
            };
            let hidden = *hidden || tells(value);
            // What follows in an address may hold anything.
            let open = value.split('?').next().unwrap_or_default();
            ((*name).to_owned(), if hidden { self.mask_value(value, *id) } else { open.to_owned() })
        });
        (shown.collect(), ids)
    }

    fn mask_value(&self, value: &str, id: u64) -> String {
        let first = secret_prefix(value);
        match self.style {
            MaskStyle::Hash => format!("{first}…{:08x}", id >> 32),
            MaskStyle::Mask => format!("{first}…"),
        }
    }

    /// What stands for a value of a counter's name, which does not tell of what: where more is hidden than secrets, all are.
    pub(crate) fn mask_part(&self, part: &KeyPart<'_>) -> String {
        match part {
            KeyPart::Secret(value) => self.mask_value(value, self.id(value)),
            _ if self.masked == MaskedAttributes::Secrets => {
                let text = part.to_string();
                text.split('?').next().unwrap_or_default().to_owned()
            }
            _ => {
                let text = part.to_string();
                self.mask_value(&text, self.id(&text))
            }
        }
    }

    /// Who asks, by the attributes; what was shown of them stands in the same order.
    pub(crate) fn caller(
        &self,
        pairs: &[(&str, &str)],
        shown: &[(String, String)],
        ids: &[u64],
    ) -> Option<MaskedCaller> {
        let at = caller_at(pairs)?;
        let (name, value) = pairs[at];
        let key = (name == CALLER_KEY && value.len() < MAX_VALUE).then(|| ApiKey(value.into()));
        Some(MaskedCaller { id: ids[at], display: shown[at].1.clone(), key })
    }
}

/// Which attribute tells who asks.
fn caller_at(pairs: &[(&str, &str)]) -> Option<usize> {
    let key = caller_key(pairs.iter())?;
    pairs.iter().position(|(name, _)| *name == key)
}

/// Whether an attribute of this name may tell who asks, or from where.
pub(crate) fn identifies_caller(name: &str) -> bool {
    CALLERS.contains(&name) || ADDRESSES.contains(&name)
}

/// The name of the attribute that tells who asks.
pub(crate) fn caller_key<'p>(pairs: impl Iterator<Item = &'p (&'p str, &'p str)> + Clone) -> Option<&'p str> {
    let keys = pairs.map(|(key, _)| *key);
    let by_name = CALLERS.iter().find_map(|name| keys.clone().find(|key| key == name));
    by_name.or_else(|| keys.clone().find(|key| !ANONYMOUS.contains(key)))
}

/// Whether this may be the beginning of something longer, as it was captured.
fn is_truncated(text: &str) -> bool {
    // No character is longer than four bytes.
    text.len() + 4 > MAX_VALUE
}

/// The network that a request came from: none where its address is hidden, or is all that its caller is known by. What was
/// shown of the attributes stands in the same order.
pub(crate) fn network(pairs: &[(&str, &str)], shown: &[(String, String)]) -> Option<String> {
    let at = pairs.iter().position(|(key, _)| ADDRESSES.contains(key))?;
    let value = pairs[at].1;
    let network = network_of(value).filter(|_| shown[at].1 == value)?;
    let is_caller = caller_at(pairs).and_then(|at| network_of(pairs[at].1)).as_ref() == Some(&network);
    (!is_caller).then_some(network)
}

/// 24 bits of an IPv4 address, 64 of another.
fn network_of(address: &str) -> Option<String> {
    let address: std::net::IpAddr = address.parse().ok()?;
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

fn short_id(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_be_bytes(*word))
}

#[cfg(test)]
mod tests;
