//! Bulk quota import. Lines are validated one by one; valid ones are collected and written some thousands at a time,
//! each batch in one transaction with one audit entry. So memory use does not depend on the number of lines, other
//! writers wait for one batch at most, and what was written before a failure stays.
//!
//! A batch is as large as can be written in about a second: keys are random, so every row of a small batch changes
//! its own page of the index, while rows of a large one share pages.

mod write;

use crate::control_plane::ControlPlane;
use crate::db::transaction::Actor;
use crate::db::{Db, ImportPhase};
use crate::error::{ControlError, ValidationError, check_text, parse_time};
use crate::quota::caller::check_length;
use crate::quota::pending::{CurrentTerms, PriorTerms, is_pending};
use crate::quota::record::{QuotaSpec, quota_message};
use ring::digest;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use tollgate_replica::QuotaOverride;
use tollgate_replica::{KeyHash, network, shown};
use tollgate_rules::{CALLER_KEY, Ruleset};
use utoipa::ToSchema;

/// Minimum number of rows per transaction, also the first batch's; the next one is the maximum.
const MIN_BATCH: usize = 4_000;
const MAX_BATCH: usize = 32_000;
/// Maximum size of the lines of a transaction, in bytes: rows may be long.
const MAX_BATCH_BYTES: usize = 16 << 20;
/// Target duration of a transaction, in milliseconds.
const BATCH_TARGET: i64 = 1_000;
/// Pause between batches: other processes poll every 100 ms whether a SQLite file can be written to.
const MIN_PAUSE: Duration = Duration::from_millis(110);
/// Maximum number of errors reported; all are counted.
const MAX_ERRORS: usize = 1_000;

quota_message! {
    /// A line of an import, which may be a line of an export.
    pub struct ImportLine {
        /// The caller's API key.
        pub api_key: Option<String>,
        /// The attribute that identifies the caller; `api_key` if absent.
        pub key: Option<String>,
        /// Its value.
        pub value: Option<String>,
        /// The hash of the caller's value, as in exports.
        pub id: Option<String>,
        /// First characters of the value, as in exports, if the value itself is absent.
        pub key_prefix: Option<String>,
        /// The installation in which the id is valid.
        pub installation: Option<String>,
        /// Accepted from exports and ignored: the time of the import is used.
        pub updated_at: Option<String>,
        /// Accepted from exports and ignored: the import assigns a new one.
        pub revision: Option<i64>,
        /// The terms in effect until `effective_at`, as in exports; the current terms if absent.
        pub until_effective: Option<CurrentTerms>,
    }
}

impl ImportLine {
    /// Returns the attribute that identifies the caller, and its value if the line has it. An API key may be either
    /// field's.
    #[must_use]
    pub fn caller(&self) -> (&str, Option<&str>) {
        let key = self.key.as_deref().unwrap_or(CALLER_KEY);
        (key, self.value.as_deref().or(self.api_key.as_deref().filter(|_| key == CALLER_KEY)))
    }

    /// Returns the quota of the line.
    #[must_use]
    pub fn spec(&self) -> QuotaSpec {
        let Self { tier, overrides, effective_at, expires_at, reason, author, confirm, .. } = self.clone();
        QuotaSpec { tier, overrides, effective_at, expires_at, reason, author, confirm }
    }
}

/// Result of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct ImportReport {
    /// Number of lines that took effect.
    pub imported: u64,
    /// Number of rejected lines.
    pub failed: u64,
    /// The first errors.
    pub errors: Vec<LineError>,
}

/// A rejected line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct LineError {
    /// Line number, starting at 1.
    pub line: u64,
    /// What is wrong, and how to fix it.
    pub detail: String,
    /// The invalid field.
    #[serde(rename = "field")]
    #[schema(required = true)]
    pub place: Option<String>,
}

/// A running import. Only one runs at a time.
pub struct Import {
    control: Arc<ControlPlane>,
    rules: Arc<Ruleset>,
    actor: Actor,
    batch: ImportBatch,
    /// Current number of rows per batch.
    full: usize,
    /// Time written without a pause, in milliseconds.
    busy_millis: i64,
    /// The previous batch, which is written while this one is collected.
    writing: Option<JoinHandle<Result<BatchResult, ControlError>>>,
    report: ImportReport,
    /// Lengths of the networks that have quotas with the lines so far, by attribute.
    lengths: HashMap<String, Vec<u8>>,
    /// Whether the database writer is configured for an import.
    tuned: bool,
    /// Excludes other imports while it is held.
    exclusive: Option<OwnedMutexGuard<()>>,
}

