//! What is agreed with callers: read, written and ended here, listed in `list`, imported many at once in `import`, and in memory
//! for the limiter in `table`.

pub(crate) mod import;
pub(crate) mod list;
pub(crate) mod overrides;
pub(crate) mod pending;
pub(crate) mod purge;
pub(crate) mod record;
pub(crate) mod row;
pub(crate) mod table;

use crate::audit::{reason_only, record};
use crate::auth::key_hash::{Caller, KeyHash, prefix};
use crate::control_plane::Control;
use crate::db::on;
use crate::db::time::{tell, tell_millis};
use crate::db::transaction::{Actor, Changed, Expected, writing};
use crate::error::{ControlError, QuotaProblem};
use crate::quota::pending::{Until, is_to_come};
use crate::quota::record::{Quota, QuotaDraft};
use crate::quota::row::{Whole, columns};
use tollgate_rules::Ruleset;

const ONE: &str = concat!("SELECT ", columns!(whole), " FROM quotas WHERE key_hash = $1 AND deleted = 0");

/// Those whose ids begin with the same word: one, or none.
const BEGINS: &str =
    "SELECT key_hash FROM quotas WHERE key_hash >= $1 AND key_hash <= $2 AND deleted = 0 LIMIT 2";

const UPSERT: &str =
    "INSERT INTO quotas (key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason,
     author, updated_at, deleted, revision, until_tier, until_overrides, until_expires_at)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, $11, $12, $13)
     ON CONFLICT (key_hash) DO UPDATE SET tier = excluded.tier, overrides = excluded.overrides,
     effective_at = excluded.effective_at, expires_at = excluded.expires_at, reason = excluded.reason,
     author = excluded.author, updated_at = excluded.updated_at, deleted = 0, revision = excluded.revision,
     until_tier = excluded.until_tier, until_overrides = excluded.until_overrides,
     until_expires_at = excluded.until_expires_at";

/// About how many rows there are, without counting them.
const ABOUT: [&str; 2] = [
    "SELECT COALESCE(MAX(rowid), 0) FROM quotas",
    "SELECT GREATEST(reltuples::BIGINT, pg_relation_size(oid) / 256) FROM pg_class WHERE oid = 'quotas'::regclass",
];

fn told(quota: Option<&Quota>) -> String {
    quota.and_then(|quota| serde_json::to_string(quota).ok()).unwrap_or_default()
}

