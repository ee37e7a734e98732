//! Many agreements at once. Lines are checked one by one; those that can act are gathered and written some thousands at a
//! time, each batch in one transaction with one entry of the audit log. So memory stays what it is however many lines come,
//! other writers wait for one batch at most, and what was written before something failed stays.
//!
//! A batch is as large as can be written in about a second: keys are random, so that every row of a small one changes a page
//! of the index by itself, while rows of a large one share pages.

mod write;

use crate::auth::key_hash::{KeyHash, prefix};
use crate::control_plane::ControlPlane;
use crate::db::transaction::Actor;
use crate::db::{Db, ImportPhase};
use crate::error::{ControlError, ValidationError, check_text, parse_time};
use crate::quota::overrides::QuotaOverride;
use crate::quota::pending::{CurrentTerms, PriorTerms, is_pending};
use crate::quota::record::{QuotaSpec, quota_message};
use ring::digest;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use tollgate_rules::Ruleset;
use utoipa::ToSchema;

/// Rows in one transaction, and in the first one.
const MIN_BATCH: usize = 4_000;
const MAX_BATCH: usize = 32_000;
/// Bytes of lines in one transaction: rows may be long.
const MAX_BATCH_BYTES: usize = 16 << 20;
/// How long a transaction should take at most, in milliseconds.
const BATCH_TARGET: i64 = 1_000;
/// Other processes look every tenth of a second whether a file of SQLite can be written to; so long nobody here does.
const MIN_PAUSE: Duration = Duration::from_millis(110);
/// Errors that are told of; all are counted.
const MAX_ERRORS: usize = 1_000;

quota_message! {
    /// A line of an import, which may be a line of an export.
    pub struct ImportLine {
        /// The caller's key.
        pub api_key: Option<String>,
        /// Or what stands for it, as exports have it.
        pub id: Option<String>,
        /// The first characters of a key that is not there itself.
        pub key_prefix: Option<String>,
        /// Which installation's secret the id was made with.
        pub installation: Option<String>,
        /// Exports have it; it is when the import happens.
        pub updated_at: Option<String>,
        /// Exports have it; it is a new one.
        pub revision: Option<i64>,
        /// What acts until `effective_at`, as exports have it; what acts already, if it does not say.
        pub until_effective: Option<CurrentTerms>,
    }
}

/// What came of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Imported)]
pub struct ImportReport {
    /// Lines that act.
    pub imported: u64,
    /// Lines that do not.
    pub failed: u64,
    /// Why, of the first of them.
    pub errors: Vec<LineError>,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct LineError {
    /// Which, from one.
    pub line: u64,
    /// What is wrong, and what to write.
    pub detail: String,
    /// The field.
    #[serde(rename = "field")]
    #[schema(required = true)]
    pub place: Option<String>,
}

/// An import under way. There is one at a time.
pub struct Import {
    control: Arc<ControlPlane>,
    rules: Arc<Ruleset>,
    actor: Actor,
    batch: ImportBatch,
    /// How many rows make a batch now.
    full: usize,
    /// How long this node has written without a pause, in milliseconds.
    busy_millis: i64,
    /// The batch before, which is written while this one is gathered.
    writing: Option<JoinHandle<Result<BatchResult, ControlError>>>,
    report: ImportReport,
    /// Whether the writer of the database is prepared for much at once.
    unusual: bool,
    /// No other import is under way while this is held.
    only: Option<OwnedMutexGuard<()>>,
}

/// What became of a batch.
struct BatchResult {
    lines: u64,
    /// In milliseconds.
    elapsed: i64,
}

/// Lines that are to be written together.
struct ImportBatch {
    rows: Vec<ImportRow>,
    /// Where a key is already: of several lines about it the last counts, and one statement must not meet it twice.
    positions: HashMap<KeyHash, usize>,
    first: u64,
    last: u64,
    lines: u64,
    bytes: usize,
    sum: digest::Context,
}

struct ImportRow {
    hash: KeyHash,
    key_prefix: String,
    tier: Option<String>,
    overrides: String,
    effective_at: Option<i64>,
    expires_at: Option<i64>,
    reason: String,
    author: String,
    /// What acts until `effective_at`; where nothing is here, what the row has that is there.
    until: Option<PriorTerms<String>>,
}

impl ImportRow {
    /// In place of a line about the same key, which would have been written first.
    fn after(mut self, before: &Self, now: i64) -> Self {
        if self.until.is_none() && is_pending(self.effective_at, now) {
            let Self { tier, overrides, expires_at, .. } = before;
            let own =
                PriorTerms { tier: tier.clone(), overrides: overrides.clone(), expires_at: *expires_at };
            self.until = own.active(before.effective_at, before.until.clone(), now);
        }
        self
    }
}

impl Default for ImportBatch {
    fn default() -> Self {
        let sum = digest::Context::new(&digest::SHA256);
        Self { rows: Vec::new(), positions: HashMap::new(), first: 0, last: 0, lines: 0, bytes: 0, sum }
    }
}

impl ImportBatch {
    fn add(&mut self, line: u64, sent: &[u8], row: ImportRow, now: i64) {
        if self.lines == 0 {
            self.first = line;
        }
        self.last = line;
        self.lines += 1;
        self.bytes += sent.len();
        self.sum.update(sent);
        self.sum.update(b"\n");
        match self.positions.get(&row.hash) {
            Some(place) => self.rows[*place] = row.after(&self.rows[*place], now),
            None => {
                self.positions.insert(row.hash, self.rows.len());
                self.rows.push(row);
            }
        }
    }
}

impl Import {
    /// Begins one; nothing, while another is under way.
    #[must_use]
    pub fn begin(control: &Arc<ControlPlane>, rules: Arc<Ruleset>, actor: Actor) -> Option<Self> {
        let only = Arc::clone(&control.import_lock).try_lock_owned().ok()?;
        let control = Arc::clone(control);
        let (batch, told) = (ImportBatch::default(), ImportReport::default());
        Some(Self {
            control,
            rules,
            actor,
            batch,
            full: MIN_BATCH,
            busy_millis: 0,
            writing: None,
            report: told,
            unusual: false,
            only: Some(only),
        })
    }

