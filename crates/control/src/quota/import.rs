//! Many agreements at once. Lines are checked one by one; those that can act are gathered and written some thousands at a
//! time, each batch in one transaction with one entry of the audit log. So memory stays what it is however many lines come,
//! other writers wait for one batch at most, and what was written before something failed stays.
//!
//! A batch is as large as can be written in about a second: keys are random, so that every row of a small one changes a page
//! of the index by itself, while rows of a large one share pages.

mod write;

use crate::auth::key_hash::{KeyHash, prefix};
use crate::control_plane::Control;
use crate::db::transaction::Actor;
use crate::db::{Db, Importing};
use crate::error::{ControlError, QuotaProblem, text, time};
use crate::quota::overrides::QuotaOverride;
use crate::quota::pending::{QuotaUntil, Until, is_to_come};
use crate::quota::record::{QuotaDraft, agreement};
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
const FEWEST: usize = 4_000;
const MOST: usize = 32_000;
/// Bytes of lines in one transaction: rows may be long.
const MOST_BYTES: usize = 16 << 20;
/// How long a transaction should take at most, in milliseconds.
const GOAL: i64 = 1_000;
/// Other processes look every tenth of a second whether a file of SQLite can be written to; so long nobody here does.
const BREATH: Duration = Duration::from_millis(110);
/// Errors that are told of; all are counted.
const MOST_ERRORS: usize = 1_000;

agreement! {
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
        pub until_effective: Option<QuotaUntil>,
    }
}

/// What came of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Imported {
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
    control: Arc<Control>,
    rules: Arc<Ruleset>,
    actor: Actor,
    batch: Batch,
    /// How many rows make a batch now.
    full: usize,
    /// How long this node has written without a pause, in milliseconds.
    breathless: i64,
    /// The batch before, which is written while this one is gathered.
    writing: Option<JoinHandle<Result<Written, ControlError>>>,
    told: Imported,
    /// Whether the writer of the database is prepared for much at once.
    unusual: bool,
    /// No other import is under way while this is held.
    only: Option<OwnedMutexGuard<()>>,
}

/// What became of a batch.
struct Written {
    lines: u64,
    /// In milliseconds.
    took: i64,
}

/// Lines that are to be written together.
struct Batch {
    rows: Vec<BulkRow>,
    /// Where a key is already: of several lines about it the last counts, and one statement must not meet it twice.
    places: HashMap<KeyHash, usize>,
    first: u64,
    last: u64,
    lines: u64,
    bytes: usize,
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
    /// What acts until `effective_at`; where nothing is here, what the row has that is there.
    until: Option<Until<String>>,
}

impl BulkRow {
    /// In place of a line about the same key, which would have been written first.
    fn after(mut self, before: &Self, now: i64) -> Self {
        if self.until.is_none() && is_to_come(self.effective_at, now) {
            let Self { tier, overrides, expires_at, .. } = before;
            let own = Until { tier: tier.clone(), overrides: overrides.clone(), expires_at: *expires_at };
            self.until = own.acting(before.effective_at, before.until.clone(), now);
        }
        self
    }
}

impl Default for Batch {
    fn default() -> Self {
        let sum = digest::Context::new(&digest::SHA256);
        Self { rows: Vec::new(), places: HashMap::new(), first: 0, last: 0, lines: 0, bytes: 0, sum }
    }
}