/// Result of writing a batch.
struct BatchResult {
    lines: u64,
    /// Duration, in milliseconds.
    elapsed: i64,
}

/// Lines that are written together.
struct ImportBatch {
    rows: Vec<ImportRow>,
    /// Row index by key: of several lines for one key the last one counts, and one statement must not contain a key
    /// twice.
    positions: HashMap<KeyHash, usize>,
    first: u64,
    last: u64,
    lines: u64,
    bytes: usize,
    sum: digest::Context,
}

struct ImportRow {
    hash: KeyHash,
    /// The attribute that identifies the caller.
    key: String,
    key_prefix: String,
    tier: Option<String>,
    overrides: String,
    effective_at: Option<i64>,
    expires_at: Option<i64>,
    reason: String,
    author: String,
    /// Terms in effect until `effective_at`; if absent, the existing row's.
    until: Option<PriorTerms<String>>,
}

impl ImportRow {
    /// Replaces a line for the same key, which would have been written first.
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
            Some(index) => self.rows[*index] = row.after(&self.rows[*index], now),
            None => {
                self.positions.insert(row.hash, self.rows.len());
                self.rows.push(row);
            }
        }
    }
}

impl Import {
    /// Begins an import; returns `None` while another is running.
    #[must_use]
    pub fn begin(control: &Arc<ControlPlane>, rules: Arc<Ruleset>, actor: Actor) -> Option<Self> {
        let exclusive = Arc::clone(&control.import_lock).try_lock_owned().ok()?;
        let control = Arc::clone(control);
        let (batch, report) = (ImportBatch::default(), ImportReport::default());
        Some(Self {
            control,
            rules,
            actor,
            batch,
            full: MIN_BATCH,
            busy_millis: 0,
            writing: None,
            report,
            lengths: HashMap::new(),
            tuned: false,
            exclusive: Some(exclusive),
        })
    }

