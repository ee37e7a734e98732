//! Storage of rule revisions: published, approved, rolled back; never edited and never removed.

use crate::audit::record;
use crate::control_plane::{ChangeEvent, ControlPlane};
use crate::db::on;
use crate::db::time::format_millis;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::ControlError;
use crate::rules::revision::{NewRevision, PublishedRules, RevisionStatus, RuleFile, RuleRevision};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const COLUMNS: &str =
    "rev, hash, author, reason, created_at, status, base_rev, watched, active_since, approved_by,
     rolled_back_because";
const INSERT: &str = "INSERT INTO rule_revisions
     (rev, hash, files, author, reason, created_at, status, base_rev, watched, active_since, revision)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
const SELECT_ACTIVE: &str = "SELECT rev, hash, files FROM rule_revisions WHERE status = 'active'";
const SELECT_PENDING: &str = "SELECT rev FROM rule_revisions
     WHERE status = 'pending_approval' AND hash = $1 AND author = $2 ORDER BY rev LIMIT 1";
const SELECT_LAST: &str = "SELECT COALESCE(MAX(rev), 0) FROM rule_revisions";
/// Ends the active revision, and then rejects pending ones.
const UPDATE_STATUS: &str = "UPDATE rule_revisions SET status = $1, rolled_back_because = $2, revision = $3
     WHERE status = 'active'";
const REJECT: &str = "UPDATE rule_revisions SET status = 'rejected', revision = $1
     WHERE status = 'pending_approval' AND rev <> $2";

type RevisionRow =
    (i64, String, String, String, i64, String, Option<i64>, i64, Option<i64>, Option<String>, Option<String>);

fn revision(row: RevisionRow) -> Result<RuleRevision, ControlError> {
    let (rev, revision, author, reason, created_at, status, base_rev, watched, since, approved_by, because) =
        row;
    Ok(RuleRevision {
        rev,
        revision,
        author,
        reason,
        created_at: format_millis(created_at),
        status: self::status(rev, &status)?,
        base_rev,
        active_since_ms: since,
        approved_by,
        rolled_back_because: because,
        watched: watched != 0,
    })
}

fn status(rev: i64, name: &str) -> Result<RevisionStatus, ControlError> {
    let corrupt = || ControlError::Corrupt(format!("status of rule revision {rev}"));
    RevisionStatus::from_name(name).ok_or_else(corrupt)
}

fn files(text: &str) -> Result<Vec<RuleFile>, ControlError> {
    serde_json::from_str(text)
        .map_err(|error| ControlError::Corrupt(format!("files of a rule revision: {error}")))
}

/// Inserts a row with its status. A macro, since it is compiled for both databases.
macro_rules! insert {
    ($tx:ident, $head:ident, $rev:expr, $hash:expr, $files:expr, $author:expr, $reason:expr, $now:expr, $status:expr, $base:expr, $watched:expr) => {{
        let status: RevisionStatus = $status;
        let since = (status == RevisionStatus::Active).then_some($now);
        sqlx::query(INSERT)
            .bind($rev)
            .bind($hash.to_owned())
            .bind($files)
            .bind($author.to_owned())
            .bind($reason.to_owned())
            .bind($now)
            .bind(status.name())
            .bind($base)
            .bind(i64::from($watched))
            .bind(since)
            .bind($head.0)
            .execute(&mut *$tx)
            .await?;
    }};
}

/// Ends the active revision and rejects all pending ones except `$but`.
macro_rules! end {
    ($tx:ident, $head:ident, $status:expr, $because:expr, $but:expr) => {{
        let because: Option<String> = $because;
        sqlx::query(UPDATE_STATUS)
            .bind($status.name())
            .bind(because)
            .bind($head.0)
            .execute(&mut *$tx)
            .await?;
        sqlx::query(REJECT).bind($head.0).bind($but).execute(&mut *$tx).await?;
    }};
}

impl ControlPlane {
    /// Returns the active published revision, if any.
    #[must_use]
    pub fn published(&self) -> Option<Arc<PublishedRules>> {
        self.published.borrow().clone()
    }

