//! Many agreements at once. Lines are checked one by one; those that can act are gathered and written some thousands at a
//! time, each batch in one transaction with one entry of the audit log. So memory stays what it is however many lines come,
//! other writers wait for one batch at most, and what was written before something failed stays.
//!
//! Every row has a revision of its own, as if it had been written alone: a batch takes as many from the head at once as it
//! has rows. The row of the head is locked until the batch is committed, so revisions become visible in order here too, and
//! those who follow may read a batch in as many pages as they like.

use crate::change::{Actor, Changed, record, writing};
use crate::control::Control;
use crate::db::ControlError;
use crate::key::{KeyHash, prefix};
use crate::quota::{QuotaDraft, QuotaOverride, QuotaProblem, text};
use ring::digest;
use serde::{Deserialize, Serialize};
use sqlx::{AssertSqlSafe, PgConnection, SqliteConnection};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use tollgate_rules::Ruleset;

/// Rows in one transaction.
const BATCH: usize = 4_000;
/// Rows in one statement of SQLite, which must be a part of [`BATCH`].
const AT_ONCE: usize = 100;
/// Errors that are told of; all are counted.
const MOST_ERRORS: usize = 1_000;

/// A line of an import, which may be a line of an export.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportLine {
    /// The caller's key.
    pub api_key: Option<String>,
    /// Or what stands for it, as exports have it.
    pub id: Option<String>,
    /// The first characters of a key that is not there itself.
    pub key_prefix: Option<String>,
    /// Which installation's secret the id was made with.
    pub installation: Option<String>,
    /// As in [`QuotaDraft`], like all that follow.
    pub tier: Option<String>,
    /// Limits in place of rules' own.
    #[serde(default)]
    pub overrides: Vec<QuotaOverride>,
    /// From when it acts.
    pub effective_at: Option<String>,
    /// Until when.
    pub expires_at: Option<String>,
    /// Why.
    #[serde(default)]
    pub reason: String,
    /// Who wants it.
    pub author: Option<String>,
    /// Exports have it; it is when the import happens.
    pub updated_at: Option<String>,
    /// Exports have it; it is a new one.
    pub revision: Option<i64>,
}

/// What came of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// Lines that act.
    pub imported: u64,
    /// Lines that do not.
    pub failed: u64,
    /// Why, of the first of them.
    pub errors: Vec<LineError>,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LineError {
    /// Which, from one.
    pub line: u64,
    /// What is wrong, and what to write.
    pub detail: String,
    /// The field.
    pub place: Option<String>,
}

/// An import under way. There is one at a time.
pub struct Import {
    control: Arc<Control>,
    rules: Arc<Ruleset>,
    actor: Actor,
    batch: Batch,
    /// The batch before, which is written while this one is gathered.
    writing: Option<JoinHandle<Result<u64, ControlError>>>,
    told: Imported,
    _only: OwnedMutexGuard<()>,
}

/// Lines that are to be written together.
struct Batch {
    rows: Vec<BulkRow>,
    /// Where a key is already: of several lines about it the last counts, and one statement must not meet it twice.
    places: HashMap<KeyHash, usize>,
    first: u64,
    last: u64,
    lines: u64,
    sum: digest::Context,
}

struct BulkRow {
    hash: KeyHash,
    key_prefix: String,
    tier: Option<String>,
    overrides: String,
    effective_at: Option<i64>,
    expires_at: Option<i64>,
    reason: String,
    author: String,
}

impl Default for Batch {
    fn default() -> Self {
        let sum = digest::Context::new(&digest::SHA256);
        Self { rows: Vec::new(), places: HashMap::new(), first: 0, last: 0, lines: 0, sum }
    }
}

impl Batch {
    fn add(&mut self, line: u64, sent: &[u8], row: BulkRow) {
        if self.lines == 0 {
            self.first = line;
        }
        self.last = line;
        self.lines += 1;
        self.sum.update(sent);
        self.sum.update(b"\n");
        match self.places.get(&row.hash) {
            Some(place) => self.rows[*place] = row,
            None => {
                self.places.insert(row.hash, self.rows.len());
                self.rows.push(row);
            }
        }
    }
}

