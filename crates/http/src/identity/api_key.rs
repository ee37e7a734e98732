//! API key extraction. The key identifies the caller on every protocol: rules, quotas and emergency measures use it as
//! it was sent. It is also a secret, so it is hashed where it is stored (counter keys in Redis) and masked where it is
//! shown (`observe`). Rejected: hashing it here, because a quota that an operator sets for the key would not match the
//! hash.
//!
//! A request has at most one key. With two, a server that reads the first would see another caller than one that reads
//! the last, and a made-up key next to the real one would get a fresh limit for each request; such requests are
//! rejected.

use super::AmbiguousIdentity;
use super::config::{self, ApiKeyConfig, IdentityConfigError};
use super::jwt;
use crate::headers::HeaderLookup;
use http::header::{AUTHORIZATION, HeaderName};
use ring::digest;
use std::borrow::Cow;

/// Maximum length of an attribute value in bytes; longer values are replaced by their hash.
const MAX_VALUE: usize = 256;
/// Maximum length of an API key in bytes, the same as in a quota; longer keys are replaced by their hash.
const MAX_KEY: usize = 512;

#[derive(Debug)]
pub(super) struct ApiKeyReader {
    header: Option<HeaderName>,
    bearer: bool,
}

impl ApiKeyReader {
    pub(super) fn new(settings: &ApiKeyConfig) -> Result<Self, IdentityConfigError> {
        let header = settings.header.as_deref().map(config::header).transpose()?;
        Ok(Self { header, bearer: settings.bearer })
    }

    /// Returns the header that contains keys.
    pub(super) const fn header(&self) -> Option<&HeaderName> {
        self.header.as_ref()
    }

    /// Returns the caller's key. With `tokens`, a bearer value that looks like a JWT is not a key.
    pub(super) fn read<'r>(
        &self,
        headers: &'r impl HeaderLookup,
        tokens: bool,
    ) -> Result<Option<Cow<'r, str>>, AmbiguousIdentity> {
        let mut key = None;
        if let Some(name) = &self.header {
            let keys = headers.all(name).map(<[u8]>::trim_ascii).filter(|key| !key.is_empty());
            only(&mut key, keys).map_err(|_| AmbiguousIdentity::Twice(name.clone()))?;
        }
        if self.bearer {
            let bearers = headers.all(&AUTHORIZATION).filter_map(jwt::bearer);
            let mut bearer = None;
            only(&mut bearer, bearers.filter(|value| !(tokens && jwt::looks_like_jwt(value))))
                .map_err(|_| AmbiguousIdentity::Twice(AUTHORIZATION))?;
            only(&mut key, bearer.into_iter())
                .map_err(|_| AmbiguousIdentity::Keys(self.header.clone().unwrap_or(AUTHORIZATION)))?;
        }
        Ok(key.map(|key| match std::str::from_utf8(key) {
            Ok(text) if text.len() <= MAX_KEY => Cow::Borrowed(text),
            _ => Cow::Owned(hashed(key)),
        }))
    }
}

/// Error for several values that differ.
pub(super) struct ConflictingValues;

/// Stores the value in `found`, provided that all occurrences are equal.
pub(super) fn only<'r>(
    found: &mut Option<&'r [u8]>,
    values: impl Iterator<Item = &'r [u8]>,
) -> Result<(), ConflictingValues> {
    for value in values {
        if *found.get_or_insert(value) != value {
            return Err(ConflictingValues);
        }
    }
    Ok(())
}

/// Returns the replacement for a value that cannot be part of a counter key: the first 16 bytes of its SHA-256.
fn hashed(value: &[u8]) -> String {
    let mut text = b"sha256:".to_vec();
    crate::hex::put(&mut text, &digest::digest(&digest::SHA256, value).as_ref()[..16]);
    // Hexadecimal digits are ASCII.
    String::from_utf8(text).unwrap_or_default()
}

/// Returns the value, or its hash if it is too long for a counter key.
pub(super) fn bounded(value: Cow<'_, str>) -> Cow<'_, str> {
    if value.len() <= MAX_VALUE { value } else { Cow::Owned(hashed(value.as_bytes())) }
}
