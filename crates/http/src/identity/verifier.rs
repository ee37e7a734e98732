//! What verifies the credentials of requests: the keys of JWTs, and what is known of API keys. Their files are read again
//! when they change, beside the traffic.

use super::config::{IdentityConfig, IdentityConfigError};
use super::jwt::JwtVerifier;
use super::known_keys::KnownKeys;
use std::sync::Arc;

/// Verifies credentials. Resolvers with the same settings share one, with its files and caches.
#[derive(Debug)]
pub struct CredentialVerifier {
    pub(super) jwt: Option<JwtVerifier>,
    pub(super) keys: Option<KnownKeys>,
}

impl CredentialVerifier {
    /// Creates a verifier and reads the files that `settings` name.
    ///
    /// # Errors
    /// Invalid settings, or an invalid file.
    pub fn new(settings: &IdentityConfig) -> Result<Arc<Self>, IdentityConfigError> {
        Ok(Arc::new(Self { jwt: JwtVerifier::new(settings)?, keys: KnownKeys::new(&settings.api_key)? }))
    }

    /// Returns whether the verifier was created from these settings.
    #[must_use]
    pub fn matches_config(&self, settings: &IdentityConfig) -> bool {
        self.jwt.as_ref().map(JwtVerifier::settings) == settings.jwt.as_ref()
            && match (&self.keys, &settings.api_key.known) {
                (Some(keys), Some(_)) => keys.matches_config(&settings.api_key),
                (keys, known) => keys.is_none() && known.is_none(),
            }
    }

    /// Reads the files that have changed; returns whether any has. Called about twice a second.
    ///
    /// # Errors
    /// The error of a changed file, once per change; its previous content stays active.
    pub fn reload_if_changed(&self) -> Result<bool, String> {
        let jwt = self.jwt.as_ref().and_then(JwtVerifier::reload);
        let keys = self.keys.as_ref().and_then(KnownKeys::reload);
        let files: Vec<_> = jwt.into_iter().chain(keys).collect();
        if !files.iter().any(|(has_changed, _)| *has_changed) {
            return Ok(false);
        }
        // An error of the one file is not over when the other is read.
        files.into_iter().find_map(|(_, error)| error).map_or(Ok(true), Err)
    }

    /// Returns how many requests had a key that is not known; `None` if any key counts.
    #[must_use]
    pub fn unknown_keys(&self) -> Option<u64> {
        self.keys.as_ref().map(KnownKeys::unknown_seen)
    }
}
