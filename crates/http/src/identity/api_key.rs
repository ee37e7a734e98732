//! API key extraction. The key identifies the caller on every protocol: rules, quotas and emergency measures use it as
//! it was sent. It is also a secret, so it is hashed where it is stored (counter keys in Redis) and masked where it is
//! shown (`observe`). Rejected: hashing it here, because a quota that an operator sets for the key would not match the
//! hash.
//!
//! A request has at most one key. With two, a server that reads the first would see another caller than one that reads
//! the last, and a made-up key next to the real one would get a fresh limit for each request; such requests are
//! rejected. So are keys that servers read differently (`credential`).

use super::AmbiguousIdentity;
use super::config::{self, ApiKeyConfig, IdentityConfigError, Unreadable};
use super::credential::{self, Authorization};
use crate::headers::HeaderLookup;
use http::header::{AUTHORIZATION, HeaderName};
use ring::digest;
use std::borrow::Cow;

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

    /// Returns whether bearer values are keys.
    pub(super) const fn reads_bearer(&self) -> bool {
        self.bearer
    }

    /// Returns the caller's key as it was sent. With `tokens`, a bearer value that looks like a JWT is not a key.
    pub(super) fn read<'r>(
        &self,
        headers: &'r impl HeaderLookup,
        tokens: bool,
        unreadable: Unreadable,
    ) -> Result<Option<&'r [u8]>, AmbiguousIdentity> {
        let refuse = |name: &HeaderName| match unreadable {
            Unreadable::Refuse => Err(AmbiguousIdentity::Unreadable(name.clone())),
            Unreadable::Anonymous => Ok(()),
        };
        let mut key = None;
        if let Some(name) = &self.header {
            for value in headers.all(name).map(<[u8]>::trim_ascii).filter(|value| !value.is_empty()) {
                match credential::is_readable(value) {
                    true => only(&mut key, value).map_err(|_| AmbiguousIdentity::Twice(name.clone()))?,
                    false => refuse(name)?,
                }
            }
        }
        if self.bearer {
            let (is_token, mut bearer) = (|value| tokens && credential::looks_like_jwt(value), None);
            for value in headers.all(&AUTHORIZATION) {
                match Authorization::read(value) {
                    Authorization::Bearer(value) if !is_token(value) => {
                        only(&mut bearer, value).map_err(|_| AmbiguousIdentity::Twice(AUTHORIZATION))?;
                    }
                    Authorization::Unreadable if !is_token(value.trim_ascii()) => refuse(&AUTHORIZATION)?,
                    _ => {}
                }
            }
            if let Some(bearer) = bearer {
                only(&mut key, bearer)
                    .map_err(|_| AmbiguousIdentity::Keys(self.header.clone().unwrap_or(AUTHORIZATION)))?;
            }
        }
        Ok(key)
    }
}

/// Returns a key as the attribute has it.
pub(super) fn text(key: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(key) {
        Ok(text) if text.len() <= MAX_KEY => Cow::Borrowed(text),
        _ => Cow::Owned(hashed(key)),
    }
}

/// Error for several values that differ.
pub(super) struct ConflictingValues;

/// Stores the value in `found`, unless that holds another one.
pub(super) fn only<'r>(found: &mut Option<&'r [u8]>, value: &'r [u8]) -> Result<(), ConflictingValues> {
    if *found.get_or_insert(value) == value { Ok(()) } else { Err(ConflictingValues) }
}

/// Returns the replacement for a value that cannot be part of a counter key: the first 16 bytes of its SHA-256.
fn hashed(value: &[u8]) -> String {
    let mut text = b"sha256:".to_vec();
    crate::hex::put(&mut text, &digest::digest(&digest::SHA256, value).as_ref()[..16]);
    // Hexadecimal digits are ASCII.
    String::from_utf8(text).unwrap_or_default()
}