impl Import {
    /// Begins one; nothing, while another is under way.
    #[must_use]
    pub fn begin(control: &Arc<Control>, rules: Arc<Ruleset>, actor: Actor) -> Option<Self> {
        let only = Arc::clone(&control.importing).try_lock_owned().ok()?;
        let control = Arc::clone(control);
        let (batch, told) = (Batch::default(), Imported::default());
        Some(Self { control, rules, actor, batch, writing: None, told, _only: only })
    }

    /// Takes a line in, or notes what is wrong with it. `sent` is the line as it came.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take what was gathered before.
    pub async fn line(&mut self, line: u64, sent: &[u8], read: ImportLine) -> Result<(), ControlError> {
        match self.check(read) {
            Ok(row) => self.batch.add(line, sent, row),
            Err(wrong) => self.refuse(line, wrong.detail, Some(wrong.place)),
        }
        if self.batch.rows.len() == BATCH {
            self.written().await?;
            let batch = std::mem::take(&mut self.batch);
            let (control, actor) = (Arc::clone(&self.control), self.actor.clone());
            self.writing = Some(tokio::spawn(async move { control.write_batch(&batch, &actor).await }));
        }
        Ok(())
    }

    /// Notes a line that could not be read.
    pub fn refuse(&mut self, line: u64, detail: String, place: Option<String>) {
        self.told.failed += 1;
        if self.told.errors.len() < MOST_ERRORS {
            self.told.errors.push(LineError { line, detail, place });
        }
    }

    /// Lines that act by now, whatever comes after.
    #[must_use]
    pub fn imported(&self) -> u64 {
        self.told.imported
    }

    /// Waits until what came so far is written, without what is still being gathered: for an import that breaks off.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take it.
    pub async fn written(&mut self) -> Result<(), ControlError> {
        if let Some(writing) = self.writing.take() {
            let written = writing.await.map_err(|error| ControlError::Broken(error.to_string()))?;
            self.told.imported += written?;
        }
        Ok(())
    }

    /// Writes the rest. All of it acts on this node when this returns.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take it.
    pub async fn finish(&mut self) -> Result<Imported, ControlError> {
        self.written().await?;
        let batch = std::mem::take(&mut self.batch);
        if batch.lines > 0 {
            self.told.imported += self.control.write_batch(&batch, &self.actor).await?;
        }
        self.control.act().await;
        Ok(std::mem::take(&mut self.told))
    }

    fn check(&self, read: ImportLine) -> Result<BulkRow, QuotaProblem> {
        let problem = |place: &str, detail: &str| {
            Err(QuotaProblem { place: place.to_owned(), detail: detail.to_owned() })
        };
        let (hash, key_prefix) = match (&read.api_key, &read.id) {
            (Some(api_key), id) => {
                text("api_key", api_key, 1, crate::key::LONGEST)?;
                let hash = self.control.hasher.hash(api_key);
                if id.as_ref().is_some_and(|id| KeyHash::parse(id) != Some(hash)) {
                    return problem("id", "it is not what stands for this `api_key` here: leave it out");
                }
                (hash, prefix(api_key))
            }
            (None, Some(id)) => {
                let ours = self.control.installation();
                if read.installation.as_deref().is_some_and(|of| of != ours) {
                    return problem(
                        "installation",
                        "it was exported elsewhere: ids of one installation stand for nothing in another. Send `api_key`",
                    );
                }
                let Some(hash) = KeyHash::parse(id) else {
                    return problem("id", "write the 64 digits of an export, or `api_key` instead");
                };
                let key_prefix = read.key_prefix.unwrap_or_default();
                text("key_prefix", &key_prefix, 0, 64)?;
                (hash, key_prefix)
            }
            (None, None) => {
                return problem("api_key", "it says of nobody: write `api_key`, or the `id` of an export");
            }
        };
        let ImportLine { tier, overrides, effective_at, expires_at, reason, author, .. } = read;
        let draft = QuotaDraft { tier, overrides, effective_at, expires_at, reason, author };
        let checked = draft.check(&self.rules, self.control.clock.now())?;
        Ok(BulkRow {
            hash,
            key_prefix,
            tier: checked.tier,
            overrides: serde_json::to_string(&checked.overrides).unwrap_or_default(),
            effective_at: checked.effective_at,
            expires_at: checked.expires_at,
            reason: checked.reason,
            author: checked.author.unwrap_or_else(|| self.actor.name.clone()),
        })
    }
}

