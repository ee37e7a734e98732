//! Extra quota of single callers, once; and notes of what operators did to counters, which are kept elsewhere.

use crate::audit::record;
use crate::auth::key_hash::{CallerRef, KeyHash, prefix};
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::db::time::format_millis;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::{ControlError, ValidationError, check_text, invalid};
use crate::grant::table::ReplicatedGrant;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use tollgate_core::Rate as CoreQuota;
use tollgate_rules::Ruleset;
use utoipa::ToSchema;

/// For how long a grant can be used unless somebody says otherwise: 30 days, in seconds.
const DEFAULT_TTL: u64 = 30 * 86_400;
/// The longest: a year.
const MAX_TTL: u64 = 366 * 86_400;
/// The most that one caller has at once.
const MAX_PER_CALLER: i64 = 100;

const INSERT: &str = "INSERT INTO grants (id, key_hash, key_prefix, rule, units, reason, author, created_at,
     expires_at, revision) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";

const SELECT_ONE: &str =
    "SELECT id, key_prefix, rule, units, reason, author, created_at, expires_at, revision FROM grants
     WHERE id = $1 AND key_hash = $2 AND expires_at > $3";

/// It is over by every node's clock: "now" would be in the future where the clock is a little behind.
const REVOKE: &str = "UPDATE grants SET expires_at = 0, revision = $2 WHERE id = $1";

/// Those that have ended too: one that was taken back has.
const SELECT_SINCE: &str = "SELECT key_hash, id, rule, units, created_at, expires_at FROM grants
     WHERE revision > $1 AND expires_at > $2 ORDER BY revision";

/// A grant as it is sent.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = GrantDraft)]
pub struct GrantSpec {
    /// Which rule; the one about the caller alone, if it does not say.
    pub rule: Option<String>,
    /// How much.
    #[schema(minimum = 1)]
    pub units: u64,
    /// Why.
    pub reason: String,
    /// For how long it can be used, in seconds; 30 days, if it does not say.
    pub ttl_seconds: Option<u64>,
}

/// A grant as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Grant)]
pub struct GrantRecord {
    /// Its name.
    pub id: String,
    /// The key's first characters.
    pub key_prefix: String,
    /// Which rule.
    pub rule: String,
    /// How much.
    pub units: u64,
    /// Why.
    pub reason: String,
    /// Who granted it.
    pub author: String,
    /// When.
    pub created_at: String,
    /// Until when it can be used.
    pub expires_at: String,
    /// The revision of the change.
    pub revision: i64,
}

