//! Writes an import batch with few statements, in one transaction.
//!
//! Every row has its own revision, as if it had been written alone: a batch takes as many revisions from the head as
//! it has rows. The head row is locked until the batch is committed, so revisions become visible in order here too,
//! and other nodes may read a batch in any number of pages.

use super::{BatchResult, ImportBatch, ImportRow};
use crate::audit::record;
use crate::control_plane::ControlPlane;
use crate::db::transaction::{Actor, ChangeRecord, writing};
use crate::error::ControlError;
use sqlx::{AssertSqlSafe, PgConnection, SqliteConnection};
use std::sync::LazyLock;

/// Rows per SQLite statement.
const ROWS_PER_STATEMENT: usize = 100;

impl ControlPlane {
    /// Writes a batch. It is on disk when this returns.
    pub(super) async fn write_batch(
        &self,
        mut batch: ImportBatch,
        actor: &Actor,
    ) -> Result<BatchResult, ControlError> {
        // Rows that are neighbors in the index are written one after another.
        batch.rows.sort_unstable_by_key(|row| row.hash);
        let now = self.now_millis();
        let rows = i64::try_from(batch.rows.len()).unwrap_or(i64::MAX);
        let sum: String =
            batch.sum.clone().finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        writing!(&self.db, rows, |tx, head| {
            let first = head.0 - rows + 1;
            tx.write_many(&batch.rows, first, now).await?;
            let after = serde_json::json!({
                "first_line": batch.first, "last_line": batch.last, "lines": batch.lines, "keys": rows,
                "first_revision": first, "last_revision": head.0, "sha256": sum,
            });
            let changed = ChangeRecord {
                action: "quota.import",
                target: "quotas",
                before: String::new(),
                after: after.to_string(),
            };
            record!(tx, head, now, actor, &changed);
        });
        Ok(BatchResult { lines: batch.lines, elapsed: self.now_millis() - now })
    }
}

/// Bulk insert for each database: few statements, with constant text.
trait BulkInsert {
    /// Inserts rows with consecutive revisions starting at `revision`.
    async fn write_many(&mut self, rows: &[ImportRow], revision: i64, now: i64) -> Result<(), sqlx::Error>;
}

const INTO: &str = "INSERT INTO quotas (key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author, \
     until_tier, until_overrides, until_expires_at, attribute, revision, updated_at, deleted)";

/// Keeps the current terms if the new row is pending: those of the old row, or those in effect until it starts. A
/// line of an export contains them itself.
macro_rules! prior_terms {
    ($own:literal) => {
        concat!(
            "until_",
            $own,
            " = CASE WHEN excluded.until_overrides IS NOT NULL THEN excluded.until_",
            $own,
            " WHEN excluded.effective_at IS NULL OR excluded.effective_at * 1000 <= excluded.updated_at \
             OR quotas.deleted <> 0 THEN NULL \
             WHEN quotas.effective_at IS NULL OR quotas.effective_at * 1000 <= excluded.updated_at THEN quotas.",
            $own,
            " ELSE quotas.until_",
            $own,
            " END"
        )
    };
}

const REPLACING: &str = concat!(
    " ON CONFLICT (key_hash) DO UPDATE SET key_prefix = CASE WHEN excluded.key_prefix = '' \
     THEN quotas.key_prefix ELSE excluded.key_prefix END, \
     tier = excluded.tier, overrides = excluded.overrides, effective_at = excluded.effective_at, \
     expires_at = excluded.expires_at, reason = excluded.reason, author = excluded.author, \
     updated_at = excluded.updated_at, deleted = 0, revision = excluded.revision, ",
    prior_terms!("tier"),
    ", ",
    prior_terms!("overrides"),
    ", ",
    prior_terms!("expires_at"),
);

static POSTGRES: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{INTO} SELECT *, $14::bigint, 0 FROM UNNEST($1::bytea[], $2::text[], $3::text[], $4::text[], $5::bigint[], \
         $6::bigint[], $7::text[], $8::text[], $9::text[], $10::text[], $11::bigint[], $12::text[], $13::bigint[]) {REPLACING}"
    )
});

/// Returns a SQLite statement for this many rows.
fn sqlite(rows: usize) -> String {
    let row = "(?,?,?,?,?,?,?,?,?,?,?,?,?,?,0)";
    format!("{INTO} VALUES {}{REPLACING}", vec![row; rows].join(","))
}

static SQLITE_MANY: LazyLock<String> = LazyLock::new(|| sqlite(ROWS_PER_STATEMENT));
static SQLITE_ONE: LazyLock<String> = LazyLock::new(|| sqlite(1));

impl BulkInsert for SqliteConnection {
    async fn write_many(&mut self, rows: &[ImportRow], revision: i64, now: i64) -> Result<(), sqlx::Error> {
        let mut revisions = revision..;
        let (many, rest) = rows.as_chunks::<ROWS_PER_STATEMENT>();
        let many = many.iter().map(|rows| (SQLITE_MANY.as_str(), &rows[..]));
        for (text, rows) in many.chain(rest.chunks(1).map(|row| (SQLITE_ONE.as_str(), row))) {
            let mut query = sqlx::query(AssertSqlSafe(text));
            for (row, revision) in rows.iter().zip(&mut revisions) {
                query = query
                    .bind(&row.hash.0[..])
                    .bind(row.key_prefix.as_str())
                    .bind(row.tier.as_deref())
                    .bind(row.overrides.as_str())
                    .bind(row.effective_at)
                    .bind(row.expires_at)
                    .bind(row.reason.as_str())
                    .bind(row.author.as_str())
                    .bind(row.until.as_ref().and_then(|until| until.tier.as_deref()))
                    .bind(row.until.as_ref().map(|until| until.overrides.as_str()))
                    .bind(row.until.as_ref().and_then(|until| until.expires_at))
                    .bind(row.key.as_str())
                    .bind(revision)
                    .bind(now);
            }
            query.execute(&mut *self).await?;
        }
        Ok(())
    }
}

impl BulkInsert for PgConnection {
    async fn write_many(&mut self, rows: &[ImportRow], revision: i64, now: i64) -> Result<(), sqlx::Error> {
        fn column<'a, T>(rows: &'a [ImportRow], field: impl Fn(&'a ImportRow) -> T) -> Vec<T> {
            rows.iter().map(field).collect()
        }
        let revisions: Vec<i64> = (revision..).take(rows.len()).collect();
        sqlx::query(AssertSqlSafe(POSTGRES.as_str()))
            .bind(column(rows, |row| &row.hash.0[..]))
            .bind(column(rows, |row| row.key_prefix.as_str()))
            .bind(column(rows, |row| row.tier.as_deref()))
            .bind(column(rows, |row| row.overrides.as_str()))
            .bind(column(rows, |row| row.effective_at))
            .bind(column(rows, |row| row.expires_at))
            .bind(column(rows, |row| row.reason.as_str()))
            .bind(column(rows, |row| row.author.as_str()))
            .bind(column(rows, |row| row.until.as_ref().and_then(|until| until.tier.as_deref())))
            .bind(column(rows, |row| row.until.as_ref().map(|until| until.overrides.as_str())))
            .bind(column(rows, |row| row.until.as_ref().and_then(|until| until.expires_at)))
            .bind(column(rows, |row| row.key.as_str()))
            .bind(revisions)
            .bind(now)
            .execute(self)
            .await?;
        Ok(())
    }
}