impl Control {
    /// What is agreed with a caller.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn quota(&self, caller: impl Into<Caller<'_>>) -> Result<Option<Quota>, ControlError> {
        let hash = self.hasher.of(caller.into());
        let row: Option<Whole> = on!(&self.db, pool => {
            sqlx::query_as(ONE).bind(hash.0.to_vec()).fetch_optional(pool).await?
        });
        let now = self.now_seconds();
        row.map(|row| row.quota(now)).transpose()
    }

    /// The whole id of a caller with whom something is agreed, by the word that it begins with ([`KeyHash::first_word`]).
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn quota_id(&self, first_word: u64) -> Result<Option<KeyHash>, ControlError> {
        let ends = [0, u8::MAX].map(|rest| {
            let mut bytes = [rest; 32];
            bytes[..8].copy_from_slice(&first_word.to_be_bytes());
            bytes.to_vec()
        });
        let [from, to] = ends;
        let rows: Vec<(Vec<u8>,)> = on!(&self.db, pool => {
            sqlx::query_as(BEGINS).bind(from).bind(to).fetch_all(pool).await?
        });
        // Two that begin alike cannot be told apart by it.
        let one = rows.first().filter(|_| rows.len() == 1);
        Ok(one.and_then(|(hash,)| KeyHash::from_slice(hash)))
    }

    /// Agrees on something with a caller. It acts on this node when this returns.
    ///
    /// # Errors
    /// The outer one if the database does not do it, or holds something else than is expected; the inner one if what is
    /// sent cannot be.
    pub async fn put_quota(
        &self,
        caller: impl Into<Caller<'_>>,
        draft: QuotaDraft,
        rules: &Ruleset,
        expected: Expected,
        actor: &Actor,
    ) -> Result<Result<Quota, QuotaProblem>, ControlError> {
        let checked = match draft.check(rules, self.clock.now()) {
            Ok(checked) => checked,
            Err(problem) => return Ok(Err(problem)),
        };
        let caller = caller.into();
        let hash = self.hasher.of(caller);
        let overrides = serde_json::to_string(&checked.overrides).unwrap_or_default();
        let (now, seconds) = (self.now_millis(), self.now_seconds());
        let written = writing!(&self.db, |tx, head| {
            let found: Option<Whole> =
                sqlx::query_as(ONE).bind(hash.0.to_vec()).fetch_optional(&mut *tx).await?;
            let going_on = found.as_ref().and_then(|found| found.row.terms.acting(seconds));
            let going_on = going_on.filter(|_| is_to_come(checked.effective_at, seconds));
            let before = found.map(|row| row.quota(seconds)).transpose()?;
            if !expected.meets(before.as_ref().map(|quota| quota.revision)) {
                return Err(ControlError::Changed);
            }
            let key_prefix = match (caller, &before) {
                (Caller::Key(key), _) => prefix(key),
                (Caller::Id(_), Some(before)) => before.key_prefix.clone(),
                (Caller::Id(_), None) => return Err(ControlError::Unknown("quota with this id")),
            };
            let after = Quota {
                id: hash.to_string(),
                key_prefix,
                tier: checked.tier.clone(),
                overrides: checked.overrides.clone(),
                effective_at: checked.effective_at.map(tell),
                expires_at: checked.expires_at.map(tell),
                until_effective: going_on.clone().map(Until::read).transpose()?.map(Until::tell),
                reason: checked.reason.clone(),
                author: checked.author.clone().unwrap_or_else(|| actor.name.clone()),
                updated_at: tell_millis(now),
                revision: head.0,
            };
            let (until_tier, until_overrides, until_expires_at) = Until::columns(going_on);
            sqlx::query(UPSERT)
                .bind(hash.0.to_vec())
                .bind(after.key_prefix.clone())
                .bind(after.tier.clone())
                .bind(overrides.clone())
                .bind(checked.effective_at)
                .bind(checked.expires_at)
                .bind(after.reason.clone())
                .bind(after.author.clone())
                .bind(now)
                .bind(head.0)
                .bind(until_tier)
                .bind(until_overrides)
                .bind(until_expires_at)
                .execute(&mut *tx)
                .await?;
            let changed = Changed {
                action: "quota.put",
                target: &after.id,
                before: told(before.as_ref()),
                after: told(Some(&after)),
            };
            record!(tx, head, now, actor, &changed);
            after
        });
        self.act().await;
        Ok(Ok(written))
    }

    /// Ends an agreement.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] if there is none, [`ControlError::Changed`] if it is another than expected, or the
    /// database's own.
    pub async fn delete_quota(
        &self,
        caller: impl Into<Caller<'_>>,
        expected: Expected,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        self.delete_quota_with_reason(caller, expected, "", actor).await
    }

    /// Deletes a quota and records the reason in the audit log.
    ///
    /// # Errors
    /// As [`Control::delete_quota`].
    pub async fn delete_quota_with_reason(
        &self,
        caller: impl Into<Caller<'_>>,
        expected: Expected,
        reason: &str,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        let hash = self.hasher.of(caller.into());
        let (now, seconds) = (self.now_millis(), self.now_seconds());
        writing!(&self.db, |tx, head| {
            let found: Option<Whole> =
                sqlx::query_as(ONE).bind(hash.0.to_vec()).fetch_optional(&mut *tx).await?;
            let before = found.map(|row| row.quota(seconds)).transpose()?;
            let before = before.ok_or(ControlError::Unknown("quota of this caller"))?;
            if !expected.meets(Some(before.revision)) {
                return Err(ControlError::Changed);
            }
            sqlx::query("UPDATE quotas SET deleted = 1, updated_at = $2, revision = $3 WHERE key_hash = $1")
                .bind(hash.0.to_vec())
                .bind(now)
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let changed = Changed {
                action: "quota.delete",
                target: &before.id,
                before: told(Some(&before)),
                after: reason_only(reason),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.act().await;
        Ok(())
    }

    /// About how many agreements there are.
    pub(crate) async fn about_how_many(&self) -> Result<usize, ControlError> {
        let sql = self.db.dialect(ABOUT);
        let (rows,): (i64,) = on!(&self.db, pool => sqlx::query_as(sql).fetch_one(pool).await?);
        Ok(usize::try_from(rows).unwrap_or(0))
    }
}
