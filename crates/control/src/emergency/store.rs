//! How measures of an emergency are kept: like everything else that operators decide, but with an end that comes by itself.
//!
//! Few are ever on at once, so a node reads all of them again whenever anything has changed, before anything else: that is
//! one short query, and nothing can be missed.

use crate::audit::{reason_only, record};
use crate::auth::key_hash::KeyHash;
use crate::control_plane::{ChangeEvent, ControlPlane};
use crate::db::on;
use crate::db::time::{format_millis, timestamp};
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::emergency::record::{
    EmergencyAction, EmergencyRecord, EmergencyRow, EmergencySpec, EmergencyTarget, TargetKind, parse_ttl,
};
use crate::error::{ControlError, ValidationError, invalid};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use tollgate_engine::{Act, Measure, Target};
use tollgate_rules::Ruleset;

/// The most that are on at once.
const MAX_ACTIVE: i64 = 1_000;

const SELECT_ACTIVE: &str =
    "SELECT id, action, kind, target, shown, factor, reason, author, created_at, expires_at, revision
     FROM emergencies WHERE ended = 0 AND expires_at > $1 ORDER BY created_at DESC, id";

const SELECT_ONE: &str =
    "SELECT id, action, kind, target, shown, factor, reason, author, created_at, expires_at, revision
     FROM emergencies WHERE id = $1 AND ended = 0 AND expires_at > $2";

const INSERT: &str = "INSERT INTO emergencies (id, action, kind, target, shown, factor, reason, author,
     created_at, expires_at, ended, revision) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 0, $11)";

