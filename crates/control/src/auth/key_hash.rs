//! API key hashing: keys are stored as HMAC-SHA-256 with a secret of the installation, plus a short prefix for
//! display. Reading the table reveals no key, and keys cannot be guessed offline without the secret.

use ring::hmac;
use std::fmt;

/// Maximum length of an API key, in bytes.
pub(crate) const MAX_KEY_BYTES: usize = 512;

/// Keyed hash of an API key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub(crate) [u8; 32]);

impl KeyHash {
    /// Returns the 64-bit hash that in-memory tables use.
    #[must_use]
    pub(crate) fn table_hash(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().unwrap_or_default())
    }

    /// Returns the first 64 bits, in the order in which [`fmt::Display`] writes them.
    #[must_use]
    pub fn short_id(&self) -> u64 {
        u64::from_be_bytes(self.0[..8].try_into().unwrap_or_default())
    }

    pub(crate) fn from_slice(bytes: &[u8]) -> Option<Self> {
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

/// A caller, identified by its API key or by the key's hash, which lists show in its place.
#[derive(Clone, Copy, Debug)]
pub enum CallerRef<'a> {
    /// The caller with this API key.
    Key(&'a str),
    /// The caller whose quota has this id.
    Id(KeyHash),
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
    pub(crate) fn new(secret: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// Returns the hash of an API key.
    #[must_use]
    pub fn hash(&self, api_key: &str) -> KeyHash {
        let tag = hmac::sign(&self.0, api_key.as_bytes());
        KeyHash(tag.as_ref().try_into().unwrap_or_default())
    }

    pub(crate) fn hash_caller(&self, caller: CallerRef<'_>) -> KeyHash {
        match caller {
            CallerRef::Key(key) => self.hash(key),
            CallerRef::Id(id) => id,
        }
    }

    /// Returns a number that all nodes of an installation share and that is secret.
    pub(crate) fn seed(&self) -> u64 {
        let tag = hmac::sign(&self.0, &[b'#'; MAX_KEY_BYTES + 1]);
        u64::from_le_bytes(tag.as_ref()[..8].try_into().unwrap_or_default())
    }

    /// Returns the digest that distinguishes a token's secret from wrong ones. It cannot equal a key's hash: the
    /// signed text is longer than any key.
    pub(crate) fn token_digest(&self, id: &str, secret: &str) -> [u8; 32] {
        let mut signing = hmac::Context::with_key(&self.0);
        signing.update(&[b't'; MAX_KEY_BYTES + 1]);
        signing.update(id.as_bytes());
        signing.update(secret.as_bytes());
        signing.sign().as_ref().try_into().unwrap_or_default()
    }

    /// Returns an identifier of the installation, so that ids of one installation are not mistaken for another's. It
    /// reveals no key: the signed text is longer than any key.
    pub(crate) fn installation_id(&self) -> String {
        let tag = hmac::sign(&self.0, &[b'.'; MAX_KEY_BYTES + 1]);
        tag.as_ref().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHasher")
    }
}

/// Maximum number of leading characters of a key that are stored.
pub(crate) const MAX_PREFIX: usize = 6;

/// Returns the leading characters of a key: a quarter of it, between one and six, so that a short key is not
/// revealed.
pub(crate) fn prefix(api_key: &str) -> String {
    let length = api_key.chars().count();
    api_key.chars().take((length / 4).clamp(1, MAX_PREFIX)).collect()
}
