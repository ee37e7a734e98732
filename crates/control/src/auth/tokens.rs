//! Admin tokens with a role, shown once and stored as an argon2id hash.
//!
//! A token is `tg_ID_SECRET`: the id finds its row, and the secret of 256 random bits authenticates it (`verify`).
//! Validity is read from the database each time, so that a revocation takes effect immediately (while the database is
//! unavailable: `offline`).

use crate::audit::record;
use crate::auth::principal::{Principal, Role};
use crate::auth::secret::{argon2_hash, hex, random};
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::db::time::format_millis;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::ControlError;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;
use tollgate_core::TimeDelta;
use utoipa::ToSchema;

/// A newly created token.
#[derive(Clone, Debug)]
pub struct NewToken {
    /// The token's id.
    pub id: String,
    /// The complete token: shown once, not stored.
    pub secret: String,
}

/// A token's metadata.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Token {
    /// The token's id.
    pub id: String,
    /// Name of the token's holder.
    pub name: String,
    /// The token's role.
    pub role: String,
    /// Creation time.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// Expiry, if any.
    #[schema(required = true)]
    pub expires_at: Option<String>,
    /// Time of revocation, if revoked.
    #[schema(required = true)]
    pub revoked_at: Option<String>,
}

const INSERT: &str = "INSERT INTO tokens (id, name, role, salt, hash, created_at, expires_at, digest)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";
const SELECT_ONE: &str = "SELECT name, role, expires_at FROM tokens
     WHERE id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > $2)";
const LIST: &str =
    "SELECT id, name, role, created_at, expires_at, revoked_at FROM tokens ORDER BY created_at, id";

type TokenRow = (String, String, String, i64, Option<i64>, Option<i64>);

impl ControlPlane {
    /// Creates a token. The returned secret cannot be retrieved again.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
    pub async fn create_token(
        &self,
        name: &str,
        role: Role,
        lasts: Option<TimeDelta>,
        actor: &Actor,
    ) -> Result<NewToken, ControlError> {
        let (id, salt, secret) = (random::<8>()?, random::<16>()?, random::<32>()?);
        let (id, secret) = (hex(&id), URL_SAFE_NO_PAD.encode(secret));
        let hash = argon2_hash(secret.as_bytes(), &salt)?;
        let digest = self.hasher.token_digest(&id, &secret);
        let now = self.now_millis();
        let expires_at =
            lasts.map(|lasts| now.saturating_add(i64::try_from(lasts.ceil_millis()).unwrap_or(i64::MAX)));
        writing!(&self.db, |tx, head| {
            sqlx::query(INSERT)
                .bind(id.clone())
                .bind(name.to_owned())
                .bind(role.name())
                .bind(salt.to_vec())
                .bind(hash.clone())
                .bind(now)
                .bind(expires_at)
                .bind(digest.to_vec())
                .execute(&mut *tx)
                .await?;
            let after = serde_json::json!({
                "name": name, "role": role.name(), "expires_at": expires_at.map(format_millis),
            });
            let changed = ChangeRecord {
                action: "token.create",
                target: &id,
                before: String::new(),
                after: after.to_string(),
            };
            record!(tx, head, now, actor, &changed);
        });
        Ok(NewToken { secret: format!("tg_{id}_{secret}"), id })
    }

    /// Returns all tokens, including expired and revoked ones.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn tokens(&self) -> Result<Vec<Token>, ControlError> {
        let rows: Vec<TokenRow> = on!(&self.db, pool => sqlx::query_as(LIST).fetch_all(pool).await?);
        let token = |(id, name, role, created_at, expires_at, revoked_at): TokenRow| Token {
            id,
            name,
            role,
            created_at: format_millis(created_at),
            expires_at: expires_at.map(format_millis),
            revoked_at: revoked_at.map(format_millis),
        };
        Ok(rows.into_iter().map(token).collect())
    }

    /// Returns whether any token is valid now, so that a login is possible.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn has_tokens(&self) -> Result<bool, ControlError> {
        let count = "SELECT COUNT(*) FROM tokens
             WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > $1)";
        let now = self.now_millis();
        let (count,): (i64,) = on!(&self.db, pool => sqlx::query_as(count).bind(now).fetch_one(pool).await?);
        Ok(count > 0)
    }

    /// Returns whether a token was ever created: from then on, every request needs one.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn had_tokens(&self) -> Result<bool, ControlError> {
        let count = "SELECT COUNT(*) FROM tokens";
        let (count,): (i64,) = on!(&self.db, pool => sqlx::query_as(count).fetch_one(pool).await?);
        self.offline_access.record_tokens(count > 0, self.now_millis());
        Ok(count > 0)
    }

    /// Revokes a token, immediately.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if no unrevoked token has this id; or a database error.
    pub async fn revoke_token(&self, id: &str, actor: &Actor) -> Result<(), ControlError> {
        let now = self.now_millis();
        writing!(&self.db, |tx, head| {
            let revoke = "UPDATE tokens SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL";
            let done = sqlx::query(revoke).bind(id.to_owned()).bind(now).execute(&mut *tx).await?;
            if done.rows_affected() == 0 {
                return Err(ControlError::NotFound("unrevoked token with this id"));
            }
            let changed = ChangeRecord {
                action: "token.revoke",
                target: id,
                before: String::new(),
                after: String::new(),
            };
            record!(tx, head, now, actor, &changed);
        });
        Ok(())
    }

    /// Returns the principal of a previously verified token id; `None` if the token is no longer valid.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn principal(&self, id: &str) -> Result<Option<Principal>, ControlError> {
        let now = self.now_millis();
        let row: Option<(String, String, Option<i64>)> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_ONE).bind(id.to_owned()).bind(now).fetch_optional(pool).await?
        });
        let Some((name, role, expires_at)) = row else {
            self.offline_access.record(id, None, now);
            return Ok(None);
        };
        let principal = Principal { name, role: role.parse().map_err(ControlError::Corrupt)? };
        self.offline_access.record(id, Some((&principal, expires_at)), now);
        Ok(Some(principal))
    }
}