/// Names of actions and kinds are kept as they are told.
fn serialized_name<T: Serialize>(of: &T) -> String {
    serde_json::to_value(of).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

fn from_serialized_name<T: for<'a> Deserialize<'a>>(word: &str) -> Result<T, ControlError> {
    serde_json::from_value(word.into())
        .map_err(|_| ControlError::Corrupt(format!("an emergency of `{word}`")))
}

fn record_from_row(row: &EmergencyRow) -> Result<EmergencyRecord, ControlError> {
    let (id, action, kind, _, shown, factor, reason, author, created_at, expires_at, revision) = row;
    Ok(EmergencyRecord {
        id: id.clone(),
        action: from_serialized_name(action)?,
        target: EmergencyTarget { kind: from_serialized_name(kind)?, value: shown.clone() },
        factor: factor.map(|thousandths| thousandths as f64 / 1_000.0),
        reason: reason.clone(),
        author: author.clone(),
        created_at: format_millis(*created_at),
        expires_at: format_millis(*expires_at),
        revision: *revision,
    })
}

fn measure_from_row(row: &EmergencyRow) -> Result<Measure, ControlError> {
    let (id, action, kind, target, _, factor, _, _, _, expires_at, _) = row;
    let broken = |what: &dyn fmt::Display| ControlError::Corrupt(format!("emergency {id}: {what}"));
    let act = match from_serialized_name(action)? {
        EmergencyAction::Block => Act::Block,
        EmergencyAction::Exempt => Act::Exempt,
        EmergencyAction::DisableRule => Act::DisableRule,
        EmergencyAction::AllowAll => Act::AllowAll,
        EmergencyAction::ShadowAll => Act::ShadowAll,
        EmergencyAction::Tighten => {
            let factor = factor.and_then(|factor| u32::try_from(factor).ok());
            Act::Tighten(factor.ok_or_else(|| broken(&"it has no factor"))?)
        }
    };
    let target = match from_serialized_name(kind)? {
        TargetKind::All => Target::All,
        TargetKind::ApiKey => {
            Target::ApiKey(KeyHash::parse(target).ok_or_else(|| broken(&"no hash of a key"))?.table_hash())
        }
        TargetKind::Tenant => Target::Tenant(target.as_str().into()),
        TargetKind::Address => Target::Address(target.parse().map_err(|why: String| broken(&why))?),
        TargetKind::Endpoint => Target::Endpoint(target.as_str().into()),
        TargetKind::Rule => Target::Rule(target.as_str().into()),
    };
    let until = timestamp(*expires_at);
    Ok(Measure { name: format!("emergency:{id}").into(), act, target, until })
}

fn audit_json(emergency: &EmergencyRecord) -> String {
    serde_json::to_string(emergency).unwrap_or_default()
}

impl ControlPlane {
    /// What is on now, the latest first.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn emergencies(&self) -> Result<Vec<EmergencyRecord>, ControlError> {
        self.emergency_rows().await?.iter().map(record_from_row).collect()
    }

    async fn emergency_rows(&self) -> Result<Vec<EmergencyRow>, ControlError> {
        let now = self.now_millis();
        Ok(on!(&self.db, pool => sqlx::query_as(SELECT_ACTIVE).bind(now).fetch_all(pool).await?))
    }

    /// Decides something. It acts on this node when this returns.
    ///
    /// # Errors
    /// The outer one if the database does not do it; the inner one if what is sent cannot be.
    pub async fn create_emergency(
        &self,
        draft: EmergencySpec,
        rules: &Ruleset,
        actor: &Actor,
    ) -> Result<Result<EmergencyRecord, ValidationError>, ControlError> {
        let checked = match draft.validate(&self.hasher, rules) {
            Ok(checked) => checked,
            Err(problem) => return Ok(Err(problem)),
        };
        let id = crate::auth::secret::generate_id()?;
        let now = self.now_millis();
        let declared = writing!(&self.db, |tx, head| {
            let count = "SELECT COUNT(*) FROM emergencies WHERE ended = 0 AND expires_at > $1";
            let (count,): (i64,) = sqlx::query_as(count).bind(now).fetch_one(&mut *tx).await?;
            if count >= MAX_ACTIVE {
                return Ok(Err(invalid("action", format!("{MAX_ACTIVE} are on already; end some first"))));
            }
            let declared = EmergencyRecord {
                id: id.clone(),
                action: checked.action,
                target: EmergencyTarget { kind: checked.kind, value: checked.target_display.clone() },
                factor: checked.thousandths.map(|thousandths| thousandths as f64 / 1_000.0),
                reason: checked.reason.clone(),
                author: actor.name.clone(),
                created_at: format_millis(now),
                expires_at: format_millis(now + checked.ttl),
                revision: head.0,
            };
            sqlx::query(INSERT)
                .bind(id.clone())
                .bind(serialized_name(&checked.action))
                .bind(serialized_name(&checked.kind))
                .bind(checked.target.clone())
                .bind(checked.target_display.clone())
                .bind(checked.thousandths)
                .bind(declared.reason.clone())
                .bind(declared.author.clone())
                .bind(now)
                .bind(now + checked.ttl)
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let changed = ChangeRecord {
                action: "emergency.declare",
                target: &id,
                before: String::new(),
                after: audit_json(&declared),
            };
            record!(tx, head, now, actor, &changed);
            declared
        });
        self.apply().await;
        Ok(Ok(declared))
    }

    /// Lets one last so much longer from now on.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if it is not on; or the database's own. The inner one if it cannot last so long.
    pub async fn renew_emergency(
        &self,
        id: &str,
        ttl_seconds: Option<u64>,
        actor: &Actor,
    ) -> Result<Result<EmergencyRecord, ValidationError>, ControlError> {
        let lasts = match parse_ttl(ttl_seconds) {
            Ok(lasts) => lasts,
            Err(problem) => return Ok(Err(problem)),
        };
        let until = self.now_millis() + lasts;
        let renewed =
            self.change_emergency(id, EmergencyChange::Extend(until), "emergency.renew", actor).await?;
        Ok(Ok(renewed))
    }

    /// Ends one before its time.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if it is not on; or the database's own.
    pub async fn end_emergency(&self, id: &str, actor: &Actor) -> Result<(), ControlError> {
        self.end_emergency_with_reason(id, "", actor).await
    }

    /// Ends a measure and records the reason in the audit log.
    ///
    /// # Errors
    /// As [`ControlPlane::end_emergency`].
    pub async fn end_emergency_with_reason(
        &self,
        id: &str,
        reason: &str,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        self.change_emergency(id, EmergencyChange::End(reason), "emergency.end", actor).await.map(drop)
    }

    async fn change_emergency(
        &self,
        id: &str,
        change: EmergencyChange<'_>,
        action: &'static str,
        actor: &Actor,
    ) -> Result<EmergencyRecord, ControlError> {
        let now = self.now_millis();
        let changed = writing!(&self.db, |tx, head| {
            let row: Option<EmergencyRow> =
                sqlx::query_as(SELECT_ONE).bind(id.to_owned()).bind(now).fetch_optional(&mut *tx).await?;
            let row = row.ok_or(ControlError::NotFound("emergency with this id that is on"))?;
            let before = record_from_row(&row)?;
            let (ended, until) = match change {
                EmergencyChange::End(_) => (1_i64, row.9),
                EmergencyChange::Extend(until) => (0, until),
            };
            sqlx::query("UPDATE emergencies SET ended = $2, expires_at = $3, revision = $4 WHERE id = $1")
                .bind(id.to_owned())
                .bind(ended)
                .bind(until)
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let after =
                EmergencyRecord { expires_at: format_millis(until), revision: head.0, ..before.clone() };
            let told_after = match change {
                EmergencyChange::End(reason) => reason_only(reason),
                EmergencyChange::Extend(_) => audit_json(&after),
            };
            let changed = ChangeRecord { action, target: id, before: audit_json(&before), after: told_after };
            record!(tx, head, now, actor, &changed);
            after
        });
        self.apply().await;
        Ok(changed)
    }

    /// Puts what is on before the limiter.
    pub(crate) async fn read_emergencies(&self) -> Result<(), ControlError> {
        let rows = self.emergency_rows().await?;
        self.apply_emergencies(rows);
        Ok(())
    }

    /// The same of what a file knows.
    pub(crate) fn apply_emergencies(&self, rows: Vec<EmergencyRow>) {
        // One that cannot be read (a newer program has written it) must not keep the others from acting.
        let measures = rows.iter().filter_map(|row| {
            measure_from_row(row)
                .inspect_err(|error| tracing::error!(%error, "skipping invalid emergency measure"))
                .ok()
        });
        self.measures.replace(measures.collect::<Vec<_>>());
        let mut known = self.measure_rows.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != rows {
            *known = rows;
            drop(known);
            self.snapshot_generation.fetch_add(1, Ordering::Relaxed);
            self.notify(ChangeEvent::Emergencies);
        }
    }

    /// What was last known to be on.
    pub(crate) fn cached_emergencies(&self) -> Vec<EmergencyRow> {
        self.measure_rows.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

enum EmergencyChange<'r> {
    /// For this reason, if any was given.
    End(&'r str),
    Extend(i64),
}
