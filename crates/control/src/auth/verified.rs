//! Cache of tokens that this process has verified, so that argon2 runs once per token.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

/// The hash that verified a token, and the token's digest.
type VerifiedDigest = (Vec<u8>, [u8; 32]);

/// Verified tokens, by id.
pub(crate) struct VerifiedTokens {
    pub(crate) digests: Mutex<HashMap<String, VerifiedDigest>>,
    /// Limits concurrent verifications: each takes 19 MiB.
    pub(crate) verifying: Semaphore,
}

impl Default for VerifiedTokens {
    fn default() -> Self {
        Self { digests: Mutex::default(), verifying: Semaphore::new(2) }
    }
}

impl VerifiedTokens {
    /// Returns whether this token was verified against this hash.
    pub(crate) fn contains(&self, id: &str, hash: &[u8], digest: &[u8; 32]) -> bool {
        let known = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(id).is_some_and(|(by, known)| by == hash && bool::from(known.ct_eq(digest)))
    }
}
