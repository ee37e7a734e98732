//! API keys. A key is the caller's name on every front alike: rules, quotas and emergencies speak of it as it was sent. It
//! is a secret as well, so it is hashed where it is written down (`store`'s names in Redis) and masked where it is shown
//! (`observe`). Hashing it here was rejected: what an operator agrees with a key would then be about somebody else.
//!
//! A request has one key. With two of them whoever reads the first is told another caller than whoever reads the last, and
//! a made-up one beside the real one would be a fresh limit for each request; so such a request is refused.

use super::AmbiguousIdentity;
use super::config::{self, ApiKeyConfig, IdentityConfigError};
use super::jwt;
use crate::headers::HeaderLookup;
use http::header::{AUTHORIZATION, HeaderName};
use ring::digest;
use std::borrow::Cow;

/// The longest value that is kept as it came; longer ones are told apart by their hash.
const MAX_VALUE: usize = 256;
/// The same of an API key: as long as one that something can be agreed with.
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

    /// The field that keys are sent in.
    pub(super) const fn header(&self) -> Option<&HeaderName> {
        self.header.as_ref()
    }

    /// The caller's key. Where tokens are read, what looks like one is no key.
    pub(super) fn read<'r>(
        &self,
        headers: &'r impl HeaderLookup,
        tokens: bool,
    ) -> Result<Option<Cow<'r, str>>, AmbiguousIdentity> {
        let mut key = None;
        if let Some(name) = &self.header {
            let own = headers.all(name).map(<[u8]>::trim_ascii).filter(|key| !key.is_empty());
            only(&mut key, own).map_err(|_| AmbiguousIdentity::Twice(name.clone()))?;
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

/// Values that differ.
pub(super) struct ConflictingValues;

/// The one value that there is, in however many places.
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

/// What stands for a value that cannot be part of a key: the first 16 bytes of its SHA-256.
fn hashed(value: &[u8]) -> String {
    let mut text = b"sha256:".to_vec();
    crate::hex::put(&mut text, &digest::digest(&digest::SHA256, value).as_ref()[..16]);
    // Digits are ASCII.
    String::from_utf8(text).unwrap_or_default()
}

/// The value, or its hash where it is too long to be part of a key.
pub(super) fn bounded(value: Cow<'_, str>) -> Cow<'_, str> {
    if value.len() <= MAX_VALUE { value } else { Cow::Owned(hashed(value.as_bytes())) }
}
