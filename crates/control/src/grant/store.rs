//! Storage of grants, and audit entries for usage resets, whose counters live in the store.

use crate::audit::record;
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::db::time::format_millis;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::{ControlError, ValidationError, check_text, invalid};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use tollgate_core::Rate as CoreQuota;
use tollgate_replica::ReplicatedGrant;
use tollgate_replica::{CallerRef, KeyHash, Subject, shown};
use tollgate_rules::Ruleset;
use utoipa::ToSchema;

/// Default time to live of a grant, in seconds: 30 days.
const DEFAULT_TTL: u64 = 30 * 86_400;
/// Maximum time to live of a grant, in seconds: a year.
const MAX_TTL: u64 = 366 * 86_400;
/// Maximum number of grants per caller.
const MAX_PER_CALLER: i64 = 100;

const INSERT: &str = "INSERT INTO grants (id, key_hash, key_prefix, rule, units, reason, author, created_at,
     expires_at, revision, attribute) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";

const SELECT_ONE: &str =
    "SELECT id, attribute, key_prefix, rule, units, reason, author, created_at, expires_at, revision FROM grants
     WHERE id = $1 AND key_hash = $2 AND expires_at > $3";

/// Sets an expiry in the past of every node's clock: the current time would be in the future on a node whose clock is
/// behind.
const REVOKE: &str = "UPDATE grants SET expires_at = 0, revision = $2 WHERE id = $1";

/// Includes expired grants, since a revoked one is expired.
const SELECT_SINCE: &str =
    "SELECT key_hash, attribute, key_prefix, id, rule, units, created_at, expires_at FROM grants
     WHERE revision > $1 AND expires_at > $2 ORDER BY revision";

/// A request to grant extra units.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GrantSpec {
    /// The rule; the rule on the caller alone if absent.
    pub rule: Option<String>,
    /// Number of extra units.
    #[schema(minimum = 1)]
    pub units: u64,
    /// Reason, recorded in the audit log.
    pub reason: String,
    /// Time to live in seconds; 30 days if absent.
    pub ttl_seconds: Option<u64>,
}

/// A stored grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Grant)]
pub struct GrantRecord {
    /// Id of the grant.
    pub id: String,
    /// The attribute that identifies the caller.
    pub key: String,
    /// First characters of its value; an address or network is shown whole.
    pub key_prefix: String,
    /// The rule.
    pub rule: String,
    /// Number of extra units.
    pub units: u64,
    /// Reason for the grant.
    pub reason: String,
    /// Principal that created it.
    pub author: String,
    /// Creation time.
    pub created_at: String,
    /// Expiry.
    pub expires_at: String,
    /// Control revision of the change.
    pub revision: i64,
}

impl ControlPlane {
    /// Grants extra units. They can be used on this node when this returns.
    ///
    /// # Errors
    /// The outer error if the database fails or no quota has the id; the inner one if the grant is invalid.
    pub async fn grant(
        &self,
        caller: impl Into<CallerRef<'_>>,
        draft: GrantSpec,
        rules: &Ruleset,
        actor: &Actor,
    ) -> Result<Result<GrantRecord, ValidationError>, ControlError> {
        let caller = caller.into();
        let hash = self.hasher.hash_caller(caller);
        let (key, key_prefix) = match caller.attribute() {
            Some((key, value)) => (key.to_owned(), shown(key, value)),
            None => {
                let quota = self.quota(caller).await?.ok_or(ControlError::NotFound("quota with this id"))?;
                (quota.key, quota.key_prefix)
            }
        };
        let value = caller.attribute().map(|(_, value)| value);
        if let Err(problem) =
            self.validate_caller(rules, &key, value).and_then(|()| validate(&draft, rules, &key))
        {
            return Ok(Err(problem));
        }
        let (id, now) = (crate::auth::secret::generate_id()?, self.now_millis());
        let ttl = i64::try_from(draft.ttl_seconds.unwrap_or(DEFAULT_TTL) * 1_000).unwrap_or(i64::MAX);
        let granted = writing!(&self.db, |tx, head| {
            let count = "SELECT COUNT(*) FROM grants WHERE key_hash = $1 AND expires_at > $2";
            let (count,): (i64,) =
                sqlx::query_as(count).bind(hash.0.to_vec()).bind(now).fetch_one(&mut *tx).await?;
            if count >= MAX_PER_CALLER {
                return Ok(Err(invalid(
                    "units",
                    format!(
                        "this caller already has {MAX_PER_CALLER} grants; revoke some or wait until they expire"
                    ),
                )));
            }
            let granted = GrantRecord {
                id: id.clone(),
                key: key.clone(),
                key_prefix: key_prefix.clone(),
                rule: draft.rule.clone().unwrap_or_else(|| "default".to_owned()),
                units: draft.units,
                reason: draft.reason.clone(),
                author: actor.name.clone(),
                created_at: format_millis(now),
                expires_at: format_millis(now + ttl),
                revision: head.0,
            };
            sqlx::query(INSERT)
                .bind(id.clone())
                .bind(hash.0.to_vec())
                .bind(granted.key_prefix.clone())
                .bind(granted.rule.clone())
                .bind(i64::try_from(draft.units).unwrap_or(i64::MAX))
                .bind(granted.reason.clone())
                .bind(granted.author.clone())
                .bind(now)
                .bind(now + ttl)
                .bind(head.0)
                .bind(key.clone())
                .execute(&mut *tx)
                .await?;
            let target = hash.to_string();
            let changed = ChangeRecord {
                action: "usage.grant",
                target: &target,
                before: String::new(),
                after: serde_json::to_string(&granted).unwrap_or_default(),
            };
            record!(tx, head, now, actor, &changed);
            granted
        });
        self.apply().await;
        Ok(Ok(granted))
    }

