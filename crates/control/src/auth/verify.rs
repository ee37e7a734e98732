//! How a token proves who sends it.
//!
//! Whoever sends wrong tokens must not make those wait who send right ones, so the two are told apart before anything that
//! takes long: beside the argon2id hash there is an HMAC-SHA-256 by the installation's secret. It weakens nothing. Stretching a
//! secret holds those up who guess it from a copy of its hash, and 256 random bits are guessed by nobody at any speed.
//! A wrong token ends there, at the price of one row. A right one is proven by argon2 all the same, so that a digest which
//! somebody has written into the table lets nobody in; and once in this process, where it is then known again by the digest.

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

/// A token that was sent, after a look that costs next to nothing.
#[derive(Debug)]
pub enum TokenCheck {
    /// It is none of ours.
    Invalid,
    /// It was one, and has expired or is revoked.
    Expired,
    /// It is right, but for the proof.
    Valid(UnverifiedToken),
    /// It was made before right ones could be told at a look: only the proof shows.
    Unverified(UnverifiedToken),
}

/// A token that is to be proven.
pub struct UnverifiedToken {
    id: String,
    secret: String,
    digest: [u8; 32],
    /// Whether the digest is kept.
    has_digest: bool,
    salt: Vec<u8>,
    hash: Vec<u8>,
    expires_at: Option<i64>,
    principal: Principal,
}

impl std::fmt::Debug for UnverifiedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claimed({})", self.id)
    }
}

/// The id and the secret of what looks like a token.
fn split_token(token: &str) -> Option<(&str, &str)> {
    let parts = token.strip_prefix("tg_").and_then(|rest| rest.split_once('_'));
    parts.filter(|(id, secret)| id.len() == 16 && secret.len() == 43)
}

impl ControlPlane {
    /// Whether this token has been proven in this process: whoever sends it is no stranger, though it may be revoked by now.
    #[must_use]
    pub(crate) fn is_verified(&self, token: &str) -> bool {
        let Some((id, secret)) = split_token(token) else { return false };
        let digest = self.hasher.token_digest(id, secret);
        let known = self.verified_tokens.digests.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(id).is_some_and(|(_, known)| bool::from(known.ct_eq(&digest)))
    }

    /// Looks at a token: right or wrong, in the time that one row takes.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn precheck_token(&self, token: &str) -> Result<TokenCheck, ControlError> {
        let Some((id, secret)) = split_token(token) else { return Ok(TokenCheck::Invalid) };
        let row: Option<TokenHashRow> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_HASH).bind(id.to_owned()).fetch_optional(pool).await?
        });
        let now = self.now_millis();
        let Some((name, role, salt, hash, kept, expires_at, revoked_at)) = row else {
            self.offline_access.record(id, None, now);
            return Ok(TokenCheck::Invalid);
        };
        let over = revoked_at.is_some() || expires_at.is_some_and(|end| end <= now);
        if over {
            self.offline_access.record(id, None, now);
        }
        let digest = self.hasher.token_digest(id, secret);
        let right = kept.as_ref().map(|kept| bool::from(kept.as_slice().ct_eq(&digest[..])));
        if right == Some(false) || (right.is_none() && over) {
            return Ok(TokenCheck::Invalid);
        }
        if over {
            return Ok(TokenCheck::Expired);
        }
        let who = Principal { name, role: role.parse().map_err(ControlError::Corrupt)? };
        let (id, secret, digested) = (id.to_owned(), secret.to_owned(), right.is_some());
        let claimed = UnverifiedToken {
            id,
            secret,
            digest,
            has_digest: digested,
            salt,
            hash,
            expires_at,
            principal: who,
        };
        Ok(if digested { TokenCheck::Valid(claimed) } else { TokenCheck::Unverified(claimed) })
    }

    /// Who has this token; nobody, if it is not proven.
    ///
    /// # Errors
    /// [`ControlError`] if it cannot be worked out.
    pub async fn verify_token(&self, claimed: UnverifiedToken) -> Result<Option<Principal>, ControlError> {
        let UnverifiedToken {
            id,
            secret,
            digest,
            has_digest: digested,
            salt,
            hash,
            expires_at,
            principal: who,
        } = claimed;
        if !self.verified_tokens.contains(&id, &hash, &digest) {
            let Ok(_turn) = self.verified_tokens.verifying.acquire().await else { return Ok(None) };
            // Others may have waited for the same proof.
            if !self.verified_tokens.contains(&id, &hash, &digest) {
                let worked_out =
                    tokio::task::spawn_blocking(move || argon2_hash(secret.as_bytes(), &salt)).await;
                let worked_out = worked_out.map_err(|error| ControlError::Corrupt(error.to_string()))??;
                if !bool::from(worked_out.ct_eq(&hash)) {
                    return Ok(None);
                }
                if !digested {
                    self.store_digest(&id, &digest).await;
                }
                let mut known = self.verified_tokens.digests.lock().unwrap_or_else(PoisonError::into_inner);
                known.insert(id.clone(), (hash, digest));
            }
        }
        self.offline_access.record(&id, Some((&who, expires_at)), self.now_millis());
        Ok(Some(who))
    }

    /// Who has this token; nobody, if it is not valid.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn authenticate(&self, token: &str) -> Result<Option<Principal>, ControlError> {
        match self.precheck_token(token).await? {
            TokenCheck::Valid(claimed) | TokenCheck::Unverified(claimed) => self.verify_token(claimed).await,
            TokenCheck::Invalid | TokenCheck::Expired => Ok(None),
        }
    }

    /// Who held a token that was proven here, when the database last said so, within the hour: to look, and no more.
    #[must_use]
    pub fn cached_principal(&self, token: &str) -> Option<Principal> {
        let (id, _) = token.strip_prefix("tg_")?.split_once('_')?;
        self.offline_access.principal(id, self.now_millis()).filter(|_| self.is_verified(token))
    }

    /// The same by the id of a token that was proven before.
    #[must_use]
    pub fn cached_principal_by_id(&self, id: &str) -> Option<Principal> {
        self.offline_access.principal(id, self.now_millis())
    }

    /// Whether the database said within the hour that there never was a token.
    #[must_use]
    pub fn cached_no_tokens(&self) -> bool {
        self.offline_access.had_no_tokens(self.now_millis())
    }

    /// From now on this token is told from wrong ones at a look. Where that cannot be written, the next proof tries again.
    async fn store_digest(&self, id: &str, digest: &[u8; 32]) {
        let written = on!(&self.db, write pool => {
            sqlx::query(STORE_DIGEST).bind(id.to_owned()).bind(digest.to_vec()).execute(pool).await.map(|_| ())
        });
        if let Err(error) = written {
            tracing::debug!(%error, "the digest of a token was not written");
        }
    }
}