    /// Stores rules as a new revision, active on all nodes or pending approval. The caller has validated them. Rules
    /// of this author that are pending already keep their revision.
    ///
    /// # Errors
    /// [`ControlError::Conflict`] if another revision is active than the draft was based on; or a database error.
    pub async fn publish_rules(&self, draft: NewRevision, actor: &Actor) -> Result<i64, ControlError> {
        let now = self.now_millis();
        let text = audit_json(&draft.files)?;
        let first = match &draft.first {
            Some((files, hash)) => Some((audit_json(files)?, hash)),
            None => None,
        };
        let rev = writing!(&self.db, |tx, head| {
            let active: Option<(i64, String, String)> =
                sqlx::query_as(SELECT_ACTIVE).fetch_optional(&mut *tx).await?;
            if active.as_ref().map(|active| active.0) != draft.base_rev {
                return Err(ControlError::Conflict);
            }
            if draft.needs_approval {
                // Of the same author only: another could then approve what it sent itself.
                let pending =
                    sqlx::query_as(SELECT_PENDING).bind(draft.hash.clone()).bind(actor.name.clone());
                let pending: Option<(i64,)> = pending.fetch_optional(&mut *tx).await?;
                if let Some((rev,)) = pending {
                    return Ok(rev);
                }
            }
            let (mut last,): (i64,) = sqlx::query_as(SELECT_LAST).fetch_one(&mut *tx).await?;
            if let (0, Some((files, hash))) = (last, &first) {
                last = 1;
                let reason = "rule files before the first publication";
                let status = RevisionStatus::Superseded;
                insert!(
                    tx,
                    head,
                    last,
                    *hash,
                    files.clone(),
                    "files",
                    reason,
                    now,
                    status,
                    None::<i64>,
                    false
                );
            }
            // While nothing is published, the files' own revision is the one to roll back to.
            let base = draft.base_rev.or((last > 0).then_some(1));
            let rev = last + 1;
            let status =
                if draft.needs_approval { RevisionStatus::PendingApproval } else { RevisionStatus::Active };
            if !draft.needs_approval {
                end!(tx, head, RevisionStatus::Superseded, None, rev);
            }
            insert!(
                tx,
                head,
                rev,
                draft.hash,
                text.clone(),
                actor.name,
                draft.reason,
                now,
                status,
                base,
                true
            );
            let after = json!({
                "rev": rev, "revision": draft.hash, "reason": draft.reason, "status": status.name(),
                "files": draft.files.iter().map(|file| &file.name).collect::<Vec<_>>(),
            });
            let changed = ChangeRecord {
                action: "rules.publish",
                target: &rev.to_string(),
                before: before(base),
                after: after.to_string(),
            };
            record!(tx, head, now, actor, &changed);
            rev
        });
        self.apply().await;
        Ok(rev)
    }

