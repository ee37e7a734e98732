//! API key hashing: keys are stored as HMAC-SHA-256 with a secret of the installation, plus a short prefix for
//! display. Reading the table reveals no key, and keys cannot be guessed offline without the secret. Values of other
//! attributes that identify callers (users, tenants) are stored alike; networks, which quotas are configured for, are shown
//! whole.

use ring::hmac;
use serde::{Deserialize, Serialize};
use std::fmt;
use tollgate_engine::Network;
use tollgate_rules::CALLER_KEY;

/// Maximum length of an API key, in bytes.
pub const MAX_KEY_BYTES: usize = 512;

/// Keyed hash of an API key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// Returns the 64-bit hash that in-memory tables use.
    #[must_use]
    pub fn table_hash(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().unwrap_or_default())
    }

    /// Returns the first 64 bits, in the order in which [`fmt::Display`] writes them.
    #[must_use]
    pub fn short_id(&self) -> u64 {
        u64::from_be_bytes(self.0[..8].try_into().unwrap_or_default())
    }

    /// Returns the hash with these bytes, if there are 32.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Parses what [`fmt::Display`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl std::str::FromStr for KeyHash {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| "must be 64 hexadecimal digits".to_owned())
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A caller, identified by an attribute of its requests or by the hash of that, which lists show in its place.
#[derive(Clone, Copy, Debug)]
pub enum CallerRef<'a> {
    /// The caller with this API key.
    Key(&'a str),
    /// The caller with this value of another attribute: a user, a tenant, an address or network.
    Value {
        /// The attribute.
        key: &'a str,
        /// Its value.
        value: &'a str,
    },
    /// The caller whose quota has this id.
    Id(KeyHash),
}

impl<'a> CallerRef<'a> {
    /// Returns the caller with this value of an attribute.
    #[must_use]
    pub fn of(key: &'a str, value: &'a str) -> Self {
        if key == CALLER_KEY { Self::Key(value) } else { Self::Value { key, value } }
    }

    /// Returns the attribute and its value, if they are known.
    #[must_use]
    pub fn attribute(self) -> Option<(&'a str, &'a str)> {
        match self {
            Self::Key(value) => Some((CALLER_KEY, value)),
            Self::Value { key, value } => Some((key, value)),
            Self::Id(_) => None,
        }
    }
}

impl<'a> From<&'a str> for CallerRef<'a> {
    fn from(key: &'a str) -> Self {
        Self::Key(key)
    }
}

impl<'a> From<&'a String> for CallerRef<'a> {
    fn from(key: &'a String) -> Self {
        Self::Key(key)
    }
}

impl From<KeyHash> for CallerRef<'_> {
    fn from(id: KeyHash) -> Self {
        Self::Id(id)
    }
}

/// Hashes API keys with the installation's secret.
#[derive(Clone)]
pub struct KeyHasher(hmac::Key);

impl KeyHasher {
    /// Creates a hasher with a secret.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// Returns the hash of an API key.
    #[must_use]
    pub fn hash(&self, api_key: &str) -> KeyHash {
        let tag = hmac::sign(&self.0, api_key.as_bytes());
        KeyHash(tag.as_ref().try_into().unwrap_or_default())
    }

    /// Returns the hash of a caller.
    #[must_use]
    pub fn hash_caller(&self, caller: CallerRef<'_>) -> KeyHash {
        match caller {
            CallerRef::Key(key) => self.hash(key),
            CallerRef::Value { key, value } => self.hash_value(key, value),
            CallerRef::Id(id) => id,
        }
    }

    /// Returns the hash of an attribute's value: the hash of the value in its canonical form, as of an API key, combined
    /// with one of the attribute. So a pseudonym, which holds the hash of a value alone, finds the caller under every
    /// attribute.
    #[must_use]
    pub fn hash_value(&self, key: &str, value: &str) -> KeyHash {
        let mut hash = match network(key, value) {
            Some(network) => self.hash(&network.to_string()),
            None => self.hash(value),
        };
        if key != CALLER_KEY {
            hash.0.iter_mut().zip(self.attribute_hash(key).0).for_each(|(byte, other)| *byte ^= other);
        }
        hash
    }