    /// Revokes the rest of a grant. It can no longer be used on this node when this returns.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if the caller has no such active grant; or a database error.
    pub async fn revoke_grant(
        &self,
        caller: impl Into<CallerRef<'_>>,
        id: &str,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        let (hash, now) = (self.hasher.hash_caller(caller.into()), self.now_millis());
        writing!(&self.db, |tx, head| {
            let row: Option<GrantRow> = sqlx::query_as(SELECT_ONE)
                .bind(id.to_owned())
                .bind(hash.0.to_vec())
                .bind(now)
                .fetch_optional(&mut *tx)
                .await?;
            let before =
                record_from_row(row.ok_or(ControlError::NotFound("grant of this caller with this id"))?);
            sqlx::query(REVOKE).bind(id.to_owned()).bind(head.0).execute(&mut *tx).await?;
            let target = hash.to_string();
            let changed = ChangeRecord {
                action: "usage.revoke",
                target: &target,
                before: serde_json::to_string(&before).unwrap_or_default(),
                after: String::new(),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.apply().await;
        Ok(())
    }

    /// Records the reset of a caller's usage in the audit log, before it is done: a reset that is not recorded must
    /// not happen.
    ///
    /// # Errors
    /// The outer error if the database fails; the inner one if the reason is invalid.
    pub async fn audit_reset(
        &self,
        caller: impl Into<CallerRef<'_>>,
        rule: Option<&str>,
        reason: &str,
        before: String,
        actor: &Actor,
    ) -> Result<Result<(), ValidationError>, ControlError> {
        if let Err(problem) = check_text("reason", reason, 1, 512) {
            return Ok(Err(problem));
        }
        let (target, now) = (self.hasher.hash_caller(caller.into()).to_string(), self.now_millis());
        let after = serde_json::json!({"rule": rule, "reason": reason}).to_string();
        writing!(&self.db, |tx, head| {
            let changed = ChangeRecord {
                action: "usage.reset",
                target: &target,
                before: before.clone(),
                after: after.clone(),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.apply().await;
        Ok(Ok(()))
    }

    /// Applies the grants made or revoked since a control revision. Returns whether anything may have changed.
    pub(crate) async fn read_grants(&self, since: i64) -> Result<bool, ControlError> {
        let now = self.now_millis();
        // A full read needs no expired grants: it replaces all known ones, including those from a snapshot.
        let ended = if since < 0 { now } else { i64::MIN };
        let rows: Vec<ReplicatedRow> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_SINCE).bind(since).bind(ended).fetch_all(pool).await?
        });
        let grants = rows.into_iter().map(|(hash, key, shown, id, rule, units, created_at, until)| {
            let hash = KeyHash::from_slice(&hash)
                .ok_or_else(|| ControlError::Corrupt("hash of an API key".to_owned()))?;
            let units = u64::try_from(units).unwrap_or(0);
            let (subject, lasts) = (Subject::new(key, &shown), until - created_at);
            Ok((hash.table_hash(), ReplicatedGrant { id, subject, rule, units, lasts, until }))
        });
        let grants = grants.collect::<Result<Vec<_>, ControlError>>()?;
        let known = self.quota_table.grants();
        let changed = !(grants.is_empty() && (since >= 0 || known.is_empty()));
        if since < 0 {
            self.quota_table.replace_grants(grants, now);
        } else if changed {
            self.quota_table.change_grants(grants, now);
        }
        if changed {
            self.snapshot_generation.fetch_add(1, Ordering::Relaxed);
        }
        Ok(changed)
    }
}

/// Hash and attribute of the caller, what is shown of it, ID, rule, units, creation and end.
type ReplicatedRow = (Vec<u8>, String, String, String, String, i64, i64, i64);

type GrantRow = (String, String, String, String, i64, String, String, i64, i64, i64);

fn record_from_row(row: GrantRow) -> GrantRecord {
    let (id, key, key_prefix, rule, units, reason, author, created_at, expires_at, revision) = row;
    let (created_at, expires_at) = (format_millis(created_at), format_millis(expires_at));
    let units = u64::try_from(units).unwrap_or(0);
    GrantRecord { id, key, key_prefix, rule, units, reason, author, created_at, expires_at, revision }
}

fn validate(draft: &GrantSpec, rules: &Ruleset, key: &str) -> Result<(), ValidationError> {
    let rule = draft.rule.as_deref().unwrap_or("default");
    check_text("rule", rule, 1, 512)?;
    if rules.find_per_caller_rules(key, rule).is_empty() {
        let reason = match &draft.rule {
            Some(_) => {
                format!(
                    "no rule with a counter per `{key}` has this name; use its name, its path, or `default`"
                )
            }
            None => format!("no rule on `{key}` alone exists; set `rule`"),
        };
        return Err(invalid("rule", reason));
    }
    if draft.units == 0 || draft.units > CoreQuota::MAX_COUNT {
        return Err(invalid("units", format!("must be between 1 and {}", CoreQuota::MAX_COUNT)));
    }
    if !(1..=MAX_TTL).contains(&draft.ttl_seconds.unwrap_or(DEFAULT_TTL)) {
        return Err(invalid("ttl_seconds", format!("must be between 1 and {MAX_TTL}")));
    }
    check_text("reason", &draft.reason, 1, 512)
}