impl std::fmt::Debug for Import {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Import").field("told", &self.told).finish_non_exhaustive()
    }
}

impl Control {
    async fn write_batch(&self, batch: &Batch, actor: &Actor) -> Result<u64, ControlError> {
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
            let changed = Changed {
                action: "quota.import",
                target: "quotas",
                before: String::new(),
                after: after.to_string(),
            };
            record!(tx, head, now, actor, &changed);
        });
        Ok(batch.lines)
    }
}

/// How each database writes many rows: as few statements as it can, whose text is always the same.
trait WriteMany {
    /// The rows get revisions from `revision` on.
    async fn write_many(&mut self, rows: &[BulkRow], revision: i64, now: i64) -> Result<(), sqlx::Error>;
}

const INTO: &str = "INSERT INTO quotas (key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author, \
     revision, updated_at, deleted)";

const REPLACING: &str = " ON CONFLICT (key_hash) DO UPDATE SET key_prefix = CASE WHEN excluded.key_prefix = '' \
     THEN quotas.key_prefix ELSE excluded.key_prefix END, \
     tier = excluded.tier, overrides = excluded.overrides, effective_at = excluded.effective_at, \
     expires_at = excluded.expires_at, reason = excluded.reason, author = excluded.author, \
     updated_at = excluded.updated_at, deleted = 0, revision = excluded.revision";

static POSTGRES: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{INTO} SELECT *, $10::bigint, 0 FROM UNNEST($1::bytea[], $2::text[], $3::text[], $4::text[], $5::bigint[], \
         $6::bigint[], $7::text[], $8::text[], $9::bigint[]) {REPLACING}"
    )
});

/// A statement of SQLite for so many rows.
fn sqlite(rows: usize) -> String {
    let row = "(?,?,?,?,?,?,?,?,?,?,0)";
    format!("{INTO} VALUES {}{REPLACING}", vec![row; rows].join(","))
}

static SQLITE_MANY: LazyLock<String> = LazyLock::new(|| sqlite(AT_ONCE));
static SQLITE_ONE: LazyLock<String> = LazyLock::new(|| sqlite(1));

impl WriteMany for SqliteConnection {
    async fn write_many(&mut self, rows: &[BulkRow], revision: i64, now: i64) -> Result<(), sqlx::Error> {
        let mut revisions = revision..;
        let (many, rest) = rows.as_chunks::<AT_ONCE>();
        let many = many.iter().map(|rows| (SQLITE_MANY.as_str(), &rows[..]));
        for (text, rows) in many.chain(rest.chunks(1).map(|row| (SQLITE_ONE.as_str(), row))) {
            let mut query = sqlx::query(AssertSqlSafe(text));
            for (row, revision) in rows.iter().zip(&mut revisions) {
                query = query
                    .bind(row.hash.0.to_vec())
                    .bind(row.key_prefix.clone())
                    .bind(row.tier.clone())
                    .bind(row.overrides.clone())
                    .bind(row.effective_at)
                    .bind(row.expires_at)
                    .bind(row.reason.clone())
                    .bind(row.author.clone())
                    .bind(revision)
                    .bind(now);
            }
            query.execute(&mut *self).await?;
        }
        Ok(())
    }
}

impl WriteMany for PgConnection {
    async fn write_many(&mut self, rows: &[BulkRow], revision: i64, now: i64) -> Result<(), sqlx::Error> {
        fn column<T>(rows: &[BulkRow], field: impl Fn(&BulkRow) -> T) -> Vec<T> {
            rows.iter().map(field).collect()
        }
        let revisions: Vec<i64> = (revision..).take(rows.len()).collect();
        sqlx::query(AssertSqlSafe(POSTGRES.as_str()))
            .bind(column(rows, |row| row.hash.0.to_vec()))
            .bind(column(rows, |row| row.key_prefix.clone()))
            .bind(column(rows, |row| row.tier.clone()))
            .bind(column(rows, |row| row.overrides.clone()))
            .bind(column(rows, |row| row.effective_at))
            .bind(column(rows, |row| row.expires_at))
            .bind(column(rows, |row| row.reason.clone()))
            .bind(column(rows, |row| row.author.clone()))
            .bind(revisions)
            .bind(now)
            .execute(self)
            .await?;
        Ok(())
    }
}