impl Batch {
    fn add(&mut self, line: u64, sent: &[u8], row: BulkRow, now: i64) {
        if self.lines == 0 {
            self.first = line;
        }
        self.last = line;
        self.lines += 1;
        self.bytes += sent.len();
        self.sum.update(sent);
        self.sum.update(b"\n");
        match self.places.get(&row.hash) {
            Some(place) => self.rows[*place] = row.after(&self.rows[*place], now),
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
        Some(Self {
            control,
            rules,
            actor,
            batch,
            full: FEWEST,
            breathless: 0,
            writing: None,
            told,
            unusual: false,
            only: Some(only),
        })
    }

    /// Takes a line in, or notes what is wrong with it. `sent` is the line as it came.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take what was gathered before.
    pub async fn line(&mut self, line: u64, sent: &[u8], read: ImportLine) -> Result<(), ControlError> {
        match self.check(read) {
            Ok(row) => self.batch.add(line, sent, row, self.control.now_seconds()),
            Err(wrong) => self.refuse(line, wrong.detail, Some(wrong.place)),
        }
        if self.batch.rows.len() >= self.full || self.batch.bytes >= MOST_BYTES {
            self.written().await?;
            let batch = std::mem::take(&mut self.batch);
            let breath = self.breath();
            self.unusual = true;
            self.control.db.importing(Importing::Begins).await?;
            let (control, actor) = (Arc::clone(&self.control), self.actor.clone());
            self.writing = Some(tokio::spawn(async move {
                tokio::time::sleep(breath).await;
                control.write_batch(batch, &actor).await
            }));
        }
        Ok(())
    }

    /// How long to wait before the next batch. Those in this process who write get their turn anyway.
    fn breath(&mut self) -> Duration {
        if self.breathless < GOAL || !matches!(self.control.db, Db::Sqlite { .. }) {
            return Duration::ZERO;
        }
        self.breathless = 0;
        BREATH
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

    /// Waits until what came so far is written, and leaves out what is still being gathered.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take it.
    pub async fn break_off(&mut self) -> Result<(), ControlError> {
        let written = self.written().await;
        self.tidy().await;
        written
    }

    async fn tidy(&mut self) {
        tidy(&self.control).await;
        self.unusual = false;
    }

    async fn written(&mut self) -> Result<(), ControlError> {
        if let Some(writing) = self.writing.take() {
            let written = writing.await.map_err(|error| ControlError::Broken(error.to_string()))??;
            self.told.imported += written.lines;
            self.breathless += written.took;
            self.full = match written.took {
                ..=500 => (self.full * 2).min(MOST),
                501..=GOAL => self.full,
                _ => (self.full / 2).max(FEWEST),
            };
        }
        Ok(())
    }

    /// Writes the rest. All of it acts on this node when this returns.
    ///
    /// # Errors
    /// [`ControlError`] if the database did not take it.
    pub async fn finish(&mut self) -> Result<Imported, ControlError> {
        let written = self.write_rest().await;
        self.tidy().await;
        written?;
        self.control.act().await;
        Ok(std::mem::take(&mut self.told))
    }

    async fn write_rest(&mut self) -> Result<(), ControlError> {
        self.written().await?;
        let batch = std::mem::take(&mut self.batch);
        if batch.lines > 0 {
            self.told.imported += self.control.write_batch(batch, &self.actor).await?.lines;
        }
        Ok(())
    }

    fn check(&self, read: ImportLine) -> Result<BulkRow, QuotaProblem> {
        let problem = |place: &str, detail: &str| {
            Err(QuotaProblem { place: place.to_owned(), detail: detail.to_owned() })
        };
        let (hash, key_prefix) = match (&read.api_key, &read.id) {
            (Some(api_key), id) => {
                text("api_key", api_key, 1, crate::auth::key_hash::LONGEST)?;
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
        let ImportLine { tier, overrides, effective_at, expires_at, reason, author, until_effective, .. } =
            read;
        let draft = QuotaDraft { tier, overrides, effective_at, expires_at, reason, author };
        let checked = draft.check(&self.rules, self.control.clock.now())?;
        let now = self.control.now_seconds();
        let until = until_effective.filter(|_| is_to_come(checked.effective_at, now));
        let until = until.map(|until| self.check_until(until)).transpose()?.flatten();
        Ok(BulkRow {
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
    fn check_until(&self, sent: QuotaUntil) -> Result<Option<Until<String>>, QuotaProblem> {
        let within = |wrong: QuotaProblem| QuotaProblem {
            place: format!("until_effective.{}", wrong.place),
            detail: wrong.detail,
        };
        let QuotaUntil { tier, overrides, expires_at } = sent;
        let expires_at = expires_at.map(|at| time("expires_at", &at)).transpose().map_err(within)?;
        let draft = QuotaDraft { tier, overrides, ..QuotaDraft::default() };
        let checked = draft.check(&self.rules, self.control.clock.now()).map_err(within)?;
        let overrides = serde_json::to_string(&checked.overrides).unwrap_or_default();
        let until = Until { tier: checked.tier, overrides, expires_at };
        Ok(until.acting(None, None, self.control.now_seconds()))
    }
}

async fn tidy(control: &Control) {
    if let Err(error) = control.db.importing(Importing::Ends).await {
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
            tidy(&control).await;
            drop(only);
        });
    }
}

impl std::fmt::Debug for Import {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Import").field("told", &self.told).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