    /// Records in the audit log that an operator confirms changed rule files of this node.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn audit_confirmed_files(
        &self,
        hash: &str,
        reasons: &[String],
        actor: &Actor,
    ) -> Result<(), ControlError> {
        let now = self.now_millis();
        let after = json!({"revision": hash, "confirmed": reasons}).to_string();
        writing!(&self.db, |tx, head| {
            let changed = ChangeRecord {
                action: "rules.confirm_files",
                target: hash,
                before: String::new(),
                after: after.clone(),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.apply().await;
        Ok(())
    }

    /// Approves a pending revision and makes it active.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if no revision with this number is pending, [`ControlError::SelfApproval`] if the
    /// actor is its author, [`ControlError::Conflict`] if the active rules have changed since it was published; or a
    /// database error.
    pub async fn approve_rules(&self, rev: i64, actor: &Actor) -> Result<(), ControlError> {
        let now = self.now_millis();
        writing!(&self.db, |tx, head| {
            let found: Option<(String, Option<i64>)> = sqlx::query_as(
                "SELECT author, base_rev FROM rule_revisions WHERE rev = $1 AND status = 'pending_approval'",
            )
            .bind(rev)
            .fetch_optional(&mut *tx)
            .await?;
            let (author, base) = found.ok_or(ControlError::NotFound("pending revision with this number"))?;
            if author == actor.name {
                return Err(ControlError::SelfApproval);
            }
            let active: Option<(i64, String, String)> =
                sqlx::query_as(SELECT_ACTIVE).fetch_optional(&mut *tx).await?;
            if active.is_some_and(|active| Some(active.0) != base) {
                return Err(ControlError::Conflict);
            }
            end!(tx, head, RevisionStatus::Superseded, None, rev);
            let approve = "UPDATE rule_revisions SET status = 'active', approved_by = $2, active_since = $3,
                 revision = $4 WHERE rev = $1";
            sqlx::query(approve)
                .bind(rev)
                .bind(actor.name.clone())
                .bind(now)
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let changed = ChangeRecord {
                action: "rules.approve",
                target: &rev.to_string(),
                before: before(base),
                after: json!({"rev": rev, "author": author}).to_string(),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.apply().await;
        Ok(())
    }

    /// Publishes an earlier revision again as a new one. With `only_if`, only while that revision is active, so that
    /// of several concurrent rollbacks one succeeds.
    ///
    /// # Errors
    /// [`ControlError::NotFound`] if there is no such revision, [`ControlError::NeverActive`] if it was never active,
    /// [`ControlError::Conflict`] if another revision is active than expected; or a database error.
    pub async fn roll_back_rules(
        &self,
        to: i64,
        only_if: Option<i64>,
        because: &str,
        actor: &Actor,
    ) -> Result<i64, ControlError> {
        let now = self.now_millis();
        let rev = writing!(&self.db, |tx, head| {
            let active: Option<(i64, String, String)> =
                sqlx::query_as(SELECT_ACTIVE).fetch_optional(&mut *tx).await?;
            let current = active.map(|active| active.0);
            if only_if.is_some() && current != only_if {
                return Err(ControlError::Conflict);
            }
            let found: Option<(String, String, String)> =
                sqlx::query_as("SELECT hash, files, status FROM rule_revisions WHERE rev = $1")
                    .bind(to)
                    .fetch_optional(&mut *tx)
                    .await?;
            let (hash, files, status_name) =
                found.ok_or(ControlError::NotFound("revision with this number"))?;
            let old_status = status(to, &status_name)?;
            // Otherwise the author of a pending revision could roll back to it without any approval.
            if !old_status.was_active() {
                return Err(ControlError::NeverActive { rev: to, status: old_status.name() });
            }
            let (last,): (i64,) = sqlx::query_as(SELECT_LAST).fetch_one(&mut *tx).await?;
            let rev = last + 1;
            end!(tx, head, RevisionStatus::RolledBack, Some(because.to_owned()), rev);
            let reason = format!("rollback to revision {to}: {because}");
            insert!(
                tx,
                head,
                rev,
                hash,
                files,
                actor.name,
                reason,
                now,
                RevisionStatus::Active,
                current,
                false
            );
            let changed = ChangeRecord {
                action: "rules.rollback",
                target: &rev.to_string(),
                before: before(current),
                after: json!({"rev": rev, "revision": hash, "text_of": to, "reason": because}).to_string(),
            };
            record!(tx, head, now, actor, &changed);
            rev
        });
        self.apply().await;
        Ok(rev)
    }

    /// Returns revisions below `before`, newest first.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn rule_revisions(
        &self,
        before: Option<i64>,
        limit: i64,
    ) -> Result<Vec<RuleRevision>, ControlError> {
        let list = format!("SELECT {COLUMNS} FROM rule_revisions WHERE rev < $1 ORDER BY rev DESC LIMIT $2");
        let rows: Vec<RevisionRow> = on!(&self.db, pool => {
            sqlx::query_as(sqlx::AssertSqlSafe(list))
                .bind(before.unwrap_or(i64::MAX))
                .bind(limit)
                .fetch_all(pool)
                .await?
        });
        rows.into_iter().map(revision).collect()
    }

    /// Returns one revision with its files.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn rule_revision(&self, rev: i64) -> Result<Option<PublishedRules>, ControlError> {
        let one = format!("SELECT {COLUMNS} FROM rule_revisions WHERE rev = $1");
        let row: Option<RevisionRow> = on!(&self.db, pool => {
            sqlx::query_as(sqlx::AssertSqlSafe(one)).bind(rev).fetch_optional(pool).await?
        });
        let Some(row) = row else { return Ok(None) };
        let (text,): (String,) = on!(&self.db, pool => {
            sqlx::query_as("SELECT files FROM rule_revisions WHERE rev = $1").bind(rev).fetch_one(pool).await?
        });
        Ok(Some(PublishedRules { revision: revision(row)?, files: files(&text)? }))
    }

    /// Returns the revision that was active at this time, in milliseconds; the first one if none was published by then.
    pub(crate) async fn rules_active_at(&self, millis: i64) -> Result<Option<PublishedRules>, ControlError> {
        let active_at = "SELECT rev FROM rule_revisions WHERE active_since <= $1
             ORDER BY active_since DESC, rev DESC LIMIT 1";
        let found: Option<(i64,)> =
            on!(&self.db, pool => sqlx::query_as(active_at).bind(millis).fetch_optional(pool).await?);
        // The files before the first publication are revision 1.
        self.rule_revision(found.map_or(1, |(rev,)| rev)).await
    }

    /// Reads which revision is active; reads its files only if it has changed.
    pub(crate) async fn catch_up_rules(&self) -> Result<(), ControlError> {
        let found: Option<(i64,)> = on!(&self.db, pool => {
            sqlx::query_as("SELECT rev FROM rule_revisions WHERE status = 'active'").fetch_optional(pool).await?
        });
        let known = self.published().map(|known| known.revision.rev);
        let found = found.map(|(rev,)| rev);
        if found != known {
            let rules = match found {
                Some(rev) => self.rule_revision(rev).await?.map(Arc::new),
                None => None,
            };
            if let Some(since) = rules.as_ref().and_then(|rules| rules.revision.active_since_ms)
                && self.is_loaded()
            {
                self.lag.observe(self.now_millis() - since);
            }
            self.published.send_replace(rules);
        }
        let (changed,): (i64,) = on!(&self.db, pool => {
            sqlx::query_as("SELECT COALESCE(MAX(revision), 0) FROM rule_revisions").fetch_one(pool).await?
        });
        if self.notified_rules.swap(changed, Ordering::Relaxed) != changed {
            self.notify(ChangeEvent::Rules);
        }
        Ok(())
    }
}

fn audit_json(files: &[RuleFile]) -> Result<String, ControlError> {
    serde_json::to_string(files).map_err(|error| ControlError::Corrupt(error.to_string()))
}

fn before(rev: Option<i64>) -> String {
    rev.map(|rev| json!({"rev": rev}).to_string()).unwrap_or_default()
}