    /// Takes a line in, or notes what is wrong with it. `sent` is the line as it came.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take what was gathered before.
    pub async fn line(&mut self, line: u64, sent: &[u8], read: ImportLine) -> Result<(), ControlError> {
        match self.validate(read) {
            Ok(row) => self.batch.add(line, sent, row, self.control.now_seconds()),
            Err(wrong) => self.reject_line(line, wrong.detail, Some(wrong.place)),
        }
        if self.batch.rows.len() >= self.full || self.batch.bytes >= MAX_BATCH_BYTES {
            self.await_batch().await?;
            let batch = std::mem::take(&mut self.batch);
            let breath = self.yield_between_batches();
            self.unusual = true;
            self.control.db.importing(ImportPhase::Begins).await?;
            let (control, actor) = (Arc::clone(&self.control), self.actor.clone());
            self.writing = Some(tokio::spawn(async move {
                tokio::time::sleep(breath).await;
                control.write_batch(batch, &actor).await
            }));
        }
        Ok(())
    }

    /// How long to wait before the next batch. Those in this process who write get their turn anyway.
    fn yield_between_batches(&mut self) -> Duration {
        if self.busy_millis < BATCH_TARGET || !matches!(self.control.db, Db::Sqlite { .. }) {
            return Duration::ZERO;
        }
        self.busy_millis = 0;
        MIN_PAUSE
    }

    /// Notes a line that could not be read.
    pub fn reject_line(&mut self, line: u64, detail: String, place: Option<String>) {
        self.report.failed += 1;
        if self.report.errors.len() < MAX_ERRORS {
            self.report.errors.push(LineError { line, detail, place });
        }
    }

    /// Lines that act by now, whatever comes after.
    #[must_use]
    pub fn imported(&self) -> u64 {
        self.report.imported
    }

    /// Waits until what came so far is written, and leaves out what is still being gathered.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take it.
    pub async fn abort(&mut self) -> Result<(), ControlError> {
        let written = self.await_batch().await;
        self.restore_writer().await;
        written
    }

    async fn restore_writer(&mut self) {
        restore_writer(&self.control).await;
        self.unusual = false;
    }

    async fn await_batch(&mut self) -> Result<(), ControlError> {
        if let Some(writing) = self.writing.take() {
            let written = writing.await.map_err(|error| ControlError::Corrupt(error.to_string()))??;
            self.report.imported += written.lines;
            self.busy_millis += written.elapsed;
            self.full = match written.elapsed {
                ..=500 => (self.full * 2).min(MAX_BATCH),
                501..=BATCH_TARGET => self.full,
                _ => (self.full / 2).max(MIN_BATCH),
            };
        }
        Ok(())
    }

