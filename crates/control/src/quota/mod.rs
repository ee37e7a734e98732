//! Quotas: read, written and deleted here, listed in `list`, imported in bulk in `import`, and in memory for the
//! limiter in `table`.

pub(crate) mod caller;
pub(crate) mod guard;
pub(crate) mod import;
pub(crate) mod list;
pub(crate) mod pending;
pub(crate) mod purge;
pub(crate) mod record;
pub(crate) mod row;

use crate::audit::{reason_only, record};
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::db::time::{format_millis, format_time};
use crate::db::transaction::{Actor, ChangeRecord, Precondition, writing};
use crate::error::{ControlError, ValidationError};
use crate::quota::pending::{PriorTerms, is_pending};
use crate::quota::record::{Quota, QuotaSpec};
use crate::quota::row::{FullQuotaRow, columns};
use tollgate_replica::{CallerRef, KeyHash, shown};
use tollgate_rules::Ruleset;

const SELECT_ONE: &str =
    concat!("SELECT ", columns!(whole), " FROM quotas WHERE key_hash = $1 AND deleted = 0");

/// Quotas whose ids start with the same 64 bits: at most one, in practice.
const SELECT_BY_SHORT_ID: &str =
    "SELECT key_hash FROM quotas WHERE key_hash >= $1 AND key_hash <= $2 AND deleted = 0 LIMIT 2";

const UPSERT: &str =
    "INSERT INTO quotas (key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason,
     author, updated_at, deleted, revision, until_tier, until_overrides, until_expires_at, attribute)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, $11, $12, $13, $14)
     ON CONFLICT (key_hash) DO UPDATE SET tier = excluded.tier, overrides = excluded.overrides,
     effective_at = excluded.effective_at, expires_at = excluded.expires_at, reason = excluded.reason,
     author = excluded.author, updated_at = excluded.updated_at, deleted = 0, revision = excluded.revision,
     until_tier = excluded.until_tier, until_overrides = excluded.until_overrides,
     until_expires_at = excluded.until_expires_at, attribute = excluded.attribute,
     key_prefix = excluded.key_prefix";

/// Estimates the number of rows without counting them.
const ESTIMATE: [&str; 2] = [
    "SELECT COALESCE(MAX(rowid), 0) FROM quotas",
    "SELECT GREATEST(reltuples::BIGINT, pg_relation_size(oid) / 256) FROM pg_class WHERE oid = 'quotas'::regclass",
];

const NO_QUOTA: ControlError = ControlError::NotFound("quota with this id");

fn audit_json(quota: Option<&Quota>) -> String {
    quota.and_then(|quota| serde_json::to_string(quota).ok()).unwrap_or_default()
}

