//! Masking of attribute values. A value that may be a secret is replaced by its first few characters and a keyed hash:
//! enough to recognize it and to search for it, not enough to use it.

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

/// Attributes that identify the caller, in order of preference.
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
/// Attributes that contain client addresses.
const ADDRESSES: [&str; 4] = ["remote_address", "ip", "client_ip", "source_address"];
/// Attributes that describe the requested resource and never identify the caller.
const RESOURCE_ATTRIBUTES: [&str; 5] = ["endpoint", "path", "method", "host", "route"];

/// A keyed hash of a text.
type Hash = dyn Fn(&str) -> u64 + Send + Sync;

/// Masking policy: which values are masked, and how.
#[derive(Clone)]
pub struct Mask {
    hash: Arc<Hash>,
    masked: MaskedAttributes,
    style: MaskStyle,
}

/// Which attributes are masked in addition to those that may be secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MaskedAttributes {
    /// No others.
    #[default]
    Secrets,
    /// Attributes with these names.
    Also(Vec<String>),
    /// Every value.
    All,
}

/// Replacement for a masked value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MaskStyle {
    /// First characters and a keyed hash, so that callers stay distinguishable.
    #[default]
    Hash,
    /// First characters only.
    Mask,
}

/// The caller of a request, masked.
#[derive(Debug)]
pub(crate) struct MaskedCaller {
    pub(crate) id: u64,
    pub(crate) display: String,
    /// API key, if the caller is identified by it and it was captured completely, for operator actions on a listed caller.
    /// Stays in this process, is never shown, and is dropped with the lists.
    pub(crate) key: Option<ApiKey>,
}

/// An API key that must never be shown.
pub(crate) struct ApiKey(Box<str>);

impl ApiKey {
    /// Returns the key. For operator actions; must never be shown.
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
    /// Creates a mask with a hash key of this process: ids change after a restart.
    #[must_use]
    pub fn random() -> Self {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        // Without randomness the key would be known, so values are masked without a hash.
        match key {
            Ok(key) => Self::with_hash(move |text| short_id(hmac::sign(&key, text.as_bytes()).as_ref())),
            Err(_) => Self { style: MaskStyle::Mask, ..Self::with_hash(|_| 0) },
        }
    }

    /// Creates a mask with the given keyed hash.
    #[must_use]
    pub fn with_hash(hash: impl Fn(&str) -> u64 + Send + Sync + 'static) -> Self {
        Self { hash: Arc::new(hash), masked: MaskedAttributes::Secrets, style: MaskStyle::Hash }
    }

    /// Replaces the masked attributes and the style.
    #[must_use]
    pub fn with_masked(mut self, hide: MaskedAttributes, form: MaskStyle) -> Self {
        (self.masked, self.style) = (hide, form);
        self
    }

    pub(crate) fn id(&self, value: &str) -> u64 {
        (self.hash)(value)
    }

    /// Returns whether masked values stay distinguishable.
    pub(crate) fn keeps_distinct(&self) -> bool {
        self.style == MaskStyle::Hash
    }

    pub(crate) fn is_masked(&self, name: &str) -> bool {
        match &self.masked {
            MaskedAttributes::All => true,
            MaskedAttributes::Secrets => may_be_secret(name),
            MaskedAttributes::Also(names) => names.iter().any(|known| known == name) || may_be_secret(name),
        }
    }

    fn hides(&self, name: &str, value: &str, is_cost: impl Fn(&str) -> bool) -> bool {
        let is_named = match &self.masked {
            MaskedAttributes::Secrets => false,
            MaskedAttributes::Also(names) => names.iter().any(|known| known == name),
            MaskedAttributes::All => true,
        };
        is_named || may_be_secret(name) && !(is_whole_number(value) && is_cost(name))
    }

    /// Returns every attribute with its value masked if needed, and the ids of all values for searching. A whole number is
    /// no secret where the rules take a cost from it, whatever its name (`tokens`), unless it is masked by name.
    pub(crate) fn display(
        &self,
        pairs: &[(&str, &str)],
        is_cost: impl Fn(&str) -> bool,
    ) -> (Vec<(String, String)>, Vec<u64>) {
        let ids: Vec<u64> = pairs.iter().map(|(_, value)| self.id(value)).collect();
        // The end of a truncated name is unknown, so its value is masked.
        let hides: SmallVec<[bool; 16]> = pairs
            .iter()
            .map(|(name, value)| is_truncated(name) || self.hides(name, value, &is_cost))
            .collect();
        let hidden = pairs.iter().zip(&hides).filter(|(_, hidden)| **hidden);
        let secrets: SmallVec<[DecodedValue<'_>; 4]> =
            hidden.filter_map(|((_, value), _)| DecodedValue::secret(value)).collect();
        let shown = pairs.iter().zip(&ids).zip(&hides).map(|(((name, value), id), hidden)| {
            // A secret stays masked under any other name.
            let reveals_secret = |value| {
                let value = DecodedValue::new(value);
                secrets.iter().any(|secret| value.reveals(secret))
            };
            let hidden = *hidden || reveals_secret(value);
            // The query of a URL may contain anything.
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

    /// Masks one part of a counter key. Its attribute is unknown, so all parts are masked if more than secrets are.
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

    /// Returns the caller identified by the attributes; `shown` and `ids` are parallel to `pairs`.
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

/// Returns whether a value is a number of units, as costs are sent.
fn is_whole_number(value: &str) -> bool {
    !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the index of the attribute that identifies the caller.
fn caller_at(pairs: &[(&str, &str)]) -> Option<usize> {
    let key = caller_key(pairs.iter())?;
    pairs.iter().position(|(name, _)| *name == key)
}

/// Returns whether an attribute with this name may identify the caller or its address.
pub(crate) fn identifies_caller(name: &str) -> bool {
    CALLERS.contains(&name) || ADDRESSES.contains(&name)
}

/// Returns the name of the attribute that identifies the caller.
pub(crate) fn caller_key<'p>(pairs: impl Iterator<Item = &'p (&'p str, &'p str)> + Clone) -> Option<&'p str> {
    let keys = pairs.map(|(key, _)| *key);
    let by_name = CALLERS.iter().find_map(|name| keys.clone().find(|key| key == name));
    by_name.or_else(|| keys.clone().find(|key| !RESOURCE_ATTRIBUTES.contains(key)))
}

/// Returns whether a captured text may have been truncated.
fn is_truncated(text: &str) -> bool {
    // A character has at most four bytes.
    text.len() + 4 > MAX_VALUE
}

/// Returns the network of the client address; `None` if the address is masked or is what identifies the caller. `shown` is
/// parallel to `pairs`.
pub(crate) fn network(pairs: &[(&str, &str)], shown: &[(String, String)]) -> Option<String> {
    let at = pairs.iter().position(|(key, _)| ADDRESSES.contains(key))?;
    let value = pairs[at].1;
    let network = network_of(value).filter(|_| shown[at].1 == value)?;
    let is_caller = caller_at(pairs).and_then(|at| network_of(pairs[at].1)).as_ref() == Some(&network);
    (!is_caller).then_some(network)
}

/// Returns the /24 network of an IPv4 address or the /64 network of an IPv6 address.
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
