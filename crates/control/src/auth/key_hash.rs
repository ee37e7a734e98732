//! How API keys are kept: as HMAC-SHA-256 with a secret of this installation, and a few first characters for the eye.
//! Who reads the table learns no key, and cannot try words without the secret.

use ring::hmac;
use std::fmt;

/// The longest API key, in bytes.
pub(crate) const MAX_KEY_BYTES: usize = 512;

/// What stands for an API key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub(crate) [u8; 32]);

impl KeyHash {
    /// The word that memory finds it by.
    #[must_use]
    pub(crate) fn table_hash(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().unwrap_or_default())
    }

    /// As many bits as a number has, in the order in which [`fmt::Display`] writes them.
    #[must_use]
    pub fn short_id(&self) -> u64 {
        u64::from_be_bytes(self.0[..8].try_into().unwrap_or_default())
    }

    pub(crate) fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Reads what [`fmt::Display`] writes.
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
        Self::parse(text).ok_or_else(|| "write 64 hexadecimal digits".to_owned())
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

/// Who is meant: by the key, or by what stands for it, which is all that lists tell.
#[derive(Clone, Copy, Debug)]
pub enum CallerRef<'a> {
    /// Who has this key.
    Key(&'a str),
    /// With whom something is agreed under this id.
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

    /// What stands for this key.
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

    /// A number that all nodes of an installation have in common, and nobody else knows.
    pub(crate) fn seed(&self) -> u64 {
        let tag = hmac::sign(&self.0, &[b'#'; MAX_KEY_BYTES + 1]);
        u64::from_le_bytes(tag.as_ref()[..8].try_into().unwrap_or_default())
    }

    /// What a token's secret is told from wrong ones by. It is no key's hash: what is signed is longer than any key.
    pub(crate) fn token_digest(&self, id: &str, secret: &str) -> [u8; 32] {
        let mut signing = hmac::Context::with_key(&self.0);
        signing.update(&[b't'; MAX_KEY_BYTES + 1]);
        signing.update(id.as_bytes());
        signing.update(secret.as_bytes());
        signing.sign().as_ref().try_into().unwrap_or_default()
    }

    /// A word that tells installations apart, so that ids of one are not taken for another's. It gives no key away: what is
    /// signed is longer than any.
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

/// The most first characters of a key that are kept.
pub(crate) const MAX_PREFIX: usize = 6;

/// The first characters of a key: a quarter of it, at least one and six at most, so that a short key is not given away.
pub(crate) fn prefix(api_key: &str) -> String {
    let length = api_key.chars().count();
    api_key.chars().take((length / 4).clamp(1, MAX_PREFIX)).collect()
}
