//! Token verification.
//!
//! Wrong tokens must not delay valid ones, so the two are distinguished before anything slow: besides the argon2id
//! hash, the table holds an HMAC-SHA-256 keyed with the installation's secret. This weakens nothing: slow hashing
//! protects guessable secrets after a leak of their hashes, and 256 random bits cannot be guessed at any speed. A
//! wrong token is rejected at the cost of one row. A matching token is still verified with argon2, so that a digest
//! inserted into the table by an attacker grants nothing; this happens once per process, which then recognizes the
//! token by its digest.

use crate::auth::principal::Principal;
use crate::auth::secret::argon2_hash;
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;
use std::sync::PoisonError;
use subtle::ConstantTimeEq;

const SELECT_HASH: &str =
    "SELECT name, role, salt, hash, digest, expires_at, revoked_at FROM tokens WHERE id = $1";
const STORE_DIGEST: &str = "UPDATE tokens SET digest = $2 WHERE id = $1 AND digest IS NULL";

type TokenHashRow = (String, String, Vec<u8>, Vec<u8>, Option<Vec<u8>>, Option<i64>, Option<i64>);

/// Result of the cheap check of a token.
#[derive(Debug)]
pub enum TokenCheck {
    /// Not a token of this installation.
    Invalid,
    /// Expired or revoked.
    Expired,
    /// The digest matches; verification is pending.
    Valid(UnverifiedToken),
    /// Created before digests existed: only verification can tell.
    Unverified(UnverifiedToken),
}

/// A token to be verified.
pub struct UnverifiedToken {
    id: String,
    secret: String,
    digest: [u8; 32],
    /// Whether the digest is stored.
    has_digest: bool,
    salt: Vec<u8>,
    hash: Vec<u8>,
    expires_at: Option<i64>,
    principal: Principal,
}

impl std::fmt::Debug for UnverifiedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UnverifiedToken({})", self.id)
    }
}

/// Splits a token into id and secret, if it has the form of a token.
fn split_token(token: &str) -> Option<(&str, &str)> {
    let parts = token.strip_prefix("tg_").and_then(|rest| rest.split_once('_'));
    parts.filter(|(id, secret)| id.len() == 16 && secret.len() == 43)
}

impl ControlPlane {
    /// Returns whether this process has verified the token, which may have been revoked since.
    #[must_use]
    pub(crate) fn is_verified(&self, token: &str) -> bool {
        let Some((id, secret)) = split_token(token) else { return false };
        let digest = self.hasher.token_digest(id, secret);
        let known = self.verified_tokens.digests.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(id).is_some_and(|(_, known)| bool::from(known.ct_eq(&digest)))
    }

    /// Checks a token against its digest, at the cost of one row.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn precheck_token(&self, token: &str) -> Result<TokenCheck, ControlError> {
        let Some((id, secret)) = split_token(token) else { return Ok(TokenCheck::Invalid) };
        let row: Option<TokenHashRow> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_HASH).bind(id.to_owned()).fetch_optional(pool).await?
        });
        let now = self.now_millis();
        let Some((name, role, salt, hash, stored, expires_at, revoked_at)) = row else {
            self.offline_access.record(id, None, now);
            return Ok(TokenCheck::Invalid);
        };
        let ended = revoked_at.is_some() || expires_at.is_some_and(|end| end <= now);
        if ended {
            self.offline_access.record(id, None, now);
        }
        let digest = self.hasher.token_digest(id, secret);
        let matches = stored.as_ref().map(|stored| bool::from(stored.as_slice().ct_eq(&digest[..])));
        if matches == Some(false) || (matches.is_none() && ended) {
            return Ok(TokenCheck::Invalid);
        }
        if ended {
            return Ok(TokenCheck::Expired);
        }
        let principal = Principal { name, role: role.parse().map_err(ControlError::Corrupt)? };
        let (id, secret, has_digest) = (id.to_owned(), secret.to_owned(), matches.is_some());
        let claimed = UnverifiedToken { id, secret, digest, has_digest, salt, hash, expires_at, principal };
        Ok(if has_digest { TokenCheck::Valid(claimed) } else { TokenCheck::Unverified(claimed) })
    }

    /// Verifies a token with argon2 and returns its principal; `None` if it is wrong.
    ///
    /// # Errors
    /// [`ControlError`] if the hash cannot be computed.
    pub async fn verify_token(&self, claimed: UnverifiedToken) -> Result<Option<Principal>, ControlError> {
        let UnverifiedToken { id, secret, digest, has_digest, salt, hash, expires_at, principal } = claimed;
        if !self.verified_tokens.contains(&id, &hash, &digest) {
            let Ok(_permit) = self.verified_tokens.verifying.acquire().await else { return Ok(None) };
            // Another request may have verified the same token meanwhile.
            if !self.verified_tokens.contains(&id, &hash, &digest) {
                let computed =
                    tokio::task::spawn_blocking(move || argon2_hash(secret.as_bytes(), &salt)).await;
                let computed = computed.map_err(|error| ControlError::Corrupt(error.to_string()))??;
                if !bool::from(computed.ct_eq(&hash)) {
                    return Ok(None);
                }
                if !has_digest {
                    self.store_digest(&id, &digest).await;
                }
                let mut known = self.verified_tokens.digests.lock().unwrap_or_else(PoisonError::into_inner);
                known.insert(id.clone(), (hash, digest));
            }
        }
        self.offline_access.record(&id, Some((&principal, expires_at)), self.now_millis());
        Ok(Some(principal))
    }

    /// Returns the principal of a token; `None` if it is not valid.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn authenticate(&self, token: &str) -> Result<Option<Principal>, ControlError> {
        match self.precheck_token(token).await? {
            TokenCheck::Valid(claimed) | TokenCheck::Unverified(claimed) => self.verify_token(claimed).await,
            TokenCheck::Invalid | TokenCheck::Expired => Ok(None),
        }
    }

    /// Returns the principal of a token verified in this process, with the viewer role, if the database confirmed it
    /// within the hour.
    #[must_use]
    pub fn cached_principal(&self, token: &str) -> Option<Principal> {
        let (id, _) = token.strip_prefix("tg_")?.split_once('_')?;
        self.offline_access.principal(id, self.now_millis()).filter(|_| self.is_verified(token))
    }

    /// Returns the same, by the id of a previously verified token.
    #[must_use]
    pub fn cached_principal_by_id(&self, id: &str) -> Option<Principal> {
        self.offline_access.principal(id, self.now_millis())
    }

    /// Returns whether the database confirmed within the hour that no token was ever created.
    #[must_use]
    pub fn cached_no_tokens(&self) -> bool {
        self.offline_access.had_no_tokens(self.now_millis())
    }

    /// Stores a token's digest, so that the cheap check recognizes it. If that fails, the next verification tries
    /// again.
    async fn store_digest(&self, id: &str, digest: &[u8; 32]) {
        let written = on!(&self.db, write pool => {
            sqlx::query(STORE_DIGEST).bind(id.to_owned()).bind(digest.to_vec()).execute(pool).await.map(|_| ())
        });
        if let Err(error) = written {
            tracing::debug!(%error, "storing a token digest failed");
        }
    }
}