    /// Adds a line, or records why it is invalid. `sent` is the line as received.
    ///
    /// # Errors
    /// [`ControlError`] if the previous batch could not be written.
    pub async fn line(&mut self, line: u64, sent: &[u8], read: ImportLine) -> Result<(), ControlError> {
        match self.validate(read).and_then(|row| self.add_length(row)) {
            Ok(row) => self.batch.add(line, sent, row, self.control.now_seconds()),
            Err(error) => self.reject_line(line, error.detail, Some(error.place)),
        }
        if self.batch.rows.len() >= self.full || self.batch.bytes >= MAX_BATCH_BYTES {
            self.await_batch().await?;
            let batch = std::mem::take(&mut self.batch);
            let pause = self.yield_between_batches();
            self.tuned = true;
            self.control.db.importing(ImportPhase::Begins).await?;
            let (control, actor) = (Arc::clone(&self.control), self.actor.clone());
            self.writing = Some(tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                control.write_batch(batch, &actor).await
            }));
        }
        Ok(())
    }

    /// Returns the pause before the next batch. Writers in this process get their turn without one.
    fn yield_between_batches(&mut self) -> Duration {
        if self.busy_millis < BATCH_TARGET || !matches!(self.control.db, Db::Sqlite { .. }) {
            return Duration::ZERO;
        }
        self.busy_millis = 0;
        MIN_PAUSE
    }

    /// Records a rejected line.
    pub fn reject_line(&mut self, line: u64, detail: String, place: Option<String>) {
        self.report.failed += 1;
        if self.report.errors.len() < MAX_ERRORS {
            self.report.errors.push(LineError { line, detail, place });
        }
    }

    /// Returns the number of lines that have taken effect so far.
    #[must_use]
    pub fn imported(&self) -> u64 {
        self.report.imported
    }

    /// Waits for the batch being written, and discards lines that are still being collected.
    ///
    /// # Errors
    /// [`ControlError`] if the batch could not be written.
    pub async fn abort(&mut self) -> Result<(), ControlError> {
        let written = self.await_batch().await;
        self.restore_writer().await;
        written
    }

    async fn restore_writer(&mut self) {
        restore_writer(&self.control).await;
        self.tuned = false;
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

    /// Writes the remaining lines. All of them are active on this node when this returns.
    ///
    /// # Errors
    /// [`ControlError`] if they could not be written.
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
        let (key, value) = read.caller();
        if read.api_key.is_some() && (key != CALLER_KEY || read.value.is_some()) {
            return problem("api_key", "the caller is identified by `key` and `value`; omit `api_key`");
        }
        let sent = if key == CALLER_KEY { "api_key" } else { "value" };
        let (hash, key_prefix) = match (value, &read.id) {
            (Some(value), id) => {
                check_text(sent, value, 1, tollgate_replica::MAX_KEY_BYTES)?;
                let hash = self.control.hasher.hash_value(key, value);
                if id.as_ref().is_some_and(|id| KeyHash::parse(id) != Some(hash)) {
                    return problem("id", "not the id of this caller in this installation; omit it");
                }
                (hash, shown(key, value))
            }
            (None, Some(id)) => {
                let ours = self.control.installation_id();
                if read.installation.as_deref().is_some_and(|installation| installation != ours) {
                    return problem(
                        "installation",
                        "exported by another installation, whose ids are not valid here; send `api_key`, or `key` and `value`, instead",
                    );
                }
                let Some(hash) = KeyHash::parse(id) else {
                    return problem(
                        "id",
                        "must be the 64 hexadecimal digits of an export; send `api_key`, or `key` and `value`, instead",
                    );
                };
                let key_prefix = read.key_prefix.clone().unwrap_or_default();
                check_text("key_prefix", &key_prefix, 0, 64)?;
                (hash, key_prefix)
            }
            (None, None) => {
                return problem(
                    sent,
                    "missing caller; send `api_key`, `key` and `value`, or the `id` of an export",
                );
            }
        };
        let (key, value) = (key.to_owned(), value.map(str::to_owned));
        let (draft, until_effective) = (read.spec(), read.until_effective);
        let valid = self.control.validate_quota(draft, &self.rules, &key, value.as_deref())?;
        let now = self.control.now_seconds();
        let until = until_effective.filter(|_| is_pending(valid.effective_at, now));
        let until = until.map(|until| self.validate_prior_terms(&key, until)).transpose()?.flatten();
        Ok(ImportRow {
            hash,
            key,
            key_prefix,
            tier: valid.tier,
            overrides: serde_json::to_string(&valid.overrides).unwrap_or_default(),
            effective_at: valid.effective_at,
            expires_at: valid.expires_at,
            reason: valid.reason,
            author: valid.author.unwrap_or_else(|| self.actor.name.clone()),
            until,
        })
    }

    /// Checks the length of a network beside those of the earlier lines, which the quota table does not contain yet.
    fn add_length(&mut self, row: ImportRow) -> Result<ImportRow, ValidationError> {
        if let Some(network) = network(&row.key, &row.key_prefix) {
            let control = &self.control;
            let lengths =
                self.lengths.entry(row.key.clone()).or_insert_with(|| control.quota_table.lengths(&row.key));
            check_length(lengths, network.bits())?;
            if !lengths.contains(&network.bits()) {
                lengths.push(network.bits());
            }
        }
        Ok(row)
    }

    /// Validates the terms in effect until then; returns `None` if they would have expired by now.
    fn validate_prior_terms(
        &self,
        key: &str,
        sent: CurrentTerms,
    ) -> Result<Option<PriorTerms<String>>, ValidationError> {
        let within = |error: ValidationError| ValidationError {
            place: format!("until_effective.{}", error.place),
            detail: error.detail,
        };
        let CurrentTerms { tier, overrides, expires_at } = sent;
        let expires_at = expires_at.map(|at| parse_time("expires_at", &at)).transpose().map_err(within)?;
        let draft = QuotaSpec { tier, overrides, ..QuotaSpec::default() };
        let valid = draft.validate(&self.rules, self.control.clock.now(), key, None).map_err(within)?;
        let overrides = serde_json::to_string(&valid.overrides).unwrap_or_default();
        let until = PriorTerms { tier: valid.tier, overrides, expires_at };
        Ok(until.active(None, None, self.control.now_seconds()))
    }
}

async fn restore_writer(control: &ControlPlane) {
    if let Err(error) = control.db.importing(ImportPhase::Ends).await {
        tracing::debug!(%error, "restoring writer settings after an import failed");
    }
}

/// A client may disconnect at any time. The batch being written is completed, and the next import waits for the
/// cleanup.
impl Drop for Import {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if !self.tuned {
            return;
        }
        let (control, writing, exclusive) =
            (Arc::clone(&self.control), self.writing.take(), self.exclusive.take());
        runtime.spawn(async move {
            if let Some(writing) = writing {
                let _ = writing.await;
            }
            restore_writer(&control).await;
            drop(exclusive);
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
