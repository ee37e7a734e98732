//! API keys. A key is a secret: only its hash is ever stored, logged or shown.
//!
//! The hash is the first 16 bytes of SHA-256, or of HMAC-SHA-256 where a secret is set, in hexadecimal. It is the same on
//! every node, since nodes share counters; rules that name a key name its hash (`printf %s KEY | sha256sum | cut -c1-32`).
//! A hash seeded by each process was rejected for that reason. Half of SHA-256 still leaves 2^64 tries to find two keys
//! that share a counter, and no use in finding them.

use super::settings::{self, ApiKeySettings, WhoError};
use super::token;
use crate::fields::Fields;
use http::header::{AUTHORIZATION, HeaderName};
use ring::{digest, hmac};
use std::borrow::Cow;

/// The longest value that is kept as it came; longer ones are told apart by their hash.
const LONGEST: usize = 256;
const SHORTEST_SECRET: usize = 16;

pub(super) struct ApiKey {
    header: Option<HeaderName>,
    bearer: bool,
    secret: Option<hmac::Key>,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiKey")
            .field("header", &self.header)
            .field("bearer", &self.bearer)
            .finish_non_exhaustive()
    }
}

impl ApiKey {
    pub(super) fn new(settings: &ApiKeySettings) -> Result<Self, WhoError> {
        let secret = settings.secret_file.as_ref().map(|path| {
            let bytes = settings::read_file(path)?;
            let secret = bytes.trim_ascii();
            if secret.len() < SHORTEST_SECRET {
                let wrong = format!("a secret has at least {SHORTEST_SECRET} bytes");
                return Err(WhoError::File { path: path.clone(), wrong });
            }
            Ok(hmac::Key::new(hmac::HMAC_SHA256, secret))
        });
        Ok(Self {
            header: settings.header.as_deref().map(settings::header).transpose()?,
            bearer: settings.bearer,
            secret: secret.transpose()?,
        })
    }

    /// The hash of the caller's key. Where tokens are read, what looks like one is no key.
    pub(super) fn read(&self, headers: &impl Fields, tokens: bool) -> Option<String> {
        let own = self.header.as_ref().and_then(|name| headers.first(name));
        let bearer = || {
            let value = token::bearer(headers.first(&AUTHORIZATION).filter(|_| self.bearer)?)?;
            (!(tokens && token::looks_like_one(value))).then_some(value)
        };
        let key = own.map(<[u8]>::trim_ascii).filter(|key| !key.is_empty()).or_else(bearer)?;
        Some(match &self.secret {
            Some(secret) => hex(hmac::sign(secret, key).as_ref()),
            None => hex(digest::digest(&digest::SHA256, key).as_ref()),
        })
    }
}

/// The first 16 bytes as text.
fn hex(bytes: &[u8]) -> String {
    let mut text = Vec::with_capacity(32);
    crate::hex::put(&mut text, &bytes[..16]);
    // Digits are ASCII.
    String::from_utf8(text).unwrap_or_default()
}

/// The value, or its hash where it is too long to be part of a key.
pub(super) fn bounded(value: Cow<'_, str>) -> Cow<'_, str> {
    if value.len() <= LONGEST {
        return value;
    }
    Cow::Owned(format!("sha256:{}", hex(digest::digest(&digest::SHA256, value.as_bytes()).as_ref())))
}
