//! Storage of emergency measures, which expire on their own.
//!
//! Few measures are active at once, so a node rereads all of them whenever anything has changed, before anything
//! else: that is one short query, and nothing can be missed.

use crate::audit::{reason_only, record};
use crate::control_plane::{ChangeEvent, ControlPlane};
use crate::db::on;
use crate::db::time::format_millis;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::emergency::record::{
    EmergencyRecord, EmergencyRow, EmergencySpec, EmergencyTarget, from_serialized_name, parse_ttl,
    serialized_name, shown_expiry,
};
use crate::error::{ControlError, ValidationError, invalid};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use tollgate_replica::ReplicatedMeasure;
use tollgate_rules::Ruleset;

/// Maximum number of active measures.
const MAX_ACTIVE: i64 = 1_000;

const SELECT_ACTIVE: &str =
    "SELECT id, action, kind, target, shown, factor, reason, author, created_at, expires_at, revision
     FROM emergencies WHERE ended = 0 AND expires_at > $1 ORDER BY created_at DESC, id";

const SELECT_ONE: &str =
    "SELECT id, action, kind, target, shown, factor, reason, author, created_at, expires_at, revision
     FROM emergencies WHERE id = $1 AND ended = 0 AND expires_at > $2";

const INSERT: &str = "INSERT INTO emergencies (id, action, kind, target, shown, factor, reason, author,
     created_at, expires_at, ended, revision) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 0, $11)";

fn record_from_row(row: &EmergencyRow) -> Result<EmergencyRecord, ControlError> {
    let (id, action, kind, _, shown, factor, reason, author, created_at, expires_at, revision) = row;
    Ok(EmergencyRecord {
        id: id.clone(),
        action: from_serialized_name(action)?,
        target: EmergencyTarget::from_stored(kind, shown)?,
        factor: factor.map(|thousandths| thousandths as f64 / 1_000.0),
        reason: reason.clone(),
        author: author.clone(),
        created_at: format_millis(*created_at),
        expires_at: shown_expiry(*expires_at),
        revision: *revision,
    })
}

/// Returns a row as it is replicated.
pub(crate) fn replicated(row: &EmergencyRow) -> ReplicatedMeasure {
    let (id, action, kind, target, _, factor, _, _, _, expires_at, _) = row.clone();
    ReplicatedMeasure { id, action, kind, target, factor, expires_at }
}

fn audit_json(emergency: &EmergencyRecord) -> String {
    serde_json::to_string(emergency).unwrap_or_default()
}

impl ControlPlane {
    /// Returns the active measures, newest first.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn emergencies(&self) -> Result<Vec<EmergencyRecord>, ControlError> {
        self.emergency_rows().await?.iter().map(record_from_row).collect()
    }

    async fn emergency_rows(&self) -> Result<Vec<EmergencyRow>, ControlError> {
        let now = self.now_millis();
        Ok(on!(&self.db, pool => sqlx::query_as(SELECT_ACTIVE).bind(now).fetch_all(pool).await?))
    }

    /// Creates a measure. It is active on this node when this returns.
    ///
    /// # Errors
    /// The outer error if the database fails; the inner one if the measure is invalid.
    pub async fn create_emergency(
        &self,
        draft: EmergencySpec,
        rules: &Ruleset,
        actor: &Actor,
    ) -> Result<Result<EmergencyRecord, ValidationError>, ControlError> {
        let valid = match draft.validate(&self.hasher, rules) {
            Ok(valid) => valid,
            Err(problem) => return Ok(Err(problem)),
        };
        let id = crate::auth::secret::generate_id()?;
        let now = self.now_millis();
        let created = writing!(&self.db, |tx, head| {
            let count = "SELECT COUNT(*) FROM emergencies WHERE ended = 0 AND expires_at > $1";
            let (count,): (i64,) = sqlx::query_as(count).bind(now).fetch_one(&mut *tx).await?;
            if count >= MAX_ACTIVE {
                return Ok(Err(invalid(
                    "action",
                    format!("{MAX_ACTIVE} measures are active already; end some first"),
                )));
            }
            let created = EmergencyRecord {
                id: id.clone(),
                action: valid.action,
                target: valid.target_display.clone(),
                factor: valid.thousandths.map(|thousandths| thousandths as f64 / 1_000.0),
                reason: valid.reason.clone(),
                author: actor.name.clone(),
                created_at: format_millis(now),
                expires_at: shown_expiry(valid.expires_at(now)),
                revision: head.0,
            };
            sqlx::query(INSERT)
                .bind(id.clone())
                .bind(serialized_name(&valid.action))
                .bind(valid.target_display.stored_kind())
                .bind(valid.target.clone())
                .bind(valid.target_display.value.clone())
                .bind(valid.thousandths)
                .bind(created.reason.clone())
                .bind(created.author.clone())
                .bind(now)
                .bind(valid.expires_at(now))
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let changed = ChangeRecord {
                action: "emergency.declare",
                target: &id,
                before: String::new(),
                after: audit_json(&created),
            };
            record!(tx, head, now, actor, &changed);
            created
        });
        self.apply().await;
        Ok(Ok(created))
    }

    /// Extends a measure, to `ttl_seconds` from now.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if the measure is not active; or a database error. The inner error if the time to
    /// live is invalid.
    pub async fn renew_emergency(
        &self,
        id: &str,
        ttl_seconds: Option<u64>,
        actor: &Actor,
    ) -> Result<Result<EmergencyRecord, ValidationError>, ControlError> {
        let ttl = match parse_ttl(ttl_seconds) {
            Ok(ttl) => ttl,
            Err(problem) => return Ok(Err(problem)),
        };
        let until = self.now_millis() + ttl;
        let renewed =
            self.change_emergency(id, EmergencyChange::Extend(until), "emergency.renew", actor).await?;
        Ok(Ok(renewed))
    }

    /// Ends a measure before it expires.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if the measure is not active; or a database error.
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
            let row = row.ok_or(ControlError::NotFound("active emergency measure with this id"))?;
            let before = record_from_row(&row)?;
            let (ended, until) = match change {
                EmergencyChange::End(_) => (1_i64, row.9),
                // What does not expire needs no extension.
                EmergencyChange::Extend(_) if shown_expiry(row.9).is_none() => (0, row.9),
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
                EmergencyRecord { expires_at: shown_expiry(until), revision: head.0, ..before.clone() };
            let after_json = match change {
                EmergencyChange::End(reason) => reason_only(reason),
                EmergencyChange::Extend(_) => audit_json(&after),
            };
            let changed = ChangeRecord { action, target: id, before: audit_json(&before), after: after_json };
            record!(tx, head, now, actor, &changed);
            after
        });
        self.apply().await;
        Ok(changed)
    }

    /// Reads the active measures and applies them.
    pub(crate) async fn read_emergencies(&self) -> Result<(), ControlError> {
        let rows = self.emergency_rows().await?;
        self.apply_emergencies(rows);
        Ok(())
    }

    /// Applies the measures in `rows`, from the database or a snapshot.
    pub(crate) fn apply_emergencies(&self, rows: Vec<EmergencyRow>) {
        // A measure that cannot be read, perhaps written by a newer version, must not prevent the others from taking
        // effect.
        let measures = rows.iter().filter_map(|row| {
            replicated(row)
                .to_measure()
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

    /// Returns the measures last known to be active.
    pub(crate) fn cached_emergencies(&self) -> Vec<EmergencyRow> {
        self.measure_rows.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

enum EmergencyChange<'r> {
    /// Ends the measure, for this reason, if one was given.
    End(&'r str),
    Extend(i64),
}
