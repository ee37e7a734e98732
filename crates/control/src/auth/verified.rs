//! Tokens that this process has verified, so that argon2 runs once for each.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

/// The hash that proved a token, and the token's digest.
type VerifiedDigest = (Vec<u8>, [u8; 32]);

/// Tokens that have been proven, by their ids.
pub(crate) struct VerifiedTokens {
    pub(crate) digests: Mutex<HashMap<String, VerifiedDigest>>,
    /// So many proofs at a time: each takes 19 MiB.
    pub(crate) verifying: Semaphore,
}

impl Default for VerifiedTokens {
    fn default() -> Self {
        Self { digests: Mutex::default(), verifying: Semaphore::new(2) }
    }
}

impl VerifiedTokens {
    /// Whether this token was verified by this hash.
    pub(crate) fn contains(&self, id: &str, hash: &[u8], digest: &[u8; 32]) -> bool {
        let known = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(id).is_some_and(|(by, known)| by == hash && bool::from(known.ct_eq(digest)))
    }
}