impl ControlPlane {
    /// Grants extra quota. It can be used on this node when this returns.
    ///
    /// # Errors
    /// The outer one if the database does not do it, or knows nobody by the id; the inner one if what is sent cannot be.
    pub async fn grant(
        &self,
        caller: impl Into<CallerRef<'_>>,
        draft: GrantSpec,
        rules: &Ruleset,
        actor: &Actor,
    ) -> Result<Result<GrantRecord, ValidationError>, ControlError> {
        if let Err(problem) = validate(&draft, rules) {
            return Ok(Err(problem));
        }
        let caller = caller.into();
        let hash = self.hasher.hash_caller(caller);
        let key_prefix = match caller {
            CallerRef::Key(key) => prefix(key),
            CallerRef::Id(id) => {
                self.quota(id).await?.ok_or(ControlError::NotFound("quota with this id"))?.key_prefix
            }
        };
        let (id, now) = (crate::auth::secret::generate_id()?, self.now_millis());
        let lasts = i64::try_from(draft.ttl_seconds.unwrap_or(DEFAULT_TTL) * 1_000).unwrap_or(i64::MAX);
        let granted = writing!(&self.db, |tx, head| {
            let count = "SELECT COUNT(*) FROM grants WHERE key_hash = $1 AND expires_at > $2";
            let (count,): (i64,) =
                sqlx::query_as(count).bind(hash.0.to_vec()).bind(now).fetch_one(&mut *tx).await?;
            if count >= MAX_PER_CALLER {
                return Ok(Err(invalid(
                    "units",
                    format!("this key has {MAX_PER_CALLER} grants already; wait for some to end"),
                )));
            }
            let granted = GrantRecord {
                id: id.clone(),
                key_prefix: key_prefix.clone(),
                rule: draft.rule.clone().unwrap_or_else(|| "default".to_owned()),
                units: draft.units,
                reason: draft.reason.clone(),
                author: actor.name.clone(),
                created_at: format_millis(now),
                expires_at: format_millis(now + lasts),
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
                .bind(now + lasts)
                .bind(head.0)
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

    /// Takes back what is left of a grant. It cannot be used on this node any more when this returns.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if this caller has no such grant, or it has ended; or the database's own.
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

    /// Notes that the used quota of a caller is about to be given back: what is not noted is not done.
    ///
    /// # Errors
    /// The outer one if the database does not do it; the inner one if the reason cannot be.
    pub async fn audit_reset(
        &self,
        api_key: &str,
        rule: Option<&str>,
        reason: &str,
        before: String,
        actor: &Actor,
    ) -> Result<Result<(), ValidationError>, ControlError> {
        if let Err(problem) = check_text("reason", reason, 1, 512) {
            return Ok(Err(problem));
        }
        let (target, now) = (self.hasher.hash(api_key).to_string(), self.now_millis());
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

    /// Takes in what was granted or taken back since a revision, and says whether anything may have changed.
    pub(crate) async fn read_grants(&self, since: i64) -> Result<bool, ControlError> {
        let now = self.now_millis();
        // Who asks for all need not hear of those that have ended: what is known otherwise, from a snapshot, goes.
        let ended = if since < 0 { now } else { i64::MIN };
        let rows: Vec<(Vec<u8>, String, String, i64, i64, i64)> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_SINCE).bind(since).bind(ended).fetch_all(pool).await?
        });
        let grants = rows.into_iter().map(|(hash, id, rule, units, created_at, until)| {
            let hash = KeyHash::from_slice(&hash)
                .ok_or_else(|| ControlError::Corrupt("the hash of an API key".to_owned()))?;
            let units = u64::try_from(units).unwrap_or(0);
            Ok((hash.table_hash(), ReplicatedGrant { id, rule, units, lasts: until - created_at, until }))
        });
        let grants = grants.collect::<Result<Vec<_>, ControlError>>()?;
        let known = self.quota_table.grants();
        let changed = !(grants.is_empty() && (since >= 0 || known.is_empty()));
        if since < 0 {
            known.replace(grants, now);
        } else if changed {
            known.change(grants, now);
        }
        if changed {
            self.snapshot_generation.fetch_add(1, Ordering::Relaxed);
        }
        Ok(changed)
    }
}

type GrantRow = (String, String, String, i64, String, String, i64, i64, i64);

fn record_from_row(row: GrantRow) -> GrantRecord {
    let (id, key_prefix, rule, units, reason, author, created_at, expires_at, revision) = row;
    let (created_at, expires_at) = (format_millis(created_at), format_millis(expires_at));
    let units = u64::try_from(units).unwrap_or(0);
    GrantRecord { id, key_prefix, rule, units, reason, author, created_at, expires_at, revision }
}

fn validate(draft: &GrantSpec, rules: &Ruleset) -> Result<(), ValidationError> {
    let rule = draft.rule.as_deref().unwrap_or("default");
    check_text("rule", rule, 1, 512)?;
    if rules.find_per_caller_rules(rule).is_empty() {
        let why = match &draft.rule {
            Some(_) => {
                "no rule with a counter for each `api_key` is called so; write its name, its path, or `default`"
            }
            None => "there is no rule about `api_key` alone: write which `rule` is meant",
        };
        return Err(invalid("rule", why));
    }
    if draft.units == 0 || draft.units > CoreQuota::MAX_COUNT {
        return Err(invalid("units", format!("write 1 to {}", CoreQuota::MAX_COUNT)));
    }
    if !(1..=MAX_TTL).contains(&draft.ttl_seconds.unwrap_or(DEFAULT_TTL)) {
        return Err(invalid("ttl_seconds", format!("write 1 to {MAX_TTL}")));
    }
    check_text("reason", &draft.reason, 1, 512)
}