impl ControlPlane {
    /// Returns a caller's quota.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn quota(&self, caller: impl Into<CallerRef<'_>>) -> Result<Option<Quota>, ControlError> {
        let hash = self.hasher.hash_caller(caller.into());
        let row: Option<FullQuotaRow> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_ONE).bind(hash.0.to_vec()).fetch_optional(pool).await?
        });
        let now = self.now_seconds();
        row.map(|row| row.quota(now)).transpose()
    }

    /// Returns the full id of a caller's quota, by its first 64 bits ([`KeyHash::short_id`]).
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn quota_id(&self, short_id: u64) -> Result<Option<KeyHash>, ControlError> {
        let ends = [0, u8::MAX].map(|rest| {
            let mut bytes = [rest; 32];
            bytes[..8].copy_from_slice(&short_id.to_be_bytes());
            bytes.to_vec()
        });
        let [from, to] = ends;
        let rows: Vec<(Vec<u8>,)> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_BY_SHORT_ID).bind(from).bind(to).fetch_all(pool).await?
        });
        // Two ids with the same first 64 bits are ambiguous.
        let one = rows.first().filter(|_| rows.len() == 1);
        Ok(one.and_then(|(hash,)| KeyHash::from_slice(hash)))
    }

    /// Sets a caller's quota. It is active on this node when this returns.
    ///
    /// # Errors
    /// The outer error if the database fails or the precondition does not hold; the inner one if the quota is
    /// invalid.
    pub async fn put_quota(
        &self,
        caller: impl Into<CallerRef<'_>>,
        draft: QuotaSpec,
        rules: &Ruleset,
        expected: Precondition,
        actor: &Actor,
    ) -> Result<Result<Quota, ValidationError>, ControlError> {
        let caller = caller.into();
        let (key, value) = match caller.attribute() {
            Some((key, value)) => (key.to_owned(), Some(value)),
            None => (self.quota(caller).await?.ok_or(NO_QUOTA)?.key, None),
        };
        let valid = match self.validate_quota(draft, rules, &key, value) {
            Ok(valid) => valid,
            Err(problem) => return Ok(Err(problem)),
        };
        let hash = self.hasher.hash_caller(caller);
        let overrides = serde_json::to_string(&valid.overrides).unwrap_or_default();
        let (now, seconds) = (self.now_millis(), self.now_seconds());
        let written = writing!(&self.db, |tx, head| {
            let found: Option<FullQuotaRow> =
                sqlx::query_as(SELECT_ONE).bind(hash.0.to_vec()).fetch_optional(&mut *tx).await?;
            let prior = found.as_ref().and_then(|found| found.row.terms.active(seconds));
            let prior = prior.filter(|_| is_pending(valid.effective_at, seconds));
            let before = found.map(|row| row.quota(seconds)).transpose()?;
            if !expected.is_met(before.as_ref().map(|quota| quota.revision)) {
                return Err(ControlError::Conflict);
            }
            let key_prefix = match (value, &before) {
                (Some(value), _) => shown(&key, value),
                (None, Some(before)) => before.key_prefix.clone(),
                (None, None) => return Err(NO_QUOTA),
            };
            let after = Quota {
                id: hash.to_string(),
                key: key.clone(),
                key_prefix,
                tier: valid.tier.clone(),
                overrides: valid.overrides.clone(),
                effective_at: valid.effective_at.map(format_time),
                expires_at: valid.expires_at.map(format_time),
                until_effective: prior
                    .clone()
                    .map(PriorTerms::parse)
                    .transpose()?
                    .map(PriorTerms::into_current),
                reason: valid.reason.clone(),
                author: valid.author.clone().unwrap_or_else(|| actor.name.clone()),
                updated_at: format_millis(now),
                revision: head.0,
            };
            let (until_tier, until_overrides, until_expires_at) = PriorTerms::columns(prior);
            sqlx::query(UPSERT)
                .bind(hash.0.to_vec())
                .bind(after.key_prefix.clone())
                .bind(after.tier.clone())
                .bind(overrides.clone())
                .bind(valid.effective_at)
                .bind(valid.expires_at)
                .bind(after.reason.clone())
                .bind(after.author.clone())
                .bind(now)
                .bind(head.0)
                .bind(until_tier)
                .bind(until_overrides)
                .bind(until_expires_at)
                .bind(key.clone())
                .execute(&mut *tx)
                .await?;
            let changed = ChangeRecord {
                action: "quota.put",
                target: &after.id,
                before: audit_json(before.as_ref()),
                after: audit_json(Some(&after)),
            };
            record!(tx, head, now, actor, &changed);
            after
        });
        self.apply().await;
        Ok(Ok(written))
    }

    /// Deletes a quota.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if there is none, [`ControlError::Conflict`] if the precondition does not hold, or
    /// a database error.
    pub async fn delete_quota(
        &self,
        caller: impl Into<CallerRef<'_>>,
        expected: Precondition,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        self.delete_quota_with_reason(caller, expected, "", actor).await
    }

    /// Deletes a quota and records the reason in the audit log.
    ///
    /// # Errors
    /// As [`ControlPlane::delete_quota`].
    pub async fn delete_quota_with_reason(
        &self,
        caller: impl Into<CallerRef<'_>>,
        expected: Precondition,
        reason: &str,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        let hash = self.hasher.hash_caller(caller.into());
        let (now, seconds) = (self.now_millis(), self.now_seconds());
        writing!(&self.db, |tx, head| {
            let found: Option<FullQuotaRow> =
                sqlx::query_as(SELECT_ONE).bind(hash.0.to_vec()).fetch_optional(&mut *tx).await?;
            let before = found.map(|row| row.quota(seconds)).transpose()?;
            let before = before.ok_or(ControlError::NotFound("quota of this caller"))?;
            if !expected.is_met(Some(before.revision)) {
                return Err(ControlError::Conflict);
            }
            sqlx::query("UPDATE quotas SET deleted = 1, updated_at = $2, revision = $3 WHERE key_hash = $1")
                .bind(hash.0.to_vec())
                .bind(now)
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let changed = ChangeRecord {
                action: "quota.delete",
                target: &before.id,
                before: audit_json(Some(&before)),
                after: reason_only(reason),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.apply().await;
        Ok(())
    }

    /// Returns the approximate number of quotas.
    pub(crate) async fn estimate_count(&self) -> Result<usize, ControlError> {
        let sql = self.db.dialect(ESTIMATE);
        let (rows,): (i64,) = on!(&self.db, pool => sqlx::query_as(sql).fetch_one(pool).await?);
        Ok(usize::try_from(rows).unwrap_or(0))
    }
}