    /// Writes the rest. All of it acts on this node when this returns.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take it.
    pub async fn finish(&mut self) -> Result<ImportReport, ControlError> {
        let written = self.write_rest().await;
        self.restore_writer().await;
        written?;
        self.control.apply().await;
        Ok(std::mem::take(&mut self.report))
    }

    async fn write_rest(&mut self) -> Result<(), ControlError> {
        self.await_batch().await?;
        let batch = std::mem::take(&mut self.batch);
        if batch.lines > 0 {
            self.report.imported += self.control.write_batch(batch, &self.actor).await?.lines;
        }
        Ok(())
    }

    fn validate(&self, read: ImportLine) -> Result<ImportRow, ValidationError> {
        let problem = |place: &str, detail: &str| {
            Err(ValidationError { place: place.to_owned(), detail: detail.to_owned() })
        };
        let (hash, key_prefix) = match (&read.api_key, &read.id) {
            (Some(api_key), id) => {
                check_text("api_key", api_key, 1, crate::auth::key_hash::MAX_KEY_BYTES)?;
                let hash = self.control.hasher.hash(api_key);
                if id.as_ref().is_some_and(|id| KeyHash::parse(id) != Some(hash)) {
                    return problem("id", "it is not what stands for this `api_key` here: leave it out");
                }
                (hash, prefix(api_key))
            }
            (None, Some(id)) => {
                let ours = self.control.installation_id();
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
                check_text("key_prefix", &key_prefix, 0, 64)?;
                (hash, key_prefix)
            }
            (None, None) => {
                return problem("api_key", "it says of nobody: write `api_key`, or the `id` of an export");
            }
        };
        let ImportLine { tier, overrides, effective_at, expires_at, reason, author, until_effective, .. } =
            read;
        let draft = QuotaSpec { tier, overrides, effective_at, expires_at, reason, author };
        let checked = draft.validate(&self.rules, self.control.clock.now())?;
        let now = self.control.now_seconds();
        let until = until_effective.filter(|_| is_pending(checked.effective_at, now));
        let until = until.map(|until| self.validate_prior_terms(until)).transpose()?.flatten();
        Ok(ImportRow {
            hash,
            key_prefix,
            tier: checked.tier,
            overrides: serde_json::to_string(&checked.overrides).unwrap_or_default(),
            effective_at: checked.effective_at,
            expires_at: checked.expires_at,
            reason: checked.reason,
            author: checked.author.unwrap_or_else(|| self.actor.name.clone()),
            until,
        })
    }

    /// What is to act until then; nothing, where it would have ended by now.
    fn validate_prior_terms(
        &self,
        sent: CurrentTerms,
    ) -> Result<Option<PriorTerms<String>>, ValidationError> {
        let within = |wrong: ValidationError| ValidationError {
            place: format!("until_effective.{}", wrong.place),
            detail: wrong.detail,
        };
        let CurrentTerms { tier, overrides, expires_at } = sent;
        let expires_at = expires_at.map(|at| parse_time("expires_at", &at)).transpose().map_err(within)?;
        let draft = QuotaSpec { tier, overrides, ..QuotaSpec::default() };
        let checked = draft.validate(&self.rules, self.control.clock.now()).map_err(within)?;
        let overrides = serde_json::to_string(&checked.overrides).unwrap_or_default();
        let until = PriorTerms { tier: checked.tier, overrides, expires_at };
        Ok(until.active(None, None, self.control.now_seconds()))
    }
}

async fn restore_writer(control: &ControlPlane) {
    if let Err(error) = control.db.importing(ImportPhase::Ends).await {
        tracing::debug!(%error, "the database was not tidied up after an import");
    }
}

/// Whoever sends one may leave at any time. What is being written then is written, and the next one waits for the tidying up.
impl Drop for Import {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if !self.unusual {
            return;
        }
        let (control, writing, only) = (Arc::clone(&self.control), self.writing.take(), self.only.take());
        runtime.spawn(async move {
            if let Some(writing) = writing {
                let _ = writing.await;
            }
            restore_writer(&control).await;
            drop(only);
        });
    }
}

impl std::fmt::Debug for Import {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Import").field("report", &self.report).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
