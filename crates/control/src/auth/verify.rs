//! How a token proves who sends it.
//!
//! Whoever sends wrong tokens must not make those wait who send right ones, so the two are told apart before anything that
//! takes long: beside the argon2id hash there is an HMAC-SHA-256 by the installation's secret. It weakens nothing. Stretching a
//! secret holds those up who guess it from a copy of its hash, and 256 random bits are guessed by nobody at any speed.
//! A wrong token ends there, at the price of one row. A right one is proven by argon2 all the same, so that a digest which
//! somebody has written into the table lets nobody in; and once in this process, where it is then known again by the digest.

use crate::auth::principal::Identity;
use crate::auth::secret::stretch;
use crate::control_plane::Control;
use crate::db::on;
use crate::error::ControlError;
use std::sync::PoisonError;
use subtle::ConstantTimeEq;

const KEPT: &str = "SELECT name, role, salt, hash, digest, expires_at, revoked_at FROM tokens WHERE id = $1";
const REMEMBER: &str = "UPDATE tokens SET digest = $2 WHERE id = $1 AND digest IS NULL";

type Kept = (String, String, Vec<u8>, Vec<u8>, Option<Vec<u8>>, Option<i64>, Option<i64>);

/// A token that was sent, after a look that costs next to nothing.
#[derive(Debug)]
pub enum Claim {
    /// It is none of ours.
    Wrong,
    /// It was one, and has expired or is revoked.
    Over,
    /// It is right, but for the proof.
    Right(Claimed),
    /// It was made before right ones could be told at a look: only the proof shows.
    Unclear(Claimed),
}

/// A token that is to be proven.
pub struct Claimed {
    id: String,
    secret: String,
    digest: [u8; 32],
    /// Whether the digest is kept.
    digested: bool,
    salt: Vec<u8>,
    hash: Vec<u8>,
    expires_at: Option<i64>,
    who: Identity,
}

impl std::fmt::Debug for Claimed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claimed({})", self.id)
    }
}

/// The id and the secret of what looks like a token.
fn parts(token: &str) -> Option<(&str, &str)> {
    let parts = token.strip_prefix("tg_").and_then(|rest| rest.split_once('_'));
    parts.filter(|(id, secret)| id.len() == 16 && secret.len() == 43)
}

impl Control {
    /// Whether this token has been proven in this process: whoever sends it is no stranger, though it may be revoked by now.
    #[must_use]
    pub(crate) fn has_proven(&self, token: &str) -> bool {
        let Some((id, secret)) = parts(token) else { return false };
        let digest = self.hasher.token(id, secret);
        let known = self.proven.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(id).is_some_and(|(_, known)| bool::from(known.ct_eq(&digest)))
    }

    /// Looks at a token: right or wrong, in the time that one row takes.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn claim(&self, token: &str) -> Result<Claim, ControlError> {
        let Some((id, secret)) = parts(token) else { return Ok(Claim::Wrong) };
        let row: Option<Kept> = on!(&self.db, pool => {
            sqlx::query_as(KEPT).bind(id.to_owned()).fetch_optional(pool).await?
        });
        let now = self.now_millis();
        let Some((name, role, salt, hash, kept, expires_at, revoked_at)) = row else {
            self.lately.note(id, None, now);
            return Ok(Claim::Wrong);
        };
        let over = revoked_at.is_some() || expires_at.is_some_and(|end| end <= now);
        if over {
            self.lately.note(id, None, now);
        }
        let digest = self.hasher.token(id, secret);
        let right = kept.as_ref().map(|kept| bool::from(kept.as_slice().ct_eq(&digest[..])));
        if right == Some(false) || (right.is_none() && over) {
            return Ok(Claim::Wrong);
        }
        if over {
            return Ok(Claim::Over);
        }
        let who = Identity { name, role: role.parse().map_err(ControlError::Broken)? };
        let (id, secret, digested) = (id.to_owned(), secret.to_owned(), right.is_some());
        let claimed = Claimed { id, secret, digest, digested, salt, hash, expires_at, who };
        Ok(if digested { Claim::Right(claimed) } else { Claim::Unclear(claimed) })
    }

    /// Who has this token; nobody, if it is not proven.
    ///
    /// # Errors
    /// [`ControlError`] if it cannot be worked out.
    pub async fn prove(&self, claimed: Claimed) -> Result<Option<Identity>, ControlError> {
        let Claimed { id, secret, digest, digested, salt, hash, expires_at, who } = claimed;
        if !self.proven.knows(&id, &hash, &digest) {
            let Ok(_turn) = self.proven.proving.acquire().await else { return Ok(None) };
            // Others may have waited for the same proof.
            if !self.proven.knows(&id, &hash, &digest) {
                let worked_out = tokio::task::spawn_blocking(move || stretch(secret.as_bytes(), &salt)).await;
                let worked_out = worked_out.map_err(|error| ControlError::Broken(error.to_string()))??;
                if !bool::from(worked_out.ct_eq(&hash)) {
                    return Ok(None);
                }
                if !digested {
                    self.remember(&id, &digest).await;
                }
                let mut known = self.proven.known.lock().unwrap_or_else(PoisonError::into_inner);
                known.insert(id.clone(), (hash, digest));
            }
        }
        self.lately.note(&id, Some((&who, expires_at)), self.now_millis());
        Ok(Some(who))
    }

    /// Who has this token; nobody, if it is not valid.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn identify(&self, token: &str) -> Result<Option<Identity>, ControlError> {
        match self.claim(token).await? {
            Claim::Right(claimed) | Claim::Unclear(claimed) => self.prove(claimed).await,
            Claim::Wrong | Claim::Over => Ok(None),
        }
    }

    /// Who held a token that was proven here, when the database last said so, within the hour: to look, and no more.
    #[must_use]
    pub fn identified_lately(&self, token: &str) -> Option<Identity> {
        let (id, _) = token.strip_prefix("tg_")?.split_once('_')?;
        self.lately.holder(id, self.now_millis()).filter(|_| self.has_proven(token))
    }

    /// The same by the id of a token that was proven before.
    #[must_use]
    pub fn holder_lately(&self, id: &str) -> Option<Identity> {
        self.lately.holder(id, self.now_millis())
    }

    /// Whether the database said within the hour that there never was a token.
    #[must_use]
    pub fn had_no_tokens_lately(&self) -> bool {
        self.lately.had_no_tokens(self.now_millis())
    }

    /// From now on this token is told from wrong ones at a look. Where that cannot be written, the next proof tries again.
    async fn remember(&self, id: &str, digest: &[u8; 32]) {
        let written = on!(&self.db, write pool => {
            sqlx::query(REMEMBER).bind(id.to_owned()).bind(digest.to_vec()).execute(pool).await.map(|_| ())
        });
        if let Err(error) = written {
            tracing::debug!(%error, "the digest of a token was not written");
        }
    }
}