    /// Returns the hash of an attribute's name, which no key has: the signed text is longer than any.
    fn attribute_hash(&self, key: &str) -> KeyHash {
        let mut signing = hmac::Context::with_key(&self.0);
        signing.update(&[b'q'; MAX_KEY_BYTES + 1]);
        signing.update(key.as_bytes());
        KeyHash(signing.sign().as_ref().try_into().unwrap_or_default())
    }

    /// Returns what distinguishes the table hashes of an attribute's values from those of API keys.
    #[must_use]
    pub fn attribute_mask(&self, key: &str) -> u64 {
        if key == CALLER_KEY { 0 } else { self.attribute_hash(key).table_hash() }
    }

    /// Returns a number that all nodes of an installation share and that is secret.
    #[must_use]
    pub fn seed(&self) -> u64 {
        let tag = hmac::sign(&self.0, &[b'#'; MAX_KEY_BYTES + 1]);
        u64::from_le_bytes(tag.as_ref()[..8].try_into().unwrap_or_default())
    }

    /// Returns the secret that counters are named with.
    pub(crate) fn counter_secret(&self) -> [u8; 32] {
        let tag = hmac::sign(&self.0, &[b'h'; MAX_KEY_BYTES + 1]);
        tag.as_ref().try_into().unwrap_or_default()
    }

    /// Returns the digest that distinguishes a token's secret from wrong ones. It cannot equal a key's hash: the
    /// signed text is longer than any key.
    #[must_use]
    pub fn token_digest(&self, id: &str, secret: &str) -> [u8; 32] {
        let mut signing = hmac::Context::with_key(&self.0);
        signing.update(&[b't'; MAX_KEY_BYTES + 1]);
        signing.update(id.as_bytes());
        signing.update(secret.as_bytes());
        signing.sign().as_ref().try_into().unwrap_or_default()
    }

    /// Returns an identifier of the installation, so that ids of one installation are not mistaken for another's. It
    /// reveals no key: the signed text is longer than any key.
    #[must_use]
    pub fn installation_id(&self) -> String {
        let tag = hmac::sign(&self.0, &[b'.'; MAX_KEY_BYTES + 1]);
        tag.as_ref().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHasher")
    }
}

/// Returns the address or network that a value is. API keys are never one, however they are spelled.
#[must_use]
pub fn network(key: &str, value: &str) -> Option<Network> {
    if key == CALLER_KEY { None } else { value.parse().ok() }
}

/// Returns a caller's value for display: a network whole, anything else by its leading characters.
#[must_use]
pub fn shown(key: &str, value: &str) -> String {
    network(key, value).map_or_else(|| prefix(value), |network| network.to_string())
}

/// What identifies the callers that are looked up together: an attribute, and the length of the prefix if its value is a
/// network.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Subject {
    /// The attribute.
    pub key: Box<str>,
    /// Bits of the network, as of [`Network::bits`].
    pub bits: Option<u8>,
}

impl Default for Subject {
    fn default() -> Self {
        Self { key: CALLER_KEY.into(), bits: None }
    }
}

impl Subject {
    /// Returns whether API keys identify the callers.
    #[must_use]
    pub fn is_api_key(&self) -> bool {
        &*self.key == CALLER_KEY
    }

    /// Returns the subject of a stored caller, which [`shown`] displays so.
    #[must_use]
    pub fn new(key: String, shown: &str) -> Self {
        let bits = network(&key, shown).map(|network| network.bits());
        Self { key: key.into(), bits }
    }
}

/// Maximum number of leading characters of a key that are stored.
pub const MAX_PREFIX: usize = 6;

/// Maximum number of characters of what is stored for display: an IPv6 network.
pub const MAX_SHOWN: usize = 43;

/// Returns the leading characters of a key: a quarter of it, between one and six, so that a short key is not
/// revealed.
#[must_use]
pub fn prefix(api_key: &str) -> String {
    let length = api_key.chars().count();
    api_key.chars().take((length / 4).clamp(1, MAX_PREFIX)).collect()
}
